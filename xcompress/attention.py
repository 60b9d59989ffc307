"""One attention function for scoring, prefill and decoding, registered with transformers' attention interface.

Three things make it faster than the stock path where several candidates are drawn from one prompt (the normal case here):

* grouped-query heads are never expanded (SDPA's own ``enable_gqa``, or a reshape of the queries);
* the keys and values of a shared prompt are stored and read **once per prompt**, not once per candidate: each candidate's
  queries attend to the shared part and to their own part separately, and the two are merged by their log-sum-exp;
* a candidate's own keys and values go into a buffer of fixed size, so nothing is concatenated at any step.

Texts are padded on the **right** everywhere. Under a causal mask a real token then never sees padding, so no mask is needed for
prefill and scoring, and positions are simply 0, 1, 2, ... for every family, learned positions included.

Shapes: R rows (sequences), G groups of rows with a common prefix, N = R / G rows a group, H query heads, K key/value heads,
S new tokens, P prefix length, T suffix length, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from xcompress.schema import UsageError

NAME = "xcompress"
_MAX_SCORES = 2**25  # largest score matrix held at once (elements): 128 MiB in fp32
_current = threading.local()


@dataclass(frozen=True)
class Chunk:
    """Rows of one pass over suffixes: ``rows`` belong to ``groups``, ``per_group`` rows each."""

    groups: slice
    rows: slice
    per_group: int


@dataclass
class SharedPrefix:
    """Keys and values of G prefixes and of the R = G * N rows that continue them (row r belongs to group r // N).

    Filled by the attention function while the model runs under :func:`use`. ``columns`` new tokens are written at
    ``suffix_length``; the caller advances ``suffix_length`` after each pass.
    """

    prefix_lengths: torch.Tensor  # [G]
    rows_per_group: int
    suffix_capacity: int
    prefix_keys: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [G, K, P, D]
    prefix_values: dict[int, torch.Tensor] = field(default_factory=dict)
    suffix_keys: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [R, K, T, D]
    suffix_values: dict[int, torch.Tensor] = field(default_factory=dict)
    prefix_rows: slice | None = None  # set while prefixes are being computed: the groups of this pass
    chunk: Chunk | None = None  # set while suffixes are being computed: the rows of this pass
    suffix_length: int = 0  # columns of the suffix already written
    suffix_valid: torch.Tensor | None = None  # [R, T] bool: real tokens (right padding of shorter suffixes is a hole)
    suffix_positions: torch.Tensor | None = None  # [R, T] absolute positions, read by sliding-window layers

    def select(self, rows: torch.Tensor, groups: torch.Tensor, rows_per_group: int) -> None:
        """Keep ``rows`` [R'] of ``groups`` [G'] in that order; finished sequences leave the batch this way."""
        keep_groups = len(groups) == len(self.prefix_lengths)
        if not keep_groups:
            self.prefix_lengths = self.prefix_lengths[groups]
        for layer in self.suffix_keys:
            if not keep_groups and self.prefix_keys:  # none where every prompt is a single token
                self.prefix_keys[layer] = self.prefix_keys[layer][groups]
                self.prefix_values[layer] = self.prefix_values[layer][groups]
            self.suffix_keys[layer] = self.suffix_keys[layer][rows]
            self.suffix_values[layer] = self.suffix_values[layer][rows]
        assert self.suffix_valid is not None and self.suffix_positions is not None
        self.suffix_valid = self.suffix_valid[rows]
        self.suffix_positions = self.suffix_positions[rows]
        self.rows_per_group = rows_per_group


class Packed:
    """Texts of B lengths laid end to end in one row of N tokens, without padding between them.

    Everything but attention works on the row; attention lays it out as [B, W] with the padding on the right, and back.

    Args:
        lengths: of the texts, each at least 1.
        device: where the row is.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = torch.tensor(lengths, device=device)
        ends = self.lengths.cumsum(0)
        self.last = ends - 1  # [B] place of each text's last token in the row
        columns = torch.arange(max(2, *lengths), device=device)  # pooling wants a second column
        # Padding repeats the text's own last token: a finite value that no real token attends to.
        self._places = ((ends - self.lengths)[:, None] + columns).minimum(self.last[:, None])  # [B, W] -> N
        self._real = (columns < self.lengths[:, None]).flatten().nonzero().squeeze(1)  # [N] -> B * W

    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """[B, W, ...] right-padded copy of [N, ...]."""
        return states[self._places]

    def row(self, states: torch.Tensor) -> torch.Tensor:
        """[N, ...] of right-padded [B, W, ...]."""
        return states.flatten(0, 1)[self._real]

    @property
    def positions(self) -> torch.Tensor:
        """[1, N] position of each token in its own text."""
        width = self._places.shape[1]
        return (self._real % width)[None]


class use:
    """Context manager: model calls inside it read and fill ``plan`` (thread-local, so two threads do not mix)."""

    def __init__(self, plan: SharedPrefix | Packed) -> None:
        self.plan = plan

    def __enter__(self) -> SharedPrefix | Packed:
        _current.plan = self.plan
        return self.plan

    def __exit__(self, *_: object) -> None:
        _current.plan = None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query`` [R, H, S, D] over ``key``/``value`` [R, K, S, D] and, under :func:`use`, what the plan holds.

    Returns [R, S, H, D] and None (no attention weights are kept). Raises ValueError for attention masks: rows are padded on the
    right, so none is needed. Raises UsageError for attention sinks (``s_aux``), which would change every weight.
    """
    if s_aux is not None:
        raise UsageError(f"{type(module).__name__} has learned attention sinks, which this program does not compute")
    if attention_mask is not None:
        raise ValueError("right-padded batches need no attention mask; none may be passed")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan: SharedPrefix | Packed | None = getattr(_current, "plan", None)
    if isinstance(plan, Packed):
        # [1, H, N, D] to [B, H, W, D], and [B, W, H, D] back to [1, N, H, D].
        query, key, value = (plan.rows(each[0].transpose(0, 1)).transpose(1, 2) for each in (query, key, value))
        return plan.row(_causal(query, key, value, scaling, sliding_window, softcap))[None], None
    if plan is None or plan.prefix_rows is not None:
        if plan is not None:
            _store_prefix(plan, int(module.layer_idx), key, value)  # type: ignore[arg-type]
        return _causal(query, key, value, scaling, sliding_window, softcap), None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return _continue(plan, layer, query, key, value, scaling, sliding_window, softcap), None


def _store_prefix(plan: SharedPrefix, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Prefixes may be computed in several passes (groups of like length); their keys end in one padded buffer."""
    groups, longest = len(plan.prefix_lengths), int(plan.prefix_lengths.max())
    if layer not in plan.prefix_keys:
        shape = (groups, key.shape[1], longest, key.shape[3])
        plan.prefix_keys[layer] = key.new_zeros(shape)
        plan.prefix_values[layer] = value.new_zeros(shape)
    plan.prefix_keys[layer][plan.prefix_rows, :, : key.shape[2]] = key
    plan.prefix_values[layer][plan.prefix_rows, :, : value.shape[2]] = value


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    length = query.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if softcap is not None:
        return _capped(query, key, value, scaling, window, softcap)
    if window is None or length <= window:
        out = scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=length > 1, enable_gqa=gqa)
    else:
        mask = _within(torch.arange(length, device=query.device), torch.arange(length, device=query.device), window)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2)


