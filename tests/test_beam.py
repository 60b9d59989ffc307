"""Beam search: the engine against transformers' own (uncached), and the bookkeeping on hand-worked steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import FAMILIES

from xcompress.checkpoint import Loaded
from xcompress.engines.base import Draw, Generation, Request
from xcompress.engines.beam import Beams, Continuation
from xcompress.engines.hf import HFEngine

pytestmark = pytest.mark.usefixtures("one_thread")


def make_prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random bytes."""
    generator = random.Random(seed)
    return tuple(generator.randrange(5, 261) for _ in range(length))


@torch.inference_mode()
def reference(model: Any, prompt: tuple[int, ...], stops: frozenset[int], beams: int, limit: int, penalty: float) -> list[Any]:
    """What transformers finds: sequences best first, without prompt, stop token and padding."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=limit,
        repetition_penalty=penalty,
        do_sample=False,
        use_cache=False,
        eos_token_id=sorted(stops),
        pad_token_id=sorted(stops)[0],
    )
    sequences = []
    for row in found[:, len(prompt) :].tolist():
        ends = [at for at, token in enumerate(row) if token in stops]
        sequences.append(tuple(row[: ends[0]] if ends else row))
    return sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_equal_to_transformers(family: str, penalty: float, tiny: Callable[[str], Loaded], eager: Callable[[str], Any]) -> None:
    """Same sequences in the same order; several prompts at once, of one group and of none, some ending early."""
    engine = HFEngine(tiny(family))
    # A tiny random model hardly ever stops of itself: more stop tokens make sequences end at all lengths.
    engine.stop_ids = frozenset({0, *range(5, 261, 2)})
    shared = make_prompt(1, 12)
    prompts = [(*shared, 40), (*shared, *make_prompt(2, 6)), make_prompt(3, 20), make_prompt(4, 1)]
    limits = [9, 1, 14, 6]
    requests = [Request(p, (), limit, (), penalty, beams=5) for p, limit in zip(prompts, limits, strict=True)]
    found = engine.generate(requests)
    ended = 0
    for prompt, limit, beams in zip(prompts, limits, found, strict=True):
        expected = reference(eager(family), prompt, engine.stop_ids, 5, limit, penalty)
        assert [beam.tokens for beam in beams] == expected
        for beam in beams:
            assert (beam.finish_reason == "length") == (len(beam.tokens) == limit)
            ended += beam.finish_reason == "stop"
    assert ended >= 3, "the case must have sequences that end early"


def test_alone_as_beside_others(tiny: Callable[[str], Loaded]) -> None:
    """Neither other searches, nor draws in the same call, nor the memory limit change a search."""
    engine = HFEngine(tiny("llama"))
    small = HFEngine(tiny("llama"))
    small.cache_tokens = 40  # no group fits: each search runs alone, and whole
    requests = [Request(make_prompt(at, 8 + at), (), 5 + at, (), 1.2, beams=2 + at) for at in range(3)]
    mixed: list[Request] = [*requests, Request(make_prompt(9, 7), (Draw(), Draw(0.1, 0.9, 3)), 5)]
    together = engine.generate(mixed)
    alone = [engine.generate([request])[0] for request in mixed]

    def tokens(found: list[list[Generation]]) -> list[list[tuple[int, ...]]]:
        return [[generation.tokens for generation in generations] for generations in found]

    assert tokens(together) == tokens(alone) == tokens(small.generate(mixed))
    assert [len(generations) for generations in together] == [2, 3, 4, 2]
    counted: list[int] = []
    engine.generate([requests[0]], counted.append)
    longest = max(len(beam.tokens) for beam in together[0])
    assert counted[0] == 2 and len(counted) >= longest, "one report a step, of as many tokens as there are beams"


@torch.inference_mode()
def test_logprobs_are_the_models_own(tiny: Callable[[str], Loaded], eager: Callable[[str], Any]) -> None:
    """``logprob_sum`` is without penalty and without the stop token."""
    engine = HFEngine(tiny("llama"))
    prompt = make_prompt(5, 11)
    for beam in engine.generate([Request(prompt, (), 6, (), 1.3, beams=3)])[0]:
        ids = torch.tensor([[*prompt, *beam.tokens]])
        logprobs = eager("llama")(input_ids=ids).logits[0].double().log_softmax(-1)
        expected = sum(float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(beam.tokens))
        assert beam.logprob_sum == pytest.approx(expected, abs=1e-3)


def test_a_stop_token_below_the_width_ends_nothing() -> None:
    """Width 2: of four continuations only the first two may finish."""
    search = Beams(2, 10, {0})
    best = [Continuation(0, 7, -1.0, -1.0), Continuation(0, 8, -2.0, -2.0), Continuation(0, 0, -3.0, -3.0)]
    assert search.step(best) == [0, 0]
    assert search.finished == []
    assert [beam.tokens for beam in search.open] == [(7,), (8,)]


def test_it_ends_when_no_open_beam_can_win() -> None:
    """Two finished sequences of mean -0.5 and -0.6; the best open beam has mean -0.7 and the search is over."""
    search = Beams(2, 10, {0})
    search.step([Continuation(0, 7, -0.4, -0.4), Continuation(0, 8, -0.5, -0.5)])
    assert search.step([Continuation(0, 0, -1.0, -0.6), Continuation(1, 0, -1.2, -0.7), Continuation(0, 9, -1.4, -1.0)]) == []
    assert search.done
    assert [(beam.tokens, beam.score, beam.finish_reason) for beam in search.finished] == [
        ((7,), -0.5, "stop"),
        ((8,), -0.6, "stop"),
    ]
    assert [beam.logprob_sum for beam in search.finished] == [-0.4, -0.5]


def test_draws_and_beams_exclude_each_other(tiny: Callable[[str], Loaded]) -> None:
    """A request is one or the other."""
    with pytest.raises(ValueError, match="no draws"):
        HFEngine(tiny("llama")).generate([Request((5, 6), (Draw(),), 3, beams=2)])
