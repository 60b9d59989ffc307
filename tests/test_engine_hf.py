"""xcompress/engines/hf.py against transformers' own uncached forward pass, and rows against each other.

The reference is uncached on purpose: transformers' cached generation departs from its own forward pass for sliding-window
models whose prompt is longer than the window.

Where two tokens are about equally likely, rounding may swap them in a draw. The tiny models are nearly undecided between
hundreds of tokens, so the draws that are compared across batches use low temperatures.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES
from transformers import RepetitionPenaltyLogitsProcessor

from xcompress.checkpoint import Loaded, load, stop_ids
from xcompress.engines import hf
from xcompress.engines.base import Draw, Engine, Generation, Request, check_length, text_until
from xcompress.engines.hf import HFEngine, open_engine
from xcompress.schema import UsageError

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")


def make_prompt(seed: int, length: int) -> tuple[int, ...]:
    """A random prompt: start token, then bytes."""
    generator = random.Random(seed)
    return (1, *(generator.randrange(5, 261) for _ in range(length - 1)))


def prompts_of_all_kinds() -> list[tuple[int, ...]]:
    """Shared beginnings and strangers; the window (7) is crossed in the prefix, in the suffix, in decoding, or never."""
    long, short = make_prompt(0, 30), make_prompt(1, 4)
    return [
        (*long, 50),
        (*long, *make_prompt(2, 21)),
        (*long, *make_prompt(3, 3)),
        (*short, *make_prompt(4, 2)),
        (*short, *make_prompt(5, 12)),
        (*short, 60),
        make_prompt(6, 1),
        make_prompt(7, 2),
        tuple(t + 1 for t in make_prompt(8, 40)),
        tuple(t + 1 for t in make_prompt(9, 3)),
    ]


def mixed_requests() -> list[Request]:
    """Greedy, seeded and unseeded draws, several per prompt, different limits, stop texts and penalties."""
    draws = (
        (Draw(), Draw(0.15, 0.95, 11), Draw(0.15, 0.95, 12), Draw(0.1, 1.0, 13)),
        (Draw(0.15, 1.0, 14),),
        (Draw(), Draw(0.2, 0.9)),
    )
    stops = ((), ("e",), ("a", "~q"))
    return [
        Request(prompt, draws[at % 3], (3, 14, 1, 25)[at % 4], stops[at % 3], (1.0, 1.3, 1.0, 1.05, 2.0)[at % 5])
        for at, prompt in enumerate(prompts_of_all_kinds())
    ]


@torch.inference_mode()
def check_greedy(reference: Any, prompt: Sequence[int], generation: Generation, limit: int) -> None:
    """``generation`` is the arg-max chain of one uncached forward pass over the prompt and itself; log-probabilities too."""
    count = len(generation.tokens)
    assert generation.finish_reason == ("length" if count == limit else "stop")
    ids = torch.tensor([[*prompt, *generation.tokens]])
    logits = reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].double()
    expected = logits.argmax(-1).tolist()
    assert list(generation.tokens) == expected[:count]
    assert 0 not in generation.tokens
    if generation.finish_reason == "stop":
        assert expected[count] == 0
    chosen = logits[:count].log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
    assert generation.logprob_sum == pytest.approx(float(chosen.sum()), rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cache_tokens", "prefill_tokens"), [(10**6, 8192), (10**6, 33), (90, 8192), (1, 1)])
def test_greedy_is_the_uncached_argmax(
    family: str, cache_tokens: int, prefill_tokens: int, tiny: Tiny, eager: Callable[[str], Any]
) -> None:
    """In one batch, with prefixes computed in several passes, in several batches, and row by row."""
    engine = HFEngine(tiny(family), prefill_tokens=prefill_tokens)
    engine.cache_tokens = cache_tokens
    prompts = prompts_of_all_kinds()
    limits = [(4, 17, 9)[at % 3] for at in range(len(prompts))]
    requests = [Request(p, (Draw(),) * (1 + n % 3), limit) for n, (p, limit) in enumerate(zip(prompts, limits, strict=True))]
    results = engine.generate(requests)
    assert [len(result) for result in results] == [len(request.draws) for request in requests]
    for request, result in zip(requests, results, strict=True):
        for generation in result:
            check_greedy(eager(family), request.prompt, generation, request.max_new_tokens)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_greedy_loop(family: str, tiny: Tiny, eager: Callable[[str], Any]) -> None:
    """The arg-max loop written out: one uncached forward pass a token."""
    prompt = make_prompt(20, 11)
    ids = list(prompt)
    for _ in range(10):
        ids.append(int(eager(family)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert 0 not in ids
    ((generation,),) = HFEngine(tiny(family)).generate([Request(prompt, (Draw(),), 10)])
    assert [*prompt, *generation.tokens] == ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cache_tokens", "prefill_tokens"), [(10**6, 8192), (60, 24)])
@torch.inference_mode()
def test_loglikelihood(family: str, cache_tokens: int, prefill_tokens: int, tiny: Tiny, eager: Callable[[str], Any]) -> None:
    """Contexts of 1 and 40 tokens, continuations of 1 and 10, shared contexts and shared beginnings: as a plain loop says."""
    engine = HFEngine(tiny(family), prefill_tokens=prefill_tokens)
    engine.cache_tokens = cache_tokens
    contexts = [make_prompt(1, 1), make_prompt(2, 40), (*make_prompt(2, 40)[:30], *make_prompt(3, 10))]
    ends = [make_prompt(4, 1), make_prompt(5, 10), (*make_prompt(5, 10)[:9], 99)]
    pairs = [(context, end) for context in contexts for end in ends]
    for (context, end), got in zip(pairs, engine.loglikelihood(pairs), strict=True):
        expected = 0.0
        for at in range(len(end)):
            ids = torch.tensor([[*context, *end[:at]]])
            expected += float(eager(family)(input_ids=ids, use_cache=False).logits[0, -1].double().log_softmax(-1)[end[at]])
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert engine.loglikelihood([]) == []
    for empty in [((), (5,)), ((5,), ())]:
        with pytest.raises(ValueError, match="at least one token"):
            engine.loglikelihood([empty])


def same(left: Sequence[Sequence[Generation]], right: Sequence[Sequence[Generation]]) -> None:
    """Equal tokens, texts and reasons; log-probabilities up to rounding."""
    assert len(left) == len(right)
    for mine, other in zip(left, right, strict=True):
        assert [replace(g, logprob_sum=0.0) for g in mine] == [replace(g, logprob_sum=0.0) for g in other]
        assert [g.logprob_sum for g in mine] == pytest.approx([g.logprob_sum for g in other], rel=1e-5, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_never_influence_each_other(family: str, tiny: Tiny) -> None:
    """Alone, together, reversed, in small batches, draw by draw: the same; and two runs are equal to the bit."""
    engine, requests = HFEngine(tiny(family)), mixed_requests()
    together = engine.generate(requests)
    assert engine.generate(requests) == together
    same([engine.generate([request])[0] for request in requests], together)
    same(engine.generate(requests[::-1])[::-1], together)
    singles = [replace(request, draws=(draw,)) for request in requests for draw in request.draws]
    same(engine.generate(singles), [[generation] for result in together for generation in result])
    engine.cache_tokens, engine.prefill_tokens = 120, 30
    same(engine.generate(requests), together)


def test_seeds(tiny: Tiny) -> None:
    """Seeds are honoured beside unseeded and greedy draws; different seeds differ, equal ones do not."""
    engine = HFEngine(tiny("llama"))
    assert engine.reproducible and isinstance(engine, Engine)
    draws = (Draw(0.2, 1.0, 1), Draw(0.2, 1.0, 2), Draw(0.2, 1.0, 3), Draw(0.2, 1.0, 1), Draw(), Draw(0.2))
    (first,) = engine.generate([Request(make_prompt(0, 9), draws, 16)])
    assert len({generation.tokens for generation in first}) == 5
    assert first[0] == first[3]
    (second,) = engine.generate([Request(make_prompt(0, 9), draws[:3], 16)])
    same([second], [first[:3]])


def test_finished_rows_leave(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Very different limits: the batch shrinks again and again, and nobody's tokens change."""
    sizes: list[int] = []
    engine = HFEngine(tiny("mistral"))
    monkeypatch.setattr(
        Loaded, "states", lambda self, ids, positions, own=Loaded.states: sizes.append(len(ids)) or own(self, ids, positions)
    )
    stem = make_prompt(0, 12)
    limits = (1, 2, 30, 5, 8, 13, 40, 3, 3, 21)
    draws = (Draw(), Draw(0.15, 1.0, 4), Draw(0.15, 1.0, 5))
    requests = [Request((*stem, *make_prompt(n, 1 + n)), draws[: 1 + n % 3], limit) for n, limit in enumerate(limits)]
    (first,) = engine.generate([replace(requests[0], draws=draws, max_new_tokens=60)])
    stop = next(char for char in first[1].text[3:20] if char.isascii() and char.isprintable())
    requests.append(replace(requests[0], draws=draws, max_new_tokens=60, stop=(stop,)))
    sizes.clear()
    together = engine.generate(requests)
    assert sizes[-1] <= 3 and len(set(sizes)) >= 6, sizes
    monkeypatch.setattr(hf, "_COMPACT", 0.0)  # nobody leaves
    same(engine.generate(requests), together)
    monkeypatch.setattr(hf, "_COMPACT", 1.0)  # everybody leaves at once
    same(engine.generate(requests), together)
    same([engine.generate([request])[0] for request in requests], together)
    for request, result in zip(requests, together, strict=True):
        assert all(len(g.tokens) == request.max_new_tokens for g in result if g.finish_reason == "length")


