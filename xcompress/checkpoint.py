"""Model folders: where they are, what identifies them, and loading them so that nothing is silently wrong.

Nothing here touches the network: a checkpoint is a local folder or a snapshot already in the Hugging Face cache, and a missing
one ends in one sentence that says how to get it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xcompress.schema import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
_SAMPLE = 1 << 20  # bytes read at each of the sampled places of a weight file
_PLACES = 16


def locate(model: str, revision: str | None = None) -> Path:
    """The folder of ``model``: a local folder, or a hub name that is already in the local cache.

    Raises:
        UsageError: neither; the sentence names what is missing and the command that gets it.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _checked(folder, model)
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise UsageError(f"model folder {model} does not exist; give the path of a folder with config.json and *.safetensors")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _checked(Path(snapshot_download(model, revision=revision, local_files_only=True)), model)
    except HFValidationError:
        raise UsageError(f"model {model} is neither an existing folder nor a possible name on the hub") from None
    except (LocalEntryNotFoundError, OSError):
        at = f" --revision {revision}" if revision else ""
        raise UsageError(
            f"model {model}{f' at revision {revision}' if revision else ''} is not on this machine; get it with"
            f" `hf download {model}{at}` (for gated models accept the licence on its page and run `hf auth login` first),"
            " or give the path of a local folder instead of its name"
        ) from None


