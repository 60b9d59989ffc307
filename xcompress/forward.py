"""One batched forward pass over texts: pooled states of all layers, and token log-probabilities.

Hooks pool each block's output on the fly, so no layer's full states are kept: memory stays that of a plain forward pass. Texts
lie end to end in one row, so no product is spent on padding; attention and pooling see them apart
(:class:`xcompress.attention.Packed`), and padding never takes part in a pooled value.

Layer index l of the L + 1 states: 0 is the embedding output, l the output of block l before any final norm; *penultimate* is
L - 1, the input of the last block. One more entry, ``normed``, is the last state after the model's final norm.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from xcompress.attention import Packed, use
from xcompress.checkpoint import Loaded
from xcompress.schema import UsageError
from xcompress.settings import POOLINGS as POOLINGS

log = logging.getLogger(__name__)
# Tokens of a pass: on a CPU its caches decide, and more gain nothing; on a GPU half of what is free is left to others.
_CPU_TOKENS, _MOST_TOKENS, _SHARE = 4096, 65536, 0.5
# Logits held at once. On a CPU they are to stay in its caches until their log-sum-exp is taken; a GPU wants larger products.
_LOGIT_BYTES, _LOGIT_BYTES_CPU = 2**28, 2**24


class NonFiniteError(ValueError):
    """A hidden state of a real token is not finite. ``index`` is the text's place in the call; ``text``, the text if known."""

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__(f"non-finite hidden states in {dtype}; use float32 for this reader")
        self.index = index
        self.text = ""


@dataclass(frozen=True)
class Forward:
    """What one pass says of one text of T tokens.

    Attributes:
        pooled: [2, L + 2, P, D] float32: first token pooled / left out x layers (last entry: normed) x poolings x D.
            The second half is NaN for a text of one token.
        token_logprobs: float64 log-probability of each token that has a predecessor, nats; the first text token is not among
            them unless a start token preceded it.
    """

    pooled: torch.Tensor
    token_logprobs: torch.Tensor


def layer_names(blocks: int) -> list[str]:
    """Names of the layer axis for a model of ``blocks`` blocks."""
    return [*map(str, range(blocks + 1)), "normed"]


def resolve_layer(layer: str | int, blocks: int) -> int:
    """Position on the layer axis of "penultimate", "last", "normed" or an index 0..L (negative counts from L).

    Raises:
        ValueError: there is no such layer.
    """
    named = {"penultimate": blocks - 1, "last": blocks, "normed": blocks + 1, "embedding": 0}
    if isinstance(layer, str) and layer in named:
        return named[layer]
    try:
        index = int(layer)
    except ValueError:
        raise ValueError(f"layer {layer!r} is not known; use 0..{blocks} or {', '.join(named)}") from None
    index = index + blocks + 1 if index < 0 else index
    if not 0 <= index <= blocks:
        raise ValueError(f"layer {layer} is out of range for a reader of {blocks} blocks (0..{blocks})")
    return index


