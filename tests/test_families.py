"""What the reader families do differently, on checkpoints saved to disk: nested layouts, scaled embeddings, half precision."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from xcompress import checkpoint
from xcompress.checkpoint import Loaded, check_complete, load
from xcompress.engines.base import Draw, Request
from xcompress.engines.hf import HFEngine
from xcompress.reader import TextScorer, load_basis, matrix_of
from xcompress.schema import UsageError
from xcompress.settings import ScoringSettings, SubspaceSettings

SETTINGS = ScoringSettings(
    {"embedding": SubspaceSettings("embedding"), "q_proj": SubspaceSettings("q_proj", center=True)}, [0.5, 0.9]
)
TEXTS = ["The old mill stands by the river.", "No bridge."]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_cache", checkpoint._cache.copy())


@pytest.fixture
def nested(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """The image-text checkpoint whose language part is the text-only one, in several files."""
    text = load_file(model_folder("gemma3") / "model.safetensors")
    whole = load_file(model_folder("gemma3_nested") / "model.safetensors")
    mine = {name: text.get(name.removeprefix("language_model."), tensor) for name, tensor in whole.items()}
    shared = [name for name in whole if name.startswith("language_model.") and name.removeprefix("language_model.") in text]
    assert len(shared) == len(text)
    names = sorted(mine)
    parts = {f"model-{at + 1:05d}-of-00003.safetensors": names[at::3] for at in range(3)}
    for file, members in parts.items():
        save_file({name: mine[name] for name in members}, tmp_path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, members in parts.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((model_folder("gemma3_nested") / file).read_bytes())
    make_tokenizer(True).save_pretrained(tmp_path)
    return tmp_path


def test_nested_is_its_language_part(nested: Path, tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    """Image-text layout, sharded: bases, SPS, NLL, gate ratio and greedy texts are those of the text-only checkpoint."""
    mine, other = load(nested, "float32", "cpu"), tiny("gemma3")
    assert mine.text_config.model_type == "gemma3_text" and len(mine.blocks) == 3
    for name in SETTINGS.subspaces:
        assert torch.equal(matrix_of(mine, name), matrix_of(other, name))
    scores = [TextScorer(loaded, SETTINGS, tmp_path / name).score(TEXTS) for name, loaded in (("a", mine), ("b", other))]
    for got, expected in zip(*scores, strict=True):
        assert got is not None and expected is not None
        torch.testing.assert_close(torch.tensor(got.sps), torch.tensor(expected.sps), equal_nan=True)
        torch.testing.assert_close(torch.tensor(got.ratio), torch.tensor(expected.ratio), equal_nan=True)
        assert got.nll == pytest.approx(expected.nll, rel=1e-6)
    requests = [Request((1, *text.encode()), (Draw(), Draw(0.2, 0.9, 7)), 12) for text in TEXTS]
    assert HFEngine(mine).generate(requests) == HFEngine(other).generate(requests)


def test_a_missing_weight_of_the_language_part_stops(nested: Path) -> None:
    """Nothing of a nested checkpoint is filled with random numbers."""
    index = json.loads((nested / "model.safetensors.index.json").read_text(encoding="utf-8"))
    name = "language_model.model.layers.1.mlp.up_proj.weight"
    path = nested / index["weight_map"].pop(name)
    save_file({key: value for key, value in load_file(path).items() if key != name}, path, metadata={"format": "pt"})
    (nested / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UsageError, match=r"lacks 1 weights that the model needs \(.*layers\.1\.mlp\.up_proj"):
        load(nested, "float32", "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_checked_without_reading_it(
    family: str, model_folder: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole one passes; any tensor of a block that is taken away is named; quantised ones are said not to be checked."""
    folder = tmp_path / family
    shutil.copytree(model_folder(family), folder)
    check_complete(folder)
    whole = load_file(folder / "model.safetensors")
    removed = [name for name in sorted(whole) if ".1." in name and "vision" not in name][::3]
    assert len(removed) >= 3
    for name in removed:
        kept = {key: tensor for key, tensor in whole.items() if key != name}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(
            UsageError, match=rf"lacks 1 weights that the model needs \(.*{re.escape(name.partition('.1.')[2])}"
        ):
            check_complete(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "awq"}}), encoding="utf-8"
    )
    check_complete(folder)
    assert "whether weights are missing is not checked" in caplog.text
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be loaded"):
        check_complete(folder)


