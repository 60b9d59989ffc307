"""xcompress/checkpoint.py: finding model folders without a network, what identifies them, and loading nothing half."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from conftest import FAMILIES, VOCABULARY, make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, GraniteForCausalLM

from xcompress import checkpoint
from xcompress.checkpoint import Loaded, fingerprint, load, load_tokenizer, locate, pick_device, pick_dtype, release
from xcompress.schema import UsageError

Folders = Callable[[str], Path]
Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Any attempt to reach another machine, name look-ups included, is noted and fails."""
    attempts: list[object] = []

    def refuse(*args: object, **_: object) -> NoReturn:
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return attempts


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty set of loaded models for this test; those of other tests stay as they are."""
    monkeypatch.setattr(checkpoint, "_cache", type(checkpoint._cache)())
    yield


@pytest.fixture
def copy(tmp_path: Path, model_folder: Folders) -> Callable[[str], Path]:
    """A function: family to a copy of its folder that may be damaged."""
    return lambda family: Path(shutil.copytree(model_folder(family), tmp_path / f"{family}-copy"))


def identity(folder: Path) -> str:
    """The fingerprint as a new process would compute it."""
    fingerprint.cache_clear()
    return fingerprint(folder)


def edit(path: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def shard(folder: Path) -> list[str]:
    """Split a folder's weights in two files with an index; returns their names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    place = {tensor: names[at % 2] for at, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({t: tensors[t] for t in tensors if place[t] == name}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return names


