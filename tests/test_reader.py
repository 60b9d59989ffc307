"""SPS, NLL and the concentration ratio of texts, end to end from text, against a plain loop of the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAMILIES, STARTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from xcompress.checkpoint import Loaded
from xcompress.perplexity import mean_nll, perplexity
from xcompress.reader import TextScorer, load_basis, matrix_of
from xcompress.schema import UsageError
from xcompress.settings import ScoringSettings, SubspaceSettings

TEXTS = ["Paris.", "x", "", "The Seine runs through Paris, the capital of France, and on to Le Havre.", "  \n ", "a b"]
EMBEDDING = {"embedding": SubspaceSettings("embedding")}


def loop_score(folder: Path, text: str, start: bool, first: bool, energy: float) -> tuple[float, float, float]:
    """SPS (max pooling, penultimate), ratio and NLL by the definitions, in float64 from transformers' own hidden states."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    full = [tokenizer.bos_token_id, *ids] if start else ids
    with torch.inference_mode():
        output = model(torch.tensor([full]), output_hidden_states=True)
    states = output.hidden_states[-2][0].double()
    states = states if first else states[1:]
    embedding = model.get_input_embeddings().weight.detach().double()
    _, values, right = torch.linalg.svd(embedding, full_matrices=False)
    rank = int((values.cumsum(0) < energy * values.sum()).sum()) + 1
    kept = right[:rank].T
    x = states.max(0).values
    sps = float((x - kept @ (kept.T @ x)).norm())
    ratio = float(states.mean(0).norm() / x.abs().sum())
    logprobs = output.logits[0].double().log_softmax(-1)
    scored = [-float(logprobs[t, full[t + 1]]) for t in range(len(full) - 1)]
    return sps, ratio, sum(scored) / len(scored)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_the_definitions(
    family: str, tiny: Callable[[str], Loaded], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every family, with and without start token and first token; energy 90 %."""
    scorer = TextScorer(tiny(family), ScoringSettings(EMBEDDING, [0.5, 0.9]), tmp_path)
    scores = scorer.score(TEXTS)
    assert [score is None for score in scores] == [False, False, True, False, True, False]
    assert scorer.axes["start_token"] == ([False, True] if STARTS[family] else [False])
    layer = scorer.axes["layer"].index(str(scorer.blocks - 1))
    for text in (TEXTS[0], TEXTS[3]):
        score = scores[TEXTS.index(text)]
        assert score is not None
        for s, start in enumerate(scorer.axes["start_token"]):
            for f, first in enumerate((True, False)):
                sps, ratio, nll = loop_score(model_folder(family), text, start, first, 0.9)
                assert float(score.sps[s, f, 0, layer, 0, 1]) == pytest.approx(sps, rel=1e-4)
                assert float(score.ratio[s, f]) == pytest.approx(ratio, rel=1e-4)
        # The start token, where there is one, is given and never scored.
        assert score.nll == pytest.approx(nll, rel=1e-4)
        assert score.scored_tokens == score.tokens - (0 if STARTS[family] else 1)


def test_scores_do_not_depend_on_the_batch(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    """The same text alone, with others, and in batches of different sizes: 1e-4 relative."""
    settings = ScoringSettings(EMBEDDING, [0.95])
    alone = TextScorer(tiny("llama"), settings, tmp_path).score([TEXTS[3]])[0]
    assert alone is not None
    for budget in (1, 40, 4096):
        together = TextScorer(tiny("llama"), settings, tmp_path, budget).score(TEXTS)[3]
        assert together is not None
        np.testing.assert_allclose(together.sps, alone.sps, rtol=1e-4)
        assert together.nll == pytest.approx(alone.nll, rel=1e-5)


def test_one_token_and_blank_texts(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    """One token: an SPS with the first token, none without, an NLL only after a start token. Blank: no score."""
    for family in ("llama", "gpt2"):
        score = TextScorer(tiny(family), ScoringSettings(EMBEDDING, [0.95]), tmp_path).score(["x"])[0]
        assert score is not None and score.tokens == 1
        assert np.isfinite(score.sps[0, 0]).all() and np.isnan(score.sps[0, 1]).all()
        assert (score.nll is None) == (family == "gpt2")
        assert score.scored_tokens == (1 if family == "llama" else 0)


def test_all_subspaces(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    """The three matrices give three residuals; q_proj is of block L - 1, and GPT-2, which has none of its own, is refused."""
    subspaces = {
        "embedding": SubspaceSettings("embedding"),
        "q_proj": SubspaceSettings("q_proj", center=True, energy_of="squares"),
        "output_head": SubspaceSettings("output_head"),
    }
    loaded = tiny("llama")
    assert matrix_of(loaded, "q_proj") is loaded.blocks[-2].self_attn.q_proj.weight
    score = TextScorer(loaded, ScoringSettings(subspaces, [0.5]), tmp_path).score([TEXTS[3]])[0]
    assert score is not None and score.sps.shape == (2, 2, 3, 5, 5, 1)
    assert len({float(value) for value in score.sps[0, 0, :, 2, 0, 0]}) == 3, score.sps[0, 0, :, 2, 0, 0]
    with pytest.raises(UsageError, match="no separate query projection"):
        matrix_of(tiny("gpt2"), "q_proj")


def test_bases_are_cached_and_damage_is_seen(
    tiny: Callable[[str], Loaded], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second load is equal; a damaged cache file is named and computed again; other settings have another file."""
    loaded = tiny("llama")
    first = load_basis(loaded, "embedding", SubspaceSettings("embedding"), tmp_path)
    (path,) = tmp_path.glob("*.npz")
    again = load_basis(loaded, "embedding", SubspaceSettings("embedding"), tmp_path)
    assert torch.equal(first.vectors, again.vectors) and torch.equal(first.values, again.values)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    caplog.clear()
    repaired = load_basis(loaded, "embedding", SubspaceSettings("embedding"), tmp_path)
    assert "is damaged" in caplog.text
    assert torch.equal(first.vectors, repaired.vectors)
    load_basis(loaded, "embedding", SubspaceSettings("embedding", center=True), tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 2


def test_perplexity() -> None:
    """NLL is what is ranked; perplexity shows infinity without raising, and nothing scored is None."""
    assert mean_nll(torch.tensor([-1.0, -3.0])) == 2.0
    assert mean_nll(torch.zeros(0)) is None
    assert perplexity(800.0) == math.inf
    assert perplexity(None) is None
    assert perplexity(math.log(7)) == pytest.approx(7)