def test_finished_rows_leave_without_any_prefix(tiny: Tiny) -> None:
    """Prompts of one token share nothing; their batch must shrink like any other."""
    engine = HFEngine(tiny("gpt2"))
    requests = [Request((token,), (Draw(),), limit) for token, limit in ((5, 2), (6, 20), (7, 3), (8, 12))]
    same(engine.generate(requests), [engine.generate([request])[0] for request in requests])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_up_to_the_last_position(family: str, tiny: Tiny, eager: Callable[[str], Any]) -> None:
    """Rows that fill the model's window exactly, beside rows that outlast or pad them (learned positions)."""
    engine = HFEngine(tiny(family))
    full = Request((5, *make_prompt(0, 510)), (Draw(),), 1)
    outlasting = [full, *(Request((n, *make_prompt(n, 4)), (Draw(),), 30) for n in range(10, 17))]
    long, short = make_prompt(1, 500), (9, *make_prompt(2, 5))
    padding = [
        Request((*long, 70), (Draw(),), 4),
        Request((*long, 71, 72), (Draw(),), 2),
        Request((*short, 80), (Draw(),), 2),
        Request((*short, *make_prompt(3, 120)), (Draw(),), 2),
    ]
    for requests in (outlasting, padding):
        for request, (generation,) in zip(requests, engine.generate(requests), strict=True):
            check_greedy(eager(family), request.prompt, generation, request.max_new_tokens)
    pairs = [(request.prompt, (90, 91)) for request in padding]
    assert engine.loglikelihood(pairs) == pytest.approx([engine.loglikelihood([pair])[0] for pair in pairs], rel=1e-5)


