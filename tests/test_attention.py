"""xcompress/attention.py against a plain softmax in float64 and against transformers' own eager attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, VOCABULARY, make_tokenizer
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from xcompress import attention as module
from xcompress.attention import SharedPrefix, attention, use
from xcompress.checkpoint import Loaded, load
from xcompress.engines.base import Draw, Request
from xcompress.engines.hf import HFEngine
from xcompress.schema import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, KV_HEADS, SIZE = 4, 2, 8
Texts = list[torch.Tensor]  # one [H or K, T, D] tensor a row


class Layer(torch.nn.Module):
    """What the attention function reads of a model's attention module."""

    layer_idx = 0


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, cap: float | None) -> torch.Tensor:
    """Attention of one row, [H, T, D] over [K, T, D], as written in any textbook; returns [T, H, D] float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = key.repeat_interleave(HEADS // KV_HEADS, 0), value.repeat_interleave(HEADS // KV_HEADS, 0)
    scores = query @ key.transpose(1, 2) * SIZE**-0.5
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    distance = torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])[None]
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(0, 1)


def random_rows(seed: int, lengths: Sequence[int]) -> tuple[Texts, Texts, Texts]:
    """Queries, keys and values of rows of these lengths; scores are large, so that every masked key would be noticed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, 3.0), (KV_HEADS, 3.0), (KV_HEADS, 1.0))
    query, key, value = ([scale * torch.randn(h, n, SIZE, generator=generator) for n in lengths] for h, scale in sizes)
    return query, key, value