def pool(states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Pooled vectors [2, B, P, D] of right-padded states [B, T, D]; first token included / left out, P as :data:`POOLINGS`.

    Padding is replaced by the text's own last state before a maximum or minimum, never by zero: all real values may be
    negative, and a repeated real value changes neither. (One copy serves both; infinities would take two.)
    """
    states = states.float()
    first = states[:, 0]
    rest = states[:, 1:]
    count = lengths - 1
    inside = torch.arange(rest.shape[1], device=states.device) < count[:, None]
    last = states[torch.arange(len(states), device=states.device), count]
    if bool(inside.all()):
        high, low, total = rest.amax(1), rest.amin(1), rest.sum(1)
    else:
        real = torch.where(inside[..., None], rest, last[:, None])
        high, low = real.amax(1), real.amin(1)
        total = torch.bmm(inside[:, None].to(rest.dtype), rest).squeeze(1)
    both = []
    for with_first in (True, False):
        if with_first:
            top, bottom, mean = torch.maximum(high, first), torch.minimum(low, first), (total + first) / lengths[:, None]
        else:
            top, bottom, mean = high, low, total / count[:, None]
        largest = torch.where(top.abs() >= bottom.abs(), top, bottom)
        both.append(torch.stack([top, mean, last, bottom, largest], 1))
    both[1][count == 0] = float("nan")
    return torch.stack(both)


class PassSize:
    """Tokens of one pass: as given, or what the device's free memory holds; halved where it does not hold them after all.

    Args:
        loaded: the reader.
        tokens: None to find them.
    """

    def __init__(self, loaded: Loaded, tokens: int | None = None) -> None:
        self.tokens = _fitting(loaded) if tokens is None else tokens

    def halve(self, held: int, texts: int) -> None:
        """After a pass of ``held`` tokens ran out of memory.

        Raises:
            UsageError: it was a single text.
        """
        if texts == 1:
            raise UsageError(f"a text of {held} tokens does not fit on the reader's device; free some of its memory")
        self.tokens = held // 2
        log.warning("a scoring pass of %d tokens ran out of memory; going on with %d", held, self.tokens)


def token_bytes(loaded: Loaded) -> int:
    """Memory that a pass needs for each token at its peak, in the middle of a block; the logits come beside it."""
    config = loaded.text_config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    # Residual, normed (float32 on the way) and pooled copies; what attention lays out anew; the two sides of the MLP.
    states = 4 * config.hidden_size + 4 * size * (heads + 2 * keys) + 4 * inner
    return int(states * loaded.dtype.itemsize + 8 * config.hidden_size)


def _fitting(loaded: Loaded) -> int:
    if loaded.device.type != "cuda":
        return _CPU_TOKENS
    free, _ = torch.cuda.mem_get_info(loaded.device)
    return max(_CPU_TOKENS, min(_MOST_TOKENS, int((free * _SHARE - _LOGIT_BYTES) // token_bytes(loaded))))


@torch.inference_mode()
def run(loaded: Loaded, texts: Sequence[Sequence[int]], size: int | PassSize | None = None) -> Iterator[tuple[int, Forward]]:
    """Forward passes of ``texts`` (token ids, any start token included), long ones first; yields (index, result).

    Args:
        loaded: the reader.
        texts: none may be empty.
        size: tokens a pass (a longer text is a pass of its own); None finds them. A :class:`PassSize` also remembers what
            did not fit.

    Raises:
        ValueError: an empty text, with its index.
        NonFiniteError: a non-finite state at a real token (the dtype overflows).
        UsageError: the device's memory does not hold a single text.
    """
    for index, text in enumerate(texts):
        if not text:
            raise ValueError(f"text {index} has no tokens")
    size = size if isinstance(size, PassSize) else PassSize(loaded, size)
    # Texts of like length go together: attention and pooling pad to the longest of a pass.
    order = sorted(range(len(texts)), key=lambda index: (-len(texts[index]), index))
    at = 0
    while at < len(order):
        end, total = at + 1, len(texts[order[at]])
        while end < len(order) and total + len(texts[order[end]]) <= size.tokens:
            total += len(texts[order[end]])
            end += 1
        members = order[at:end]
        try:
            results = _batch(loaded, [texts[index] for index in members], members)
        except torch.OutOfMemoryError:
            results = None
        if results is None:  # outside the handler, whose traceback holds the pass's tensors
            size.halve(total, len(members))
            torch.cuda.empty_cache()
            continue
        at = end
        yield from zip(members, results, strict=True)


def _batch(loaded: Loaded, texts: Sequence[Sequence[int]], members: Sequence[int]) -> list[Forward]:
    packed = Packed([len(text) for text in texts], loaded.device)
    ids = torch.tensor([[token for text in texts for token in text]], device=loaded.device)
    pooled: list[torch.Tensor] = []

    def keep(states: Any) -> None:
        states = states[0] if isinstance(states, tuple) else states
        pooled.append(pool(packed.rows(states[0]), packed.lengths))

    def keep_input(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    def keep_output(_: torch.nn.Module, __: Any, output: Any) -> None:
        keep(output)

    blocks = loaded.blocks
    hooks = [blocks[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    hooks += [block.register_forward_hook(keep_output) for block in blocks]
    try:
        with use(packed):
            normed = loaded.states(ids, packed.positions)
    finally:
        for hook in hooks:
            hook.remove()
    keep(normed)
    stacked = torch.stack(pooled, 2)  # [2, B, L + 2, P, D]
    finite = torch.isfinite(stacked[0]).flatten(1).all(1)
    if not bool(finite.all()):
        raise NonFiniteError(members[int((~finite).nonzero()[0])], loaded.dtype)
    logprobs = _token_logprobs(loaded, normed[0], ids[0], packed)
    return [Forward(stacked[:, row], logprobs[row]) for row in range(len(texts))]


def _token_logprobs(loaded: Loaded, normed: torch.Tensor, ids: torch.Tensor, packed: Packed) -> list[torch.Tensor]:
    """Per text the float64 log-probabilities of tokens 2..T; only tokens that have a successor reach the output head."""
    inside = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    inside[packed.last] = False
    before = inside.nonzero().squeeze(1)
    states, targets = normed[before], ids[before + 1]
    held = _LOGIT_BYTES_CPU if ids.device.type == "cpu" else _LOGIT_BYTES
    rows = max(32, held // (4 * loaded.text_config.vocab_size))
    parts = [
        -cross_entropy(loaded.logits(states[at : at + rows]), targets[at : at + rows], reduction="none")
        for at in range(0, len(states), rows)
    ]
    flat = torch.cat(parts).double() if parts else torch.zeros(0, dtype=torch.float64)
    return list(torch.split(flat.cpu(), (packed.lengths - 1).tolist()))