def _within(query_positions: torch.Tensor, key_positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[..., S, T] bool: which keys a query may see (causal, and inside the sliding window where there is one)."""
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None, softcap: float
) -> torch.Tensor:
    """Plain attention with tanh soft-capping (Gemma 2), which SDPA does not offer."""
    positions = torch.arange(query.shape[2], device=query.device)
    repeat = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeat, 1).transpose(2, 3) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_within(positions, positions, window), float("-inf"))
    return (scores.float().softmax(-1).to(value.dtype) @ value.repeat_interleave(repeat, 1)).transpose(1, 2)


def _continue(
    plan: SharedPrefix,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    rows, heads, new, size = query.shape
    kv_heads, shared = key.shape[1], heads // key.shape[1]
    chunk = plan.chunk or Chunk(slice(None), slice(None), plan.rows_per_group)
    lengths = plan.prefix_lengths[chunk.groups]
    groups, per_group = len(lengths), chunk.per_group
    start, end = plan.suffix_length, plan.suffix_length + new
    assert plan.suffix_valid is not None and plan.suffix_positions is not None
    if layer not in plan.suffix_keys:
        shape = (len(plan.suffix_valid), kv_heads, plan.suffix_capacity, size)
        plan.suffix_keys[layer] = key.new_zeros(shape)
        plan.suffix_values[layer] = value.new_zeros((*shape[:3], value.shape[3]))
    plan.suffix_keys[layer][chunk.rows, :, start:end] = key
    plan.suffix_values[layer][chunk.rows, :, start:end] = value
    positions = plan.suffix_positions[chunk.rows, start:end]  # [R, S]
    flash = new > 1 and window is None and softcap is None and _has_flash(query)

    # A row's own part: query heads that share a key/value head are stacked, so keys are never repeated.
    if start == 0 and flash:
        own = _flash(query, key, value, scaling, causal=True)  # right padding: plain causal, nothing to mask
    else:
        seen = plan.suffix_valid[chunk.rows, :end]
        visible = seen[:, None] & _within(positions, plan.suffix_positions[chunk.rows, :end], window)  # [R, S, end]
        own = _partial(
            query.reshape(rows, kv_heads, shared * new, size),
            plan.suffix_keys[layer][chunk.rows, :, :end],
            plan.suffix_values[layer][chunk.rows, :, :end],
            None if new == 1 and bool(visible.all()) else visible[:, None].repeat(1, 1, shared, 1),
            scaling,
            softcap,
        )
    if not plan.prefix_keys:
        return _finish(own, query)

    # The shared part: all rows of a group are stacked as queries against one copy of the prefix.
    stacked = query.reshape(groups, per_group, kv_heads, shared * new, size).transpose(1, 2)
    stacked = stacked.reshape(groups, kv_heads, per_group * shared * new, size)
    prefix_keys, prefix_values = plan.prefix_keys[layer][chunk.groups], plan.prefix_values[layer][chunk.groups]
    if flash and bool((lengths > 0).all()):
        parts = []
        for at, length in enumerate(lengths.tolist()):  # each group's real prefix: nothing to mask
            keys, values = prefix_keys[at : at + 1, :, :length], prefix_values[at : at + 1, :, :length]
            parts.append(_flash(stacked[at : at + 1], keys, values, scaling))
    else:
        mask = _prefix_mask(lengths, prefix_keys.shape[2], positions.view(groups, per_group, new), shared, window, end)
        step = max(1, _MAX_SCORES // max(1, kv_heads * stacked.shape[2] * prefix_keys.shape[2]))
        parts = [
            _partial(
                stacked[at : at + step],
                prefix_keys[at : at + step],
                prefix_values[at : at + step],
                None if mask is None else mask[at : at + step],
                scaling,
                softcap,
            )
            for at in range(0, groups, step)
        ]
    common = tuple(
        torch.cat(piece)
        .view(groups, kv_heads, per_group, shared * new, -1)
        .transpose(1, 2)
        .reshape(rows, kv_heads, shared * new, -1)
        for piece in zip(*parts, strict=True)
    )
    return _finish(_merge(own, common), query)


def _prefix_mask(
    lengths: torch.Tensor, longest: int, positions: torch.Tensor, shared: int, window: int | None, end: int
) -> torch.Tensor | None:
    """[G, 1, N * heads-a-K * S or 1, P] bool: which prefix columns the queries at ``positions`` [G, N, S] may see."""
    columns = torch.arange(longest, device=lengths.device)
    real = columns[None] < lengths[:, None]  # [G, P]
    if window is not None and longest + end > window:
        near = _within(positions, columns, window) & real[:, None, None]
        groups, per_group, new = positions.shape
        return near[:, :, None].expand(-1, -1, shared, -1, -1).reshape(groups, 1, per_group * shared * new, longest)
    return None if bool(real.all()) else real[:, None, None, :]


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _has_flash(query: torch.Tensor) -> bool:
    """Whether the kernel that also returns the log-sum-exp is there (on CPU; elsewhere plain products are used)."""
    return query.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, causal: bool = False) -> _Part:
    """A part of the attention as torch's fused kernel gives it: already normalised, so its weight is 1 at its log-sum-exp."""
    heads = query.shape[1]
    repeat = heads // key.shape[1]
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1), 0.0, causal, scale=scaling
    )
    kv_heads = key.shape[1]
    rows, _, new, size = out.shape
    shape = (rows, kv_heads, repeat * new)
    logsumexp = logsumexp.float().reshape(*shape, 1)
    return out.float().reshape(*shape, size), torch.ones_like(logsumexp), logsumexp


