"""The vLLM engine: the model runs in a process of its own, which ends (and gives its memory back) with the engine.

What is sent are token ids and explicit sampling values; texts and stop tokens are treated here exactly as the transformers
engine does. vLLM itself is imported in the other process only (:mod:`xcompress.engines.vllm_worker`), so nothing of it is
needed to import this module.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import IO, Any

from xcompress import checkpoint
from xcompress.engines.base import Generation, Progress, Request, check_length, text_until
from xcompress.schema import UsageError
from xcompress.settings import Settings

log = logging.getLogger(__name__)
LOWEST_TEMPERATURE = 0.01  # vLLM silently raises a lower one to this
HIGHEST_TEMPERATURE = 2.0  # and refuses a higher one
_CPU_CACHE_GB = 1.5  # vLLM would take a share of all memory, as on a GPU
_END_SECONDS = 30.0  # how long the process may take to end by itself


class VLLMEngine:
    """Text generation with vLLM. Made by :func:`open_engine`, where the arguments are explained.

    Raises:
        UsageError: vLLM is missing, or cannot run the model; the sentence is vLLM's own.
    """

    name = "vllm"

    def __init__(self, folder: Path, dtype: str, device: str, max_context: int | None, options: Mapping[str, Any]) -> None:
        self.folder = folder
        self.dtype = dtype
        self.tokenizer: Any = checkpoint.load_tokenizer(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        limits = [n for n in (max_context, window(config)) if n]
        self.max_context = min(limits) if limits else 4096
        self.stop_ids = checkpoint.stop_ids(self.tokenizer, folder)
        # In half precision another batch gives other roundings, and with them other texts; in float32 only ties are left.
        self.reproducible = dtype == "float32"
        self._lock = threading.Lock()
        checkpoint.check_complete(folder)  # vLLM runs with whatever is in memory where a linear layer's weight is missing
        log.info("starting vLLM with %s (%s, %s)", checkpoint.model_name(folder), dtype, device)
        self._process = _Process(
            device,
            {
                **options,
                "model": str(folder),
                "dtype": dtype,
                "max_model_len": self.max_context,
                "architectures": config.get("architectures") or [],
            },
        )
        self.close = weakref.finalize(self, self._process.end)  # also at the end of the program

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        """See :class:`xcompress.engines.base.Engine`. Every draw is a request of its own; prompts share the prefix cache.

        Raises:
            UsageError: also for a beam search, which vLLM does not do as the other engine does.
        """
        for request in requests:
            check_length(request, self.max_context)
            if request.beams:
                raise UsageError(NO_BEAMS.format(name=self.name))
            for draw in request.draws:
                check_temperature(draw.temperature)
        wanted = [
            {
                "prompt": list(request.prompt),
                "temperature": draw.temperature,
                "top_p": draw.top_p,
                "seed": draw.seed,
                "max_tokens": request.max_new_tokens,
                "stop": list(request.stop),
                "stop_token_ids": sorted(self.stop_ids),
                "repetition_penalty": request.repetition_penalty,
            }
            for request in requests
            for draw in request.draws
        ]
        answers = iter(self._ask("generate", wanted, progress))
        return [[self._generation(request, *next(answers)) for _ in request.draws] for request in requests]

    def _generation(self, request: Request, tokens: list[int], logprobs: list[float], finish_reason: str) -> Generation:
        if tokens and finish_reason == "stop" and tokens[-1] in self.stop_ids:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        total = math.fsum(logprobs)
        self._check_finite(total)
        return Generation(text_until(self.tokenizer, tokens, request.stop), tuple(tokens), finish_reason, total)

    def token_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """See :class:`xcompress.engines.base.Engine`. vLLM computes every prompt whose tokens it scores from its start."""
        for context, continuation in pairs:
            if not context or not continuation:
                raise ValueError("context and continuation must both hold at least one token")
            check_length(Request(tuple(context), (), len(continuation)), self.max_context)
        found: list[list[float]] = self._ask("score", [(list(context), list(end)) for context, end in pairs], None)
        for logprobs in found:
            self._check_finite(math.fsum(logprobs))
        return found

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """See :class:`xcompress.engines.base.Engine`."""
        return [math.fsum(logprobs) for logprobs in self.token_logprobs(pairs)]

    def _ask(self, what: str, items: Sequence[Any], progress: Progress | None) -> Any:
        if not items:
            return []
        with self._lock:
            return self._process.ask(what, items, progress)

    def _check_finite(self, logprob: float) -> None:
        if not math.isfinite(logprob):
            name = checkpoint.model_name(self.folder)
            raise UsageError(f"{name} gives non-finite logits in {self.dtype} under vLLM; use float32")


NO_BEAMS = (
    "engine={name} cannot do the beam search of the authors' release (its penalty applies to the scores of beams);"
    " set engine=hf for this method, or method.options=sampled"
)


def check(settings: Settings) -> None:
    """What can be refused before anything is loaded (called where a run is set up).

    Raises:
        UsageError: vLLM is not there, or cannot do what the settings ask.
    """
    check_beams(settings, "vllm")
    check_temperature(settings.generation.temperature)
    models_needed = {"generate", "stepwise", "read"} & set(settings.stages)
    on_other_machines = settings.execution.get("address") is not None
    if models_needed and not on_other_machines:
        check_installed()


def check_beams(settings: Settings, name: str) -> None:
    """Refuse the release's beam search."""
    method = settings.method
    if "stepwise" in settings.stages and method.policy == "stepwise" and method.options == "beams":
        raise UsageError(NO_BEAMS.format(name=name))


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that vLLM would change or not take."""
    if temperature and not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
        raise UsageError(
            f"vLLM samples at temperatures of {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}, not {temperature};"
            " change generation.temperature, or set engine=hf"
        )


def installed() -> bool:
    """Whether vLLM is there (it is not imported)."""
    return importlib.util.find_spec("vllm") is not None


def check_installed() -> None:
    """Raises:
    UsageError: vLLM is not there.
    """
    if not installed():
        raise UsageError("engine=vllm needs vLLM, which is not installed: pip install -e '.[vllm]'; or set engine=hf")


def window(config: Mapping[str, Any]) -> int | None:
    """The longest text of a model by its ``config.json`` (image-text checkpoints nest it; GPT-2 has its own name)."""
    text = config.get("text_config") or config
    found = text.get("max_position_embeddings") or text.get("n_positions")
    if found is None and "text_config" in config:  # a nested configuration leaves out what its family has by default
        from transformers import AutoConfig

        family: Any = AutoConfig
        found = family.for_model(config["model_type"], text_config=dict(text)).get_text_config().max_position_embeddings
    return None if found is None else int(found)


class _Process:
    """The other process, and the questions it answers one after the other."""

    def __init__(self, device: str, options: Mapping[str, Any]) -> None:
        self.connection, theirs = Pipe()
        self._busy = False
        self._said_something = False  # its output is then kept, since a sentence names the file
        self.output: IO[bytes] = tempfile.NamedTemporaryFile(prefix="xcompress-vllm-", suffix=".log", delete=False)  # noqa: SIM115
        root = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            # One scheduler in one process decides in a fixed order; nothing races with the requests that come in.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            **_visible(device, int(options["tensor_parallel_size"])),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "xcompress.engines.vllm_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        try:
            self.ask("open", {**options, "device": device.partition(":")[0]}, None)
        except BaseException:
            self.end()
            raise

    def ask(self, what: str, items: Any, progress: Progress | None) -> Any:
        """The answer to one question.

        Raises:
            UsageError: vLLM refuses it, or the process has ended; the engine is of no use after that.
        """
        try:
            self._busy = True
            self.connection.send((what, items))
            while True:
                kind, content = self.connection.recv()
                if kind == "done":
                    self._busy = False
                    return content
                if kind == "progress":
                    if progress is not None:
                        progress(content)
                else:
                    self._busy = False
                    raise UsageError(self._sentence(content))
        except (EOFError, OSError) as error:
            code = self._wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            hint = "; it may have run out of memory" if code == -9 else ""
            raise UsageError(self._sentence(f"the process {how}{hint}")) from error

    def _sentence(self, why: str) -> str:
        self._said_something = True
        advice = ""
        if any(word in why.lower() for word in ("memory", "kv cache")):
            advice = "; see engine.gpu_memory_utilization, engine.cache_gb and engine.max_context"
        return f"vLLM: {why}{advice} (its own words: {self.output.name})"

    def _wait(self) -> int:
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def end(self) -> None:
        """End the process and wait until it has: only then is its memory free."""
        if not self._busy:
            with contextlib.suppress(OSError):
                self.connection.send(("end", None))  # it ends the processes of its own (one a GPU), then itself
                self._wait()
        self.connection.close()  # in the middle of a question it ends because nobody is at the other end
        self._wait()
        self.output.close()
        if not self._said_something:
            Path(self.output.name).unlink(missing_ok=True)


def _visible(device: str, cards: int) -> dict[str, str]:
    """``cuda:1`` is the second of the GPUs that this process may see.

    Raises:
        UsageError: there are fewer, or several are wanted beside a certain one.
    """
    _, _, number = device.partition(":")
    if not number:
        return {}
    if cards > 1:
        raise UsageError(f"device {device} is one GPU, engine.tensor_parallel_size={cards} wants several; set device to cuda")
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if seen and int(number) >= len(seen):
        raise UsageError(f"device {device} does not exist; CUDA_VISIBLE_DEVICES names {len(seen)}")
    return {"CUDA_VISIBLE_DEVICES": seen[int(number)] if seen else number}


def open_engine(
    folder: Path,
    dtype: str,
    device: str,
    max_context: int | None = None,
    gpu_memory_utilization: float = 0.9,
    cache_gb: float | None = None,
    prefill_tokens: int | None = None,
    max_num_seqs: int = 128,
    tensor_parallel_size: int = 1,
    quantization: str | None = None,
    prefix_caching: bool = True,
    enforce_eager: bool | None = None,
) -> VLLMEngine:
    """The engine of a model folder (``configs/engine/vllm.yaml``); stages that use the same model share its process.

    Args:
        folder: the model.
        dtype: of its weights; "auto" as :func:`xcompress.checkpoint.pick_dtype` decides.
        device: where it runs; vLLM is built for one kind of device, and another is refused.
        max_context: prompt plus continuation, in tokens; None takes the model's own limit.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and cache.
        cache_gb: memory for keys and values in GiB; None takes what is left of the share (1.5 on a CPU).
        prefill_tokens: tokens of one step; None is vLLM's choice. On a CPU never fewer than ``max_context``.
        max_num_seqs: texts generated together, at most.
        tensor_parallel_size: GPUs that share the model.
        quantization: a method of vLLM's for weights ("fp8", ...); None as the checkpoint says.
        prefix_caching: compute beginnings that prompts share once.
        enforce_eager: no compilation and no CUDA graphs: starts sooner, runs slower. None: only on a CPU, where compiling a
            small model takes longer than it saves.

    Raises:
        UsageError: vLLM is missing, or cannot run the model.
    """
    check_installed()
    device = checkpoint.pick_device(device)
    dtype = checkpoint.pick_dtype(dtype, device, folder)
    if device == "cpu":
        cache_gb = _CPU_CACHE_GB if cache_gb is None else cache_gb
        enforce_eager = True if enforce_eager is None else enforce_eager
    options = {
        "gpu_memory_utilization": gpu_memory_utilization,
        "cache_gb": cache_gb,
        "prefill_tokens": prefill_tokens,
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": tensor_parallel_size,
        "quantization": quantization,
        "prefix_caching": prefix_caching,
        "enforce_eager": bool(enforce_eager),
    }
    key = ("vllm", str(folder), dtype, device, max_context, *options.items())
    return checkpoint.hold(key, lambda: VLLMEngine(folder, dtype, device, max_context, options))