def copy_with(folder: Path, to: Path, **generation: Any) -> Path:
    """A copy of a model folder with its own generation_config.json."""
    shutil.copytree(folder, to)
    (to / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return to


def test_stop_token(tmp_path: Path, tiny: Tiny, model_folder: Callable[[str], Path]) -> None:
    """A stop id from the model's own list ends a row, is not among its tokens, nor in its text or its log-probability."""
    prompt = make_prompt(3, 10)
    request = Request(prompt, (Draw(),), 12)
    ((full,),) = HFEngine(tiny("llama")).generate([request])
    assert full.finish_reason == "length"
    token = full.tokens[6]
    cut = full.tokens.index(token)
    engine = open_engine(copy_with(model_folder("llama"), tmp_path / "m", eos_token_id=[token, 0]), "float32", "cpu")
    counted: list[int] = []
    ((got,),) = engine.generate([request], counted.append)
    assert (got.tokens, got.finish_reason) == (full.tokens[:cut], "stop")
    assert got.text == engine.tokenizer.decode(full.tokens[:cut])
    assert sum(counted) == cut + 1, "the stop token was drawn too"
    if cut:
        assert got.logprob_sum == pytest.approx(engine.loglikelihood([(prompt, got.tokens)])[0], rel=1e-5), (
            "the log-probability is that of `tokens`"
        )
    # A stop token at the very last step is still a stop.
    ((got,),) = engine.generate([replace(request, max_new_tokens=cut + 1)])
    assert got.finish_reason == "stop"


def find_ascii(engine: HFEngine) -> tuple[Request, Generation, int]:
    """A request whose text has five printable ASCII characters in a row, and where they begin."""
    for seed in range(300):
        request = Request(make_prompt(0, 8), (Draw(1.0, 1.0, seed),), 30)
        ((full,),) = engine.generate([request])
        for at in range(4, len(full.text) - 10):
            if all(" " < char <= "~" for char in full.text[at : at + 5]):
                return request, full, at
    raise AssertionError("no such text")


def test_stop_text(tiny: Tiny) -> None:
    """Text is cut before the first stop text, which may span tokens; the row ends with the token that completes it."""
    engine = HFEngine(tiny("qwen3"))
    request, full, at = find_ascii(engine)
    for stop in (full.text[at], full.text[at : at + 3], full.text[at + 1 : at + 5]):
        ((got,),) = engine.generate([replace(request, stop=("never there", stop))])
        assert got.finish_reason == "stop"
        assert got.text == full.text[: full.text.index(stop)]
        assert got.tokens == full.tokens[: len(got.tokens)]
        assert stop in engine._decode(got.tokens) and stop not in engine._decode(got.tokens[:-1])
    both = (full.text[at + 2 : at + 4], full.text[at + 1 : at + 4])  # end at the same token; the earlier start counts
    ((got,),) = engine.generate([replace(request, stop=both)])
    assert got.text == full.text[: min(full.text.index(stop) for stop in both)]
    ((got,),) = engine.generate([replace(request, max_new_tokens=len(got.tokens), stop=both)])
    assert got.finish_reason == "stop", "completed by the last token allowed"
    ids = engine.tokenizer("abcabc")["input_ids"]
    assert text_until(engine.tokenizer, ids, ("b",)) == "a", "a single token may hold the stop text twice"


@pytest.mark.parametrize("limit", [1, 2, 8])
def test_limit_is_exact(limit: int, tiny: Tiny) -> None:
    """Cut-off rows have exactly ``max_new_tokens`` tokens and say so."""
    engine = HFEngine(tiny("llama"))
    (result,) = engine.generate([Request(make_prompt(3, 10), (Draw(), Draw(1.0, 1.0, 3)), limit)])
    assert [(len(g.tokens), g.finish_reason) for g in result] == [(limit, "length")] * 2


def test_progress_counts_drawn_tokens(tiny: Tiny) -> None:
    """The numbers add up to all tokens drawn: those of the results, and one for each stop token."""
    engine, counted = HFEngine(tiny("llama")), []
    engine.stop_ids = frozenset({0, *range(100, 120)})
    results = [g for result in engine.generate(mixed_requests(), counted.append) for g in result]
    limits = [request.max_new_tokens for request in mixed_requests() for _ in request.draws]
    stops = [request.stop for request in mixed_requests() for _ in request.draws]
    by_token = sum(
        g.finish_reason == "stop" and not any(text in engine.tokenizer.decode(g.tokens) for text in stop)
        for g, stop in zip(results, stops, strict=True)
    )
    assert by_token > 0 and any(len(g.tokens) == limit for g, limit in zip(results, limits, strict=True))
    assert sum(counted) == sum(len(g.tokens) for g in results) + by_token


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.inference_mode()
def test_repetition_penalty(family: str, tiny: Tiny, eager: Callable[[str], Any]) -> None:
    """Rows with different penalties in one batch: each as transformers' own processor has it, log-probabilities unpenalised."""
    penalties = (1.0, 1.2, 0.8, 3.0, 1.0)
    limits = (12, 4, 12, 9, 3)
    requests = [
        Request((*make_prompt(0, 6), *make_prompt(n, 1 + 2 * n)), (Draw(),), limit, (), penalty)
        for n, (penalty, limit) in enumerate(zip(penalties, limits, strict=True))
    ]
    changed = 0
    for request, (generation,) in zip(requests, HFEngine(tiny(family)).generate(requests), strict=True):
        processor = RepetitionPenaltyLogitsProcessor(request.repetition_penalty)
        ids, logprob = list(request.prompt), 0.0
        for token in generation.tokens:
            logits = eager(family)(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
            wanted = int(processor(torch.tensor([ids]), logits.clone()).argmax())
            changed += wanted != int(logits.argmax())
            assert token == wanted
            logprob += float(logits[0].log_softmax(-1)[token])
            ids.append(token)
        assert generation.logprob_sum == pytest.approx(logprob, rel=1e-5, abs=1e-3)
    assert changed > 3


def test_penalty_below_one_counts_beside_neutral_rows(tiny: Tiny) -> None:
    """A batch whose largest penalty is neutral still applies the others."""
    engine = HFEngine(tiny("llama"))
    prompt = make_prompt(2, 9)
    strong, neutral = Request(prompt, (Draw(),), 10, (), 0.3), Request(prompt, (Draw(),), 10)
    ((alone,),), ((plain,),) = engine.generate([strong]), engine.generate([neutral])
    assert alone.tokens != plain.tokens
    same(engine.generate([neutral, strong]), [[plain], [alone]])


def test_generation_file_changes_nothing(tmp_path: Path, tiny: Tiny, model_folder: Callable[[str], Path]) -> None:
    """Sampling values of the model's own generation file are not used; only its end tokens are."""
    values = {"repetition_penalty": 1.1, "top_k": 20, "temperature": 0.3, "do_sample": True, "eos_token_id": 0}
    folder = copy_with(model_folder("qwen3"), tmp_path / "m", **values)
    engine = open_engine(folder, "float32", "cpu")
    assert engine.loaded.model.generation_config.top_k == 20, "the file was read by transformers"
    requests = mixed_requests()
    assert engine.generate(requests) == HFEngine(tiny("qwen3")).generate(requests)


def test_stop_ids_are_a_union(tmp_path: Path, tiny: Tiny, model_folder: Callable[[str], Path]) -> None:
    """The tokenizer's end token (0), and single ids or lists of both files."""
    tokenizer = tiny("llama").tokenizer
    folder = copy_with(model_folder("llama"), tmp_path / "m", eos_token_id=[7, 9])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 4}), encoding="utf-8")
    assert stop_ids(tokenizer, folder) == {0, 4, 7, 9}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}), encoding="utf-8")
    (folder / "generation_config.json").unlink()
    assert stop_ids(tokenizer, folder) == {0}
    assert HFEngine(tiny("llama")).pad_id == 0