def test_locate_folder(copy: Callable[[str], Path], no_network: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder by absolute or relative path, whole or in shards."""
    folder = copy("llama")
    assert locate(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert locate("llama-copy").samefile(folder)
    assert locate("./llama-copy").samefile(folder)
    names = shard(folder)
    assert locate(str(folder)) == folder
    (folder / names[1]).unlink()
    with pytest.raises(UsageError, match=rf"incomplete: .* lacks {names[1]}; download it again"):
        locate(str(folder))
    assert not no_network


def test_locate_says_what_is_missing(tmp_path: Path, copy: Callable[[str], Path], no_network: list[object]) -> None:
    """No folder, no configuration, no safetensors: each its own sentence."""
    for name in (str(tmp_path / "none"), "./none", "~/no-such-folder", "gpt2", "a/b/c"):
        with pytest.raises(UsageError, match=r"does not exist; give the path of a folder with config\.json"):
            locate(name)
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        locate(str(tmp_path))
    folder = copy("gpt2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"holds no \*\.safetensors weights \(pickled weights are not read\)"):
        locate(str(folder))
    assert not no_network


@pytest.mark.parametrize("offline", ["1", "0"])
def test_unknown_hub_name(offline: str, no_network: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the command, at once, and no connection is tried whether or not the offline switch is set."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline == "1")
    start = time.perf_counter()
    with pytest.raises(UsageError, match="`hf download no-such-org/no-such-model`") as error:
        locate("no-such-org/no-such-model")
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=r"at revision v1\.2 .*`hf download no-such-org/no-such-model --revision v1\.2`"):
        locate("no-such-org/no-such-model", "v1.2")
    assert time.perf_counter() - start < 2
    assert not no_network
    with pytest.raises(UsageError, match="neither an existing folder nor a possible name on the hub"):
        locate("my models/missing one")


def test_hub_name_in_the_cache(
    tmp_path: Path, model_folder: Folders, no_network: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that was downloaded before is found by its name; one whose weights never arrived is refused."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789" * 4
    entry = tmp_path / "models--org--name"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(commit, encoding="utf-8")
    snapshot = entry / "snapshots" / commit
    shutil.copytree(model_folder("qwen3"), snapshot)
    assert locate("org/name").samefile(snapshot)
    assert locate("org/name", commit).samefile(snapshot)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model org/name: .* holds no \*\.safetensors"):
        locate("org/name")
    assert not no_network


def test_fingerprint(copy: Callable[[str], Path], model_folder: Folders) -> None:
    """Equal for a copy elsewhere; one byte of weights, configuration, tokenizer or template changes it; notes do not."""
    folder = copy("llama")
    before = identity(model_folder("llama"))
    assert identity(folder) == before
    (folder / "README.md").write_text("notes", encoding="utf-8")
    assert identity(folder) == before
    seen = {before}
    for name, place in (("model.safetensors", 5_000), ("model.safetensors", -1), ("tokenizer.json", 400)):
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)
        seen.add(identity(folder))
    edit(folder / "config.json", rms_norm_eps=1e-3)
    seen.add(identity(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    seen.add(identity(folder))
    assert len(seen) == 6


def test_fingerprint_of_large_files(tmp_path: Path) -> None:
    """Files beyond 16 MiB are sampled: first and last byte, a longer file and another name all count."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(40 << 20)
    seen = {identity(tmp_path)}
    for place in (0, (40 << 20) - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        seen.add(identity(tmp_path))
    with path.open("r+b") as file:
        file.truncate((40 << 20) + 1)
    seen.add(identity(tmp_path))
    path.rename(tmp_path / "other.safetensors")
    seen.add(identity(tmp_path))
    assert len(seen) == 5


def test_missing_weight_is_refused(copy: Callable[[str], Path], own_cache: None) -> None:
    """A tensor that is not in the file is named, not filled with random numbers; so is one of another shape."""
    folder = copy("llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=rf"lacks 1 weights that the model needs \({name}, \.\.\.\)"):
        load(folder, "float32", "cpu")
    save_file({**tensors, name: torch.zeros(2, 2)}, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match="cannot be loaded"):
        load(folder, "float32", "cpu")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError, match="cannot be loaded"):
        load(folder, "float32", "cpu")
    assert not checkpoint._cache


def test_shards_load_like_one_file(copy: Callable[[str], Path], tiny: Tiny, own_cache: None) -> None:
    """The same weights whatever files they come in."""
    folder = copy("gemma3")
    shard(folder)
    mine, other = load(folder, "float32", "cpu").model.state_dict(), tiny("gemma3").model.state_dict()
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_memory(model_folder: Folders, own_cache: None) -> None:
    """The same model comes from memory, another one takes its place, ``keep`` holds more, ``release`` drops."""
    first = load(model_folder("llama"), "float32", "cpu")
    assert load(model_folder("llama"), "float32", "cpu") is first
    assert load(model_folder("llama"), "auto", "cpu") is first
    assert not first.model.training and not any(p.requires_grad for p in first.model.parameters())
    other = load(model_folder("llama"), "bfloat16", "cpu", keep=2)
    assert other is not first and other.dtype == torch.bfloat16 == other.model.dtype
    assert load(model_folder("llama"), "float32", "cpu", keep=2) is first
    load(model_folder("gpt2"), "float32", "cpu", keep=2)
    assert load(model_folder("llama"), "float32", "cpu", keep=2) is first, "the least recently used one had to go"
    release(1)
    assert list(checkpoint._cache.values()) == [first]
    release()
    assert not checkpoint._cache
    assert load(model_folder("llama"), "float32", "cpu") is not first


def test_loading_tries_no_network(copy: Callable[[str], Path], no_network: list[object], own_cache: None) -> None:
    """Model and tokenizer of a folder load with every connection refused."""
    loaded = load(copy("qwen3"), "float32", "cpu")
    assert loaded.tokenizer.decode(loaded.tokenizer("naïve text")["input_ids"]) == "naïve text"
    assert not no_network


def test_broken_tokenizer(copy: Callable[[str], Path]) -> None:
    """A folder without a usable tokenizer says so."""
    folder = copy("llama")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(folder)


def test_pick_dtype(model_folder: Folders, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit choices are kept but for pairs known to overflow; auto depends on what the device computes in natively."""
    llama, gemma = model_folder("llama"), model_folder("gemma3")
    assert [pick_dtype(name, "cpu", llama) for name in ("float32", "bfloat16", "float16", "auto")] == [
        "float32",
        "bfloat16",
        "float16",
        "float32",
    ]
    assert pick_dtype("bfloat16", "cpu", gemma) == "bfloat16"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert pick_dtype("float16", "cpu", gemma) == "float32"
    assert "overflows in float16; using float32 instead" in caplog.text
    for name in ("float64", "int8", "fp16", ""):
        with pytest.raises(UsageError, match="is not known; choose auto, float32, bfloat16 or float16"):
            pick_dtype(name, "cpu", llama)
    # Older cards only emulate bfloat16: torch says yes to that unless asked not to.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert pick_dtype("auto", "cuda:0", llama) == "float32"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert pick_dtype("auto", "cuda:0", llama) == "bfloat16"
    assert pick_dtype("auto", "cpu", llama) == "float32"
    assert pick_device("cpu") == "cpu" and pick_device("auto") in {"cpu", "cuda"}


def test_gemma_in_half_precision_runs_in_float32(
    model_folder: Folders, own_cache: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The dtype in use is the raised one, and the loaded model says so."""
    loaded = load(model_folder("gemma3"), "float16", "cpu")
    assert loaded.dtype == torch.float32 == loaded.model.dtype
    assert "using float32 instead" in caplog.text


def test_overflow_is_found_at_load(copy: Callable[[str], Path], own_cache: None) -> None:
    """Weights that are fine in float32 and infinite in float16 are refused with the remedy."""
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder, "float32", "cpu").dtype == torch.float32
    with pytest.raises(UsageError, match=r"non-finite logits in torch\.float16; use float32"):
        load(folder, "float16", "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_all_families(family: str, tiny: Tiny) -> None:
    """Blocks in order, the decoder's final-normed states, and logits equal to the model's own."""
    loaded = tiny(family)
    blocks = loaded.blocks
    assert len(blocks) == loaded.text_config.num_hidden_layers == 3
    order: list[int] = []
    hooks = [block.register_forward_hook(lambda *_, at=at: order.append(at)) for at, block in enumerate(blocks)]
    ids = torch.tensor([[1, 50, 60, 70]])
    positions = torch.arange(4)[None]
    with torch.inference_mode():
        states = loaded.states(ids, positions)
        theirs = loaded.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert order[:3] == [0, 1, 2]
    assert states.shape == (1, 4, 32)
    torch.testing.assert_close(states, theirs.hidden_states[-1])
    torch.testing.assert_close(loaded.logits(states), theirs.logits)
    loaded.check_head()


def test_unknown_head_is_refused(tmp_path: Path, own_cache: None) -> None:
    """Granite divides its logits after the head: refused rather than scored wrongly."""
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = GraniteConfig(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=0, logits_scaling=8.0, **size)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer(True).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"\(granite\) computes its logits in an unknown way"):
        load(tmp_path, "float32", "cpu")


def test_blocks_must_be_unambiguous(model_folder: Folders, own_cache: None) -> None:
    """Two lists of the right length: refused rather than guessed."""
    loaded = load(model_folder("llama"), "float32", "cpu")
    loaded.decoder.register_module("more", torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)]))
    with pytest.raises(UsageError, match="cannot tell which of 2 module lists"):
        _ = loaded.blocks
