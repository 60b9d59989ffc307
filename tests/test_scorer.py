"""SPSScorer against SPS, NLL and ratio worked out from transformers' own hidden states and numpy's SVD."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xcompress import SPSScorer, UsageError
from xcompress.checkpoint import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["The old mill stands by the river.", "bridge", "x"]


def reference(model: Any, ids: list[int], start: int | None, energy: float) -> tuple[float, float | None, float]:
    """SPS (max, penultimate, embedding), mean NLL and ratio of token ids."""
    matrix = model.get_input_embeddings().weight.detach().double().numpy()
    _, values, vectors = np.linalg.svd(matrix, full_matrices=False)
    rank = int(np.searchsorted(np.cumsum(values) / values.sum(), energy)) + 1
    with torch.no_grad():
        bare = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-2][0].double().numpy()
        given = ids if start is None else [start, *ids]
        logprobs = model(input_ids=torch.tensor([given])).logits[0].double().log_softmax(-1)
    x = bare.max(0)
    inside = vectors[:rank].T @ (vectors[:rank] @ x)
    scored = [float(logprobs[at, given[at + 1]]) for at in range(len(given) - 1)]
    nll = -sum(scored) / len(scored) if scored else None
    return float(np.linalg.norm(x - inside)), nll, float(np.linalg.norm(bare.mean(0)) / np.abs(x).sum())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("energy", [0.5, 0.95])
def test_scores_are_those_of_the_definition(
    model_folder: Callable[[str], Path], eager: Callable[[str], Any], tmp_path: Path, family: str, energy: float
) -> None:
    """With a start token (Llama) and without (GPT-2, Qwen 3); a text of one token has no NLL without one."""
    scorer = SPSScorer(model_folder(family), dtype="float32", device="cpu", energy=energy, cache=tmp_path)
    tokenizer = load_tokenizer(model_folder(family))
    start = 1 if family == "llama" else None
    for text, score in zip(TEXTS, scorer.score(TEXTS), strict=True):
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        sps, nll, ratio = reference(eager(family), ids, start, energy)
        assert score is not None and score.tokens == len(ids)
        assert score.sps == pytest.approx(sps, rel=1e-4) and score.ratio == pytest.approx(ratio, rel=1e-4)
        assert score.nll == (None if nll is None else pytest.approx(nll, rel=1e-4))
        assert score.ppl == (None if nll is None else pytest.approx(np.exp(nll), rel=1e-3))


def test_variants_differ_and_blank_texts_have_no_score(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    def sps(**variant: Any) -> float:
        score = SPSScorer(model_folder("llama"), dtype="float32", device="cpu", cache=tmp_path, **variant).score(TEXTS[:1])[0]
        assert score is not None
        return score.sps

    variants: list[dict[str, Any]] = [
        {},
        {"layer": "last"},
        {"layer": 1},
        {"pooling": "mean"},
        {"first_token": False},
        {"start_token": True},
        {"matrix": "q_proj", "center": True, "energy_of": "squares"},
        {"matrix": "output_head"},
        {"energy": 0.5},
    ]
    values = [sps(**variant) for variant in variants]
    assert np.isfinite(values).all() and len(set(values)) == len(values)
    scorer = SPSScorer(model_folder("llama"), dtype="float32", device="cpu", cache=tmp_path)
    assert scorer.score(["", " \n", TEXTS[0]])[:2] == [None, None] and scorer.score([]) == []


@pytest.mark.parametrize(
    ("model", "options", "what"),
    [
        ("no-such-folder", {}, "does not exist"),
        ("someone/no-such-model", {}, "hf download someone/no-such-model"),
        ("gpt2", {"start_token": True}, "has no start token"),
        ("gpt2", {"layer": 9}, r"method.layer: layer 9 is out of range for a reader of 3 blocks"),
        ("gpt2", {"layer": "penultimat"}, "'penultimat' is not known"),
        ("gpt2", {"pooling": "maximum"}, "method.pooling=maximum is not known"),
        ("gpt2", {"matrix": "embeding"}, r"matrix=embeding is not known \(did you mean embedding\?\)"),
        ("gpt2", {"matrix": "q_proj"}, "has none of the matrices"),
        ("gpt2", {"energy": 1.5}, "must be levels in"),
        ("gpt2", {"dtype": "float8"}, "dtype 'float8' is not known"),
    ],
)
def test_wrong_arguments(model_folder: Callable[[str], Path], model: str, options: dict[str, Any], what: str) -> None:
    path = model_folder(model) if model == "gpt2" else model
    with pytest.raises(UsageError, match=what):
        SPSScorer(path, **{"dtype": "float32", "device": "cpu", **options})


@pytest.mark.parametrize(("texts", "what"), [("one text", "texts is one string"), (["a", 7], "text 1 is a int")])
def test_wrong_texts(model_folder: Callable[[str], Path], tmp_path: Path, texts: Any, what: str) -> None:
    scorer = SPSScorer(model_folder("llama"), dtype="float32", device="cpu", cache=tmp_path)
    with pytest.raises(UsageError, match=what):
        scorer.score(texts)