def test_too_long_is_said_first(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request that cannot fit stops the call before any computing; the sentence has the numbers and the remedy."""
    engine = HFEngine(tiny("llama"), max_context=20)
    assert (engine.max_context, HFEngine(tiny("llama"), max_context=9999).max_context) == (20, 512)
    good = Request(make_prompt(0, 15), (Draw(),), 5)
    assert len(engine.generate([good])[0][0].tokens) == 5

    def fail(*_: object) -> None:
        raise AssertionError("computed something")

    monkeypatch.setattr(Loaded, "states", fail)
    with pytest.raises(UsageError, match=r"15 tokens and 6 new ones exceed the model's 20; lower dataset\.passages"):
        engine.generate([good, replace(good, max_new_tokens=6)])
    with pytest.raises(UsageError, match="15 tokens and 6 new ones"):
        engine.loglikelihood([(good.prompt, (5,)), (good.prompt, (5,) * 6)])
    with pytest.raises(UsageError, match="empty prompt"):
        engine.generate([good, replace(good, prompt=())])
    with pytest.raises(UsageError, match="max_new_tokens must be at least 1, not 0"):
        engine.generate([good, replace(good, max_new_tokens=0)])
    check_length(good, 20)


def test_nothing_to_do(tiny: Tiny) -> None:
    """No requests, or a request without draws."""
    engine = HFEngine(tiny("llama"))
    assert engine.generate([]) == []
    assert engine.generate([Request((1, 5), (), 3), Request((1, 5), (Draw(),), 3)])[0] == []


def test_non_finite_stops_with_the_request(model_folder: Callable[[str], Path]) -> None:
    """An overflow is an error that names the request and the dtype, never a result with NaN."""
    loaded = load(model_folder("llama"), "float32", "cpu", keep=1)
    weight = loaded.model.get_input_embeddings().weight
    before = weight[77].clone()
    engine = HFEngine(loaded)
    try:
        weight[77] = float("inf")
        good, bad = Request((1, 5, 6), (Draw(), Draw(1.0, 0.9, 1)), 3), Request((1, 77, 6), (Draw(),), 3)
        assert len(engine.generate([good])[0]) == 2
        with pytest.raises(UsageError, match=r"request 1: llama gives non-finite logits in torch\.float32; use float32"):
            engine.generate([good, bad])
        with pytest.raises(UsageError, match="pair 1: llama gives non-finite"):
            engine.loglikelihood([((1, 5), (6,)), ((1, 77), (6,))])
    finally:
        weight[77] = before


@pytest.mark.parametrize("budget", [1, 5, 12, 40, 10_000])
def test_chunks_cover_every_row_once(budget: int) -> None:
    """Whole groups while they fit the budget, else parts of one group; the rows of a chunk belong to its groups."""
    lengths, per_group = [3, 4, 2, 9, 9, 9, 1, 1, 1, 5, 2, 2], 3
    seen: list[int] = []
    for chunk in hf._chunks(lengths, per_group, budget):
        rows = list(range(chunk.rows.start, chunk.rows.stop))
        groups = list(range(chunk.groups.start, chunk.groups.stop))
        assert len(rows) == len(groups) * chunk.per_group
        assert {row // per_group for row in rows} == set(groups)
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget
        seen += rows
    assert seen == list(range(len(lengths)))
