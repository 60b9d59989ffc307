"""Which engine runs: ``engine=auto`` becomes one of the others, and what an engine cannot do is said at the start."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from xcompress.schema import UsageError
from xcompress.settings import Settings

log = logging.getLogger(__name__)
AUTO = "xcompress.engines.choose.resolve"


def resolve(settings: Settings) -> Settings:
    """Settings whose engine is a certain one, for this machine; all but ``engine=auto`` stay as they are.

    vLLM where it is installed and both models go to a GPU, else transformers. Everything that is stored is named by the engine
    that it becomes, so ``engine=auto`` shares the rows of ``engine=hf`` where it is that.
    """
    engine = settings.engine
    if engine.get("_target_") != AUTO:
        return settings
    from xcompress import checkpoint
    from xcompress.engines import vllm

    method = settings.method
    devices = {checkpoint.pick_device(model.device).partition(":")[0] for model in (settings.reader, settings.compressor)}
    if devices != {"cuda"}:
        name, why = "hf", "not both models go to a GPU"
    elif not vllm.installed():
        name, why = "hf_gpu", "vLLM is not installed"
    elif method.policy == "stepwise" and method.options == "beams":
        name, why = "hf_gpu", "vLLM cannot do the method's beam search"
    else:
        name, why = "vllm", "vLLM and a GPU are there"
    _say(name, why)
    return dataclasses.replace(settings, engine=engine[name])


@lru_cache(maxsize=8)
def _say(name: str, why: str) -> None:
    log.info("engine=auto is engine=%s (%s)", name, why)


def check(settings: Settings) -> None:
    """Ask the engine's module what it can tell without a model: its function ``check(settings)``, where it has one.

    Raises:
        UsageError: there is no such engine, or it cannot do what the settings ask.
    """
    target = str(settings.engine.get("_target_"))
    try:
        module = importlib.import_module(target.rpartition(".")[0])
    except (ImportError, ValueError) as error:
        raise UsageError(f"engine._target_={target} cannot be found: {error}") from None
    own: Any = getattr(module, "check", None)
    if own is not None:
        own(settings)


# Settings of memory, speed and place: they change rows by floating-point ties at most, and a run that was out of memory, or
# whose server is another one now, must be able to go on with others.
_TUNING = {
    *("cache_gb", "prefill_tokens", "gpu_memory_utilization", "max_num_seqs", "tensor_parallel_size", "prefix_caching"),
    *("enforce_eager", "base_url", "api_key_variable", "concurrency", "attempts", "timeout_seconds", "journal"),
}


def identity(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What of an engine's settings changes the rows."""
    return {key: value for key, value in engine.items() if key not in _TUNING}