def _partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> _Part:
    """Unnormalised attention over part of the keys: (weighted values, sum of weights, largest score).

    Queries are taken in blocks, so that scores of at most ``_MAX_SCORES`` elements are held at once.
    """
    block = max(1, _MAX_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    if query.shape[2] > block:
        parts = [
            _partial(
                query[:, :, at : at + block],
                key,
                value,
                mask if mask is None or mask.shape[2] == 1 else mask[:, :, at : at + block],
                scaling,
                softcap,
            )
            for at in range(0, query.shape[2], block)
        ]
        weighted, weight, largest = (torch.cat(piece, 2) for piece in zip(*parts, strict=True))
        return weighted, weight, largest
    scores = torch.matmul(query * scaling, key.transpose(2, 3)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    # A part may be wholly masked (a sliding window that has left the prefix): its weight is then 0, not NaN.
    largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = scores.sub_(largest).exp_()
    return torch.matmul(weights.to(value.dtype), value).float(), weights.sum(-1, keepdim=True), largest


def _merge(left: _Part, right: tuple[torch.Tensor, ...]) -> _Part:
    """The same softmax as over all keys at once, from two parts (log-sum-exp merge)."""
    largest = torch.maximum(left[2], right[2])
    scale_left, scale_right = (left[2] - largest).exp(), (right[2] - largest).exp()
    return left[0] * scale_left + right[0] * scale_right, left[1] * scale_left + right[1] * scale_right, largest


def _finish(part: _Part, query: torch.Tensor) -> torch.Tensor:
    """[R, K, heads-a-K * S, D] parts to [R, S, H, D] in the model's dtype."""
    rows, heads, new, _ = query.shape
    # Padding that a sliding window leaves nothing to see has no weight at all; a NaN there would reach real tokens as 0 * NaN.
    out = part[0] / part[1].clamp_min(torch.finfo(torch.float32).tiny)
    return out.view(rows, heads, new, -1).transpose(1, 2).to(query.dtype)


AttentionInterface.register(NAME, attention)