def padded(rows: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """[R, H, width, D], padded on the right with large numbers that must not matter."""
    out = torch.full((len(rows), rows[0].shape[0], width, SIZE), 50.0)
    for at, row in enumerate(rows):
        out[at, :, : row.shape[1]] = row
    return out


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 19])
def test_one_pass_is_plain_attention(length: int, window: int | None, cap: float | None) -> None:
    """Without a plan: causal attention with grouped heads, sliding window and soft-capping."""
    query, key, value = random_rows(length, [length, length])
    out, weights = attention(Layer(), torch.stack(query), torch.stack(key), torch.stack(value), None, 0.0, None, window, cap)
    assert weights is None
    for row in range(2):
        torch.testing.assert_close(out[row].double(), plain(query[row], key[row], value[row], window, cap), rtol=0, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("prefixes", [(6, 3, 0), (5, 5, 5), (0, 0, 0)])
def test_shared_prefix_is_plain_attention(
    prefixes: tuple[int, ...], window: int | None, cap: float | None, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix, suffix, decoding, then fewer rows and more decoding: every real token's output is that of the whole row alone.

    The window ends inside the prefix, inside the suffix, or before both; a short suffix stands beside one that is longer than
    the window; prefixes are computed in two passes and read in several chunks.
    """
    if not fused:
        monkeypatch.setattr(module, "_has_flash", lambda query: False)
    monkeypatch.setattr(module, "_MAX_SCORES", 1)
    per_group, new = 2, 3
    suffixes = torch.tensor([1, 11, 4, 2, 7, 1])
    width = int(suffixes.max())
    lengths = torch.tensor(prefixes)
    starts = lengths.repeat_interleave(per_group)
    query, key, value = random_rows(sum(prefixes), (starts + suffixes + 2 * new).tolist())
    for row in range(len(suffixes)):  # rows of a group agree in their prefix
        first = row - row % per_group
        for part in (query, key, value):
            part[row][:, : starts[row]] = part[first][:, : starts[row]]
    expected = [plain(q, k, v, window, cap) for q, k, v in zip(query, key, value, strict=True)]

    def call(rows: Sequence[int], begin: torch.Tensor, count: torch.Tensor, columns: int) -> torch.Tensor:
        cut = [padded([part[r][:, begin[r] : begin[r] + count[r]] for r in rows], columns) for part in (query, key, value)]
        return attention(Layer(), *cut, None, 0.0, None, window, cap)[0].double()  # type: ignore[arg-type]

    def check(out: torch.Tensor, rows: Sequence[int], begin: torch.Tensor, count: torch.Tensor) -> None:
        assert bool(torch.isfinite(out).all()), "NaN at padding reaches real tokens through 0 * NaN in the next layer"
        for at, row in enumerate(rows):
            wanted = expected[row][begin[row] : begin[row] + count[row]]
            torch.testing.assert_close(out[at, : count[row]], wanted, rtol=0, atol=1e-5)

    plan = SharedPrefix(lengths, per_group, width + 2 * new)
    capacity = torch.arange(width + 2 * new)
    plan.suffix_valid = (capacity < suffixes[:, None]) | (capacity >= width)
    plan.suffix_positions = starts[:, None] + torch.where(capacity < width, capacity, capacity - width + suffixes[:, None])
    nothing, one = torch.zeros_like(suffixes), torch.ones_like(suffixes)
    with use(plan):
        if max(prefixes):
            for groups in (slice(0, 1), slice(1, 3)):
                plan.prefix_rows = groups
                heads = [0, 2, 4][groups]
                check(call(heads, nothing, starts, max(1, max(prefixes[groups]))), heads, nothing, starts)
        plan.prefix_rows = None
        rows = list(range(6))
        check(call(rows, starts, suffixes, width), rows, starts, suffixes)
        plan.suffix_length = width
        for step in range(2 * new):
            if step == new:  # group 0 ends, group 1 keeps its second row, group 2 its first
                rows = [3, 4]
                plan.select(torch.tensor(rows), torch.tensor([1, 2]), 1)
            at = starts + suffixes + step
            check(call(rows, at, one, 1), rows, at, one)
            plan.suffix_length += 1


def test_masks_and_sinks_are_refused() -> None:
    """What the function does not compute is an error, never silently left out."""
    query, key, value = (torch.stack(part) for part in random_rows(0, [3]))
    with pytest.raises(ValueError, match="no attention mask"):
        attention(Layer(), query, key, value, torch.ones(1, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(UsageError, match="attention sinks"):
        attention(Layer(), query, key, value, None, s_aux=torch.zeros(HEADS))


def test_plan_is_for_its_thread_and_block_only() -> None:
    """Another thread sees no plan, and an exception inside the block takes it away."""
    plan = SharedPrefix(torch.tensor([1]), 1, 1)
    seen: list[object] = []
    with pytest.raises(RuntimeError, match="inside"), use(plan):
        thread = threading.Thread(target=lambda: seen.append(getattr(module._current, "plan", None)))
        thread.start()
        thread.join()
        assert module._current.plan is plan
        raise RuntimeError("inside")
    assert seen == [None]
    assert module._current.plan is None


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_right_padding_is_harmless(family: str, tiny: Callable[[str], Loaded], eager: Callable[[str], Any]) -> None:
    """Lengths 3 and 40 in one right-padded batch give the logits of transformers' eager forward on each text alone."""
    loaded, reference = tiny(family), eager(family)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in (3, 40)]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=7)
    logits = loaded.logits(loaded.states(ids, torch.arange(40).expand_as(ids)))
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row, : len(text)], reference(text[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_soft_capping_family(tmp_path: Path) -> None:
    """Gemma 2 caps attention scores and logits: engine and eager forward agree there too, beyond the sliding window."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=128,
        sliding_window=7,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)
    model.save_pretrained(tmp_path)
    make_tokenizer(True).save_pretrained(tmp_path)
    engine = HFEngine(load(tmp_path, "float32", "cpu"))
    auto: Any = AutoModelForCausalLM
    reference = auto.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [tuple(range(10, 30)), (*range(10, 30), 40, 41), (*range(10, 20), *range(50, 70))]
    results = engine.generate([Request(prompt, (Draw(),), 12) for prompt in prompts])
    for prompt, (generation,) in zip(prompts, results, strict=True):
        ids = torch.tensor([[*prompt, *generation.tokens]])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(generation.tokens)
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
        assert generation.logprob_sum == pytest.approx(float(chosen.sum()), abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_scores_are_held_in_blocks(family: str, tiny: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for very few scores at once (and without the fused kernel, as on a GPU) the tokens are the same."""
    engine = HFEngine(tiny(family))
    prompts = [(5, 6, 7, *range(20, 60), n, n + 1, *range(n % 3)) for n in range(70, 78)]
    requests = [Request(prompt, (Draw(), Draw()), 6) for prompt in prompts]
    whole = [[g.tokens for g in result] for result in engine.generate(requests)]
    monkeypatch.setattr(module, "_MAX_SCORES", 700)
    monkeypatch.setattr(module, "_has_flash", lambda query: False)
    assert [[g.tokens for g in result] for result in engine.generate(requests)] == whole
