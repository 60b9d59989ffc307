"""LongPPL and question likelihood against plain loops over transformers' own forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from xcompress.checkpoint import Loaded
from xcompress.config import CONFIGS
from xcompress.engines.hf import HFEngine
from xcompress.perplexity import key_tokens, long_nll
from xcompress.prompts import READER_PARTS, encode, load_template
from xcompress.schema import Passage, Question
from xcompress.stages.rivals import RivalScorer

QUESTIONS = [
    Question("a", "Who is it?", ("x",), (Passage("One", "first text"), Passage("Two", "second text"))),
    Question("b", "Where?", ("y",), (Passage("Three", "third"),)),
]
CANDIDATES = [
    {"question_id": name, "candidate": k, "summary": text}
    for name, texts in (("a", ["He is.", "He is.", " ", "Someone else"]), ("b", ["There"]))
    for k, text in enumerate(texts)
]


def loop(folder: Path, context: list[int], continuation: list[int]) -> list[float]:
    """Log-probabilities of the continuation, one uncached forward pass."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = [*context, *continuation]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [float(logprobs[at - 1, ids[at]]) for at in range(len(context), len(ids))]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_rivals_equal_plain_loops(family: str, tiny: Callable[[str], Loaded], model_folder: Callable[[str], Path]) -> None:
    """Every distinct candidate: tokens after passages and question, and the question after the summary; blanks have none."""
    loaded = tiny(family)
    template = load_template(CONFIGS / "prompts" / "reader_short_answer.yaml", READER_PARTS)
    rows = RivalScorer(HFEngine(loaded), loaded.tokenizer, template).score(QUESTIONS, CANDIDATES)
    assert [(row["question_id"], row["candidate"]) for row in rows] == [(c["question_id"], c["candidate"]) for c in CANDIDATES]
    assert rows[0]["long_logprobs"] == rows[1]["long_logprobs"]
    assert rows[2]["long_logprobs"] is None and rows[2]["question_logprob_sum"] is None
    tokenizer = loaded.tokenizer
    for row, candidate in zip(rows, CANDIDATES, strict=True):
        if row["long_logprobs"] is None:
            continue
        question = next(q for q in QUESTIONS if q.id == row["question_id"])
        passages = "\n\n".join(f"{p.title}: {p.text}" for p in question.passages)
        context = encode(tokenizer, f"{passages}\n\nQuestion: {question.question}\n\n")
        summary = encode(tokenizer, str(candidate["summary"]), start=False)
        assert row["long_logprobs"] == pytest.approx(loop(model_folder(family), context, summary), rel=1e-4, abs=1e-4)
        lead = encode(tokenizer, f"{candidate['summary']}\nQuestion:")
        asked = loop(model_folder(family), lead, encode(tokenizer, f" {question.question}", start=False))
        assert row["question_logprob_sum"] == pytest.approx(sum(asked), rel=1e-4)
        assert row["question_tokens"] == len(asked)


def test_key_tokens() -> None:
    """Gain above 2 and log-probability above -2, both strict; a token without predecessor is never key; none is no score."""
    short = [None, -5.0, -5.0, -3.0, -1.0, -4.0]
    long = [-0.1, -0.5, -2.5, -1.0, -0.9, -1.5]
    assert key_tokens(short, long) == [1, 5]
    assert long_nll(short, long) == pytest.approx((0.5 + 1.5) / 2)
    assert long_nll(short, long, alpha=10) is None
    assert long_nll([], []) is None
    assert not math.isnan(long_nll(short, long) or 0)
    with pytest.raises(ValueError, match="not of the same tokens"):
        key_tokens([None], [])