@pytest.mark.parametrize("family", ["gemma3", "gemma3_nested"])
@torch.inference_mode()
def test_scaled_embedding(
    family: str, tiny: Callable[[str], Loaded], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Gemma's embedding output is its matrix times sqrt(D). The basis is of the matrix, and a factor would not change it."""
    loaded = tiny(family)
    stored = load_file(model_folder(family) / "model.safetensors")
    (name,) = [key for key in stored if key.endswith("embed_tokens.weight")]
    matrix = matrix_of(loaded, "embedding")
    assert torch.equal(matrix, stored[name])
    ids = torch.tensor([[1, 50, 60]])
    torch.testing.assert_close(loaded.model.get_input_embeddings()(ids), matrix[ids] * 32**0.5)
    basis = load_basis(loaded, "embedding", SubspaceSettings("embedding"), tmp_path)
    _, values, right = torch.linalg.svd(matrix.double() * 32**0.5, full_matrices=False)
    torch.testing.assert_close(basis.values * 32**0.5, values, rtol=1e-6, atol=1e-6)
    rank = basis.rank(0.9)
    mine, other = basis.vectors[:, :rank].double(), right[:rank].T
    torch.testing.assert_close(mine @ mine.T, other @ other.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_weights_are_projected_in_float32(
    family: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """bfloat16: the basis is that of the rounded matrix in float32, and SPS is the residual of the states in float64."""
    loaded = load(model_folder(family), "bfloat16", "cpu")
    assert matrix_of(loaded, "embedding").dtype == torch.bfloat16
    scorer = TextScorer(loaded, ScoringSettings({"embedding": SubspaceSettings("embedding")}, [0.5]), tmp_path)
    basis = scorer.bases["embedding"]
    assert basis.vectors.dtype == torch.float32
    _, values, right = torch.linalg.svd(matrix_of(loaded, "embedding").double(), full_matrices=False)
    torch.testing.assert_close(basis.values, values, rtol=1e-6, atol=1e-6)
    (score,) = scorer.score(TEXTS[:1])
    assert score is not None and score.sps.dtype == "float32"
    caught: list[torch.Tensor] = []
    hook = loaded.blocks[-1].register_forward_pre_hook(lambda _, args, kwargs: caught.append(args[0]), with_kwargs=True)
    ids = loaded.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        loaded.states(torch.tensor([ids]), torch.arange(len(ids))[None])
    hook.remove()
    x = caught[0][0].double().max(0).values
    kept = right[: basis.rank(0.5)].T
    expected = float((x - kept @ (kept.T @ x)).norm())
    layer = scorer.axes["layer"].index(str(scorer.blocks - 1))
    assert float(score.sps[0, 0, 0, layer, 0, 0]) == pytest.approx(expected, rel=1e-4)


def test_offloaded_weights_are_refused(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device map that leaves the embedding on disk: said at loading, and when a basis is asked of such a model."""
    auto: Any = AutoModelForCausalLM
    own = auto.from_pretrained
    parts = {
        "model.embed_tokens": "disk",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    placed = {"device_map": parts, "offload_folder": str(tmp_path / "offload")}
    model = own(model_folder("llama"), dtype=torch.float32, **placed)
    assert model.get_input_embeddings().weight.is_meta
    loaded = Loaded(model_folder("llama"), model, make_tokenizer(True), torch.float32, torch.device("cpu"))
    with pytest.raises(UsageError, match="with data"):
        load_basis(loaded, "embedding", SubspaceSettings("embedding"), tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: own(*args, **kwargs, **placed))
    monkeypatch.setattr(checkpoint, "_cache", type(checkpoint._cache)())
    with pytest.raises(UsageError, match=r"some weights are not in memory \(offloaded\)"):
        load(model_folder("llama"), "float32", "cpu")
