"""Which prompts share a prefix, and which groups run together. Pure functions of lengths and token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_FILLING = 1.2  # computed rows a real row, at most
_LARGEST = 512  # rows of a group; bounds the search, and no batch is larger


@dataclass(frozen=True)
class Group:
    """Rows whose prompts agree in their first ``prefix`` tokens (``members`` are indices into the list of prompts)."""

    prefix: int
    members: tuple[int, ...]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that two prompts share."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    low, high = 0, length  # invariant: the first `low` tokens agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def share_prefixes(prompts: Sequence[Sequence[int]], caps: Sequence[int] | None = None) -> list[Group]:
    """Group prompts so that computing each group's prefix once saves the most tokens.

    Prompts are sorted, so those with a long common prefix are neighbours; among all ways to cut the sorted list into groups
    (of at most ``_LARGEST`` rows) the one that saves most is found by dynamic programming. A row keeps at least one token of
    its own (its state gives the first prediction); ``caps`` limits the prefix of each prompt further.
    """
    order = sorted(range(len(prompts)), key=lambda index: (tuple(prompts[index]), index))
    limit = [len(prompts[index]) - 1 for index in order]
    if caps is not None:
        limit = [min(own, caps[index]) for own, index in zip(limit, order, strict=True)]
    with_previous = [0, *(common_prefix(prompts[left], prompts[right]) for left, right in pairwise(order))]
    best = [0]  # best[n]: most tokens saved by grouping the first n rows
    cut = [0]  # cut[n]: where the last of those groups starts
    for end in range(1, len(order) + 1):
        saved, start = best[end - 1], end - 1
        prefix = limit[end - 1]
        for at in range(end - 2, max(-1, end - 1 - _LARGEST), -1):
            prefix = min(prefix, limit[at], with_previous[at + 1])
            if prefix <= 0:
                break
            gain = best[at] + prefix * (end - at - 1)
            if gain >= saved:  # of equal savings the larger group: fewer, larger passes
                saved, start = gain, at
        best.append(saved)
        cut.append(start)
    groups: list[Group] = []
    end = len(order)
    while end:
        members = range(cut[end], end)
        common = min([limit[at] for at in members] + [with_previous[at] for at in members[1:]])
        groups.append(Group(common, tuple(order[at] for at in members)))
        end = cut[end]
    return groups[::-1]


def batches(
    groups: Sequence[Group],
    prompt_lengths: Sequence[int],
    new_tokens: Sequence[int],
    cache_tokens: int,
    whole: bool = False,
) -> Iterator[list[Group]]:
    """Groups that run together: like sizes and lengths side by side, within the memory for keys and values.

    A group too large for one batch is split by rows (its prefix is then computed once a part), unless groups must stay
    ``whole``. A single row, or whole group, always runs even if it alone exceeds the budget.
    """
    parts: list[Group] = []
    for group in groups:
        if whole:
            parts.append(group)
            continue
        members = sorted(group.members, key=lambda index: (prompt_lengths[index], index))
        part: list[int] = []
        for index in members:
            trial = [*part, index]
            if part and not _fits([Group(group.prefix, tuple(trial))], prompt_lengths, new_tokens, cache_tokens):
                parts.append(Group(group.prefix, tuple(part)))
                trial = [index]
            part = trial
        parts.append(Group(group.prefix, tuple(part)))
    parts.sort(key=lambda group: (-len(group.members), group.prefix, group.members))
    batch: list[Group] = []
    for group in parts:
        if batch and not _fits([*batch, group], prompt_lengths, new_tokens, cache_tokens):
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def _fits(
    batch: Sequence[Group],
    prompt_lengths: Sequence[int],
    new_tokens: Sequence[int],
    cache_tokens: int,
) -> bool:
    """Whether a batch, padded as it will be, wastes little and stays within the memory for keys and values."""
    prefixes = [group.prefix for group in batch]
    members = [index for group in batch for index in group.members]
    rows = len(batch) * max(len(group.members) for group in batch)
    # Smaller groups are filled up to the largest, and their filling is computed for nothing.
    if rows > _FILLING * len(members) or (min(prefixes) == 0) != (max(prefixes) == 0):
        return False
    suffix = max(prompt_lengths[index] - group.prefix for group in batch for index in group.members)
    new = max(new_tokens[index] for index in members)
    return len(batch) * max(prefixes) + rows * (suffix + new) <= cache_tokens