def _checked(folder: Path, model: str) -> Path:
    if not (folder / "config.json").is_file():
        raise UsageError(f"model {model}: {folder} holds no config.json, so it is not a model folder")
    weights = list(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        absent = [name for name in wanted if not (folder / name).is_file()]
        if absent:
            raise UsageError(f"model {model} is incomplete: {folder} lacks {', '.join(absent[:3])}; download it again")
    elif not weights:
        raise UsageError(f"model {model}: {folder} holds no *.safetensors weights (pickled weights are not read)")
    return folder


@lru_cache(maxsize=32)
def fingerprint(folder: Path) -> str:
    """What identifies a checkpoint's behaviour: small files in full; of weight files name, size and 16 sampled places.

    Sampling keeps this instant for 100 GB folders; fine-tuned copies differ in every sampled place.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.suffix not in {".json", ".safetensors", ".jinja", ".model", ".txt"}:
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _PLACES * _SAMPLE:
                digest.update(file.read())
            else:
                for place in range(_PLACES):
                    file.seek(place * (size - _SAMPLE) // (_PLACES - 1))
                    digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def model_name(folder: Path) -> str:
    """``meta-llama/Llama-3.1-8B`` for a snapshot in the hub's cache (whose folder is a commit), else the folder's name."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.name


@dataclass(frozen=True)
class Loaded:
    """A causal language model in memory with its tokenizer.

    Scoring hooks into the model while it runs, and fast tokenizers refuse a second caller: threads that share a model take its
    ``lock`` (:class:`xcompress.controller.XCompress` and :class:`xcompress.scorer.SPSScorer` do).
    """

    folder: Path
    model: Any  # PreTrainedModel; its classes are not typed
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    device: torch.device
    lock: AbstractContextManager[Any] = field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def name(self) -> str:
        """What people call it: the hub name of a cached snapshot, else the folder's name."""
        return model_name(self.folder)

    @property
    def text_config(self) -> Any:
        """The language part of the configuration (image-text checkpoints nest it)."""
        return self.model.config.get_text_config()

    @property
    def decoder(self) -> Any:
        """The language part without its output head; called with ids it returns final-normed states [B, T, D]."""
        return self.model.get_decoder()

    @property
    def blocks(self) -> torch.nn.ModuleList:
        """The L transformer blocks in order (found by their number, whatever a family calls the list)."""
        import torch

        wanted = self.text_config.num_hidden_layers
        lists = [m for m in self.decoder.children() if isinstance(m, torch.nn.ModuleList) and len(m) == wanted]
        if len(lists) != 1:
            raise UsageError(f"{self.name}: cannot tell which of {len(lists)} module lists holds the {wanted} blocks")
        return lists[0]

    def states(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final-normed states [B, T, D] of right-padded ids [B, T] at ``positions`` [B, T]."""
        states: torch.Tensor = self.decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Next-token logits [..., V] in float32 from final-normed states [..., D]."""
        logits: torch.Tensor = self.model.get_output_embeddings()(states).float()
        cap = getattr(self.text_config, "final_logit_softcapping", None)
        return logits if cap is None else (logits / cap).tanh() * cap

    def check_head(self) -> None:
        """Compare :meth:`states` and :meth:`logits` with the model's own forward pass on three tokens.

        Raises:
            UsageError: the logits are not finite, or the family scales them in a way this program does not know.
        """
        import torch

        ids = torch.tensor([[1, 2, 3]], device=self.device) % self.text_config.vocab_size
        positions = torch.arange(3, device=self.device)[None]
        with torch.inference_mode():
            own = self.logits(self.states(ids, positions))
            theirs = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        if not bool(torch.isfinite(theirs).all()):
            raise UsageError(f"{self.name} gives non-finite logits in {self.dtype}; use float32, or download it again")
        if not torch.allclose(own, theirs, rtol=1e-2, atol=1e-2):
            raise UsageError(f"{self.name} ({self.text_config.model_type}) computes its logits in an unknown way")


_cache: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
T = TypeVar("T")


def hold(key: tuple[Any, ...], make: Callable[[], T], keep: int = 1) -> T:
    """What ``make`` returns, from memory if it was made under this key before.

    For engines that hold a model elsewhere (in another process). They count among the ``keep`` of :func:`load`: one is released
    before a model is loaded, and the other way round, so that a GPU never has to hold both unless somebody still uses both.
    """
    if key in _cache:
        _cache.move_to_end(key)
        found: T = _cache[key]
        return found
    release(keep - 1)
    made = make()
    _cache[key] = made
    return made


def pick_device(device: str) -> str:
    """``auto`` becomes cuda where there is one, else cpu; anything else is returned as it is."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(dtype: str, device: str, folder: Path) -> str:
    """``auto`` becomes bfloat16 where the device computes in it, else float32. Pairs known to overflow are raised to float32.

    Gemma 3 overflows in float16 (hidden states beyond 65504), so that pair runs in float32 with a warning.
    """
    import torch

    if dtype == "auto":
        native = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if native else "float32"
    family = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "")
    if dtype == "float16" and family.startswith("gemma"):
        log.warning("%s overflows in float16; using float32 instead", family)
        return "float32"
    if dtype not in {"float32", "bfloat16", "float16"}:
        raise UsageError(f"dtype {dtype!r} is not known; choose auto, float32, bfloat16 or float16")
    return dtype


def quiet_transformers() -> None:
    """Turn off transformers' own progress bars."""
    from transformers.utils import logging as transformers_logging

    switch: Any = transformers_logging.disable_progress_bar
    switch()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of ``folder``; no network, no remote code."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file can raise anything; tokenizers' own errors are plain Exceptions
        raise UsageError(f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}") from error


def load(folder: Path, dtype: str = "auto", device: str = "auto", keep: int = 1) -> Loaded:
    """The model of ``folder``, from memory if it was loaded before (stages that share a model load it once).

    At most ``keep`` models stay in memory; the oldest is released before a further one is loaded.

    Raises:
        UsageError: the folder cannot be loaded, a weight is missing, or the device lacks the memory.
    """
    device = pick_device(device)
    dtype = pick_dtype(dtype, device, folder)
    return hold((str(folder), dtype, device), lambda: _load(folder, dtype, device), keep)


def _load(folder: Path, dtype: str, device: str) -> Loaded:
    import torch

    log.info("loading %s (%s, %s)", model_name(folder), dtype, device)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from xcompress.attention import NAME
    from xcompress.products import use_onednn

    quiet_transformers()
    auto: Any = AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **({"device_map": device} if device.startswith("cuda") else {}),
        )
    except torch.cuda.OutOfMemoryError as error:
        raise UsageError(f"{model_name(folder)} does not fit on {device} in {dtype}: {_first_line(error)}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {_first_line(error)}") from error
    _refuse_missing(folder, info)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(f"{model_name(folder)}: some weights are not in memory (offloaded); use a device that holds the model")
    model.eval().requires_grad_(False)
    loaded = Loaded(folder, model.to(device), load_tokenizer(folder), getattr(torch, dtype), torch.device(device))
    use_onednn(loaded.model)
    loaded.check_head()
    return loaded


def check_complete(folder: Path) -> None:
    """Whether the checkpoint has every weight of its model, without reading one: for engines that would not notice.

    Quantised checkpoints store other tensors than the model has; they are not checked, and a warning says so.

    Raises:
        UsageError: weights are missing or have another shape, or the folder holds no model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        log.warning("%s is quantised: whether weights are missing is not checked", model_name(folder))
        return
    quiet_transformers()
    auto: Any = AutoModelForCausalLM
    try:
        _, info = auto.from_pretrained(
            folder,
            device_map="meta",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"the model in {folder} cannot be loaded: {_first_line(error)}") from error
    _refuse_missing(folder, info)


def _refuse_missing(folder: Path, info: Mapping[str, Any]) -> None:
    """Stop where transformers' loading report names weights that the checkpoint lacks, or that do not fit."""
    broken = sorted(info["missing_keys"]) + sorted(str(pair[0]) for pair in info["mismatched_keys"])
    if broken:
        raise UsageError(
            f"the checkpoint in {folder} lacks {len(broken)} weights that the model needs ({', '.join(broken[:3])}, ...);"
            " they would have been filled with random numbers"
        )


def release(keep: int = 0) -> None:
    """Give back the memory of all but the ``keep`` most recently used models."""
    while len(_cache) > max(0, keep):
        _cache.popitem(last=False)
        import gc

        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def stop_ids(loaded_tokenizer: PreTrainedTokenizerBase, folder: Path) -> frozenset[int]:
    """Ids that end a text: the tokenizer's end token and those the model's own files name (Llama 3 has three)."""
    ids: set[int] = set()
    if loaded_tokenizer.eos_token_id is not None:
        ids.add(int(loaded_tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
