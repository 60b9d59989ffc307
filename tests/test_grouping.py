"""xcompress/engines/grouping.py: properties that hold for any prompts, and the groups that matter in practice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from xcompress.engines.grouping import Group, batches, common_prefix, share_prefixes

quick = settings(max_examples=150, deadline=None, database=None, derandomize=True)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Prompts as they come: beginnings shared by some, whole prompts repeated, and strangers."""
    stems = draw(st.lists(tokens, min_size=1, max_size=3))
    joined = st.tuples(st.sampled_from([(), *stems]), tokens).map(lambda pair: pair[0] + pair[1])
    prompts = draw(st.lists(joined, max_size=14))
    repeats = draw(st.lists(st.integers(1, 4), min_size=len(prompts), max_size=len(prompts)))
    return draw(st.permutations([p for p, n in zip(prompts, repeats, strict=True) for _ in range(n)]))


def computed(groups: Sequence[Group], prompts: Sequence[Sequence[int]]) -> int:
    """Prompt tokens computed when each group's prefix is computed once."""
    return sum(group.prefix + sum(len(prompts[m]) - group.prefix for m in group.members) for group in groups)


@quick
@given(tokens, tokens, tokens)
def test_common_prefix(stem: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """The bisection finds what a loop finds."""
    left, right = stem + left, stem + right
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(left, right) == expected
    assert common_prefix(left, left) == len(left)
    assert common_prefix(left, ()) == 0


@quick
@given(prompt_lists(), st.data())
def test_share_prefixes(prompts: list[tuple[int, ...]], data: st.DataObject) -> None:
    """Every row once; the prefix is really common, leaves each row a token of its own, respects caps and never costs more."""
    caps = data.draw(st.none() | st.lists(st.integers(0, 20), min_size=len(prompts), max_size=len(prompts)))
    groups = share_prefixes(prompts, caps)
    assert sorted(m for group in groups for m in group.members) == list(range(len(prompts)))
    for group in groups:
        assert len({prompts[m][: group.prefix] for m in group.members}) == 1
        for member in group.members:
            assert 0 <= group.prefix <= len(prompts[member]) - 1
            assert caps is None or group.prefix <= caps[member]
    assert computed(groups, prompts) <= sum(map(len, prompts))
    assert share_prefixes(prompts, caps) == groups


def test_candidates_of_one_prompt_share_all_but_one_token() -> None:
    """K draws of a prompt: its state at the last token is each row's own."""
    assert share_prefixes([(1, 2, 3, 4)] * 5) == [Group(3, (0, 1, 2, 3, 4))]


def test_demonstrations_are_shared() -> None:
    """Reading prompts with the same demonstrations form one group, whatever order they come in."""
    demonstrations = tuple(range(50))
    prompts = [(*demonstrations, 100 + n, *range(n)) for n in range(7)][::-1]
    (group,) = share_prefixes(prompts)
    assert group.prefix == 50


def test_different_questions_do_not_break_candidates() -> None:
    """Two questions with five candidates each share an instruction; sharing only that would save less."""
    prompts = [(1, 2, 3, question, *range(10, 40)) for question in (7, 8) for _ in range(5)]
    assert [(group.prefix, len(group.members)) for group in share_prefixes(prompts)] == [(33, 5), (33, 5)]


def test_strangers_and_single_tokens_share_nothing() -> None:
    """No common first token, or no token to spare: one group each."""
    assert [len(group.members) for group in share_prefixes([(1, 5), (2, 5), (3, 5)])] == [1, 1, 1]
    assert share_prefixes([(1,), (1,)]) == [Group(0, (0,)), Group(0, (1,))]
    assert share_prefixes([]) == []


@quick
@given(prompt_lists(), st.integers(1, 60), st.data())
def test_batches(prompts: list[tuple[int, ...]], cache: int, data: st.DataObject) -> None:
    """Every row once, with its group's prefix; the padded batch stays within its memory unless it is a single row."""
    new = data.draw(st.lists(st.integers(0, 9), min_size=len(prompts), max_size=len(prompts)))
    groups = share_prefixes(prompts)
    prefix_of = {member: group.prefix for group in groups for member in group.members}
    group_of = {member: at for at, group in enumerate(groups) for member in group.members}
    result = list(batches(groups, [len(prompt) for prompt in prompts], new, cache))
    assert Counter(m for batch in result for part in batch for m in part.members) == Counter(range(len(prompts)))
    for batch in result:
        members = [m for part in batch for m in part.members]
        for part in batch:
            assert {prefix_of[m] for m in part.members} == {part.prefix}
            assert len({group_of[m] for m in part.members}) == 1
        if len(members) == 1:
            continue
        rows = len(batch) * max(len(part.members) for part in batch)
        suffix = max(len(prompts[m]) - prefix_of[m] for m in members)
        assert len(batch) * max(part.prefix for part in batch) + rows * (suffix + max(new[m] for m in members)) <= cache


def test_groups_of_unlike_size_do_not_share_a_batch() -> None:
    """Six candidates of one prompt beside eight lone prompts: filling the lone ones up to six would cost 48 rows for 8."""
    groups = [Group(9, tuple(range(6))), *(Group(0, (6 + n,)) for n in range(8))]
    found = list(batches(groups, [10] * 14, [4] * 14, 10_000))
    assert [len(batch) for batch in found] == [1, 8]


def test_batches_are_not_smaller_than_needed() -> None:
    """Everything that fits runs together; one token less of memory and it is split."""
    groups, lengths, new = [Group(3, (0, 1)), Group(3, (2, 3))], [5] * 4, [2] * 4
    assert list(batches(groups, lengths, new, 22)) == [groups]
    assert len(list(batches(groups, lengths, new, 21))) == 2


@quick
@given(st.lists(tokens, min_size=1, max_size=7))
def test_grouping_is_optimal(prompts: list[tuple[int, ...]]) -> None:
    """No other way to cut the sorted prompts saves more tokens (all 2^(n-1) ways tried)."""
    ordered = sorted(prompts)
    least = len(prompts) * 100
    for cuts in range(2 ** (len(ordered) - 1)):
        blocks: list[list[tuple[int, ...]]] = [[ordered[0]]]
        for at, prompt in enumerate(ordered[1:]):
            if cuts >> at & 1:
                blocks.append([])
            blocks[-1].append(prompt)
        total = 0
        for block in blocks:
            prefix = min([len(p) - 1 for p in block] + [common_prefix(block[0], p) for p in block])
            total += prefix + sum(len(p) - prefix for p in block)
        least = min(least, total)
    assert computed(share_prefixes(prompts), prompts) == least


def test_a_stranger_does_not_spoil_its_neighbours() -> None:
    """One lone prompt that sorts before five like ones shares nothing with them, and they keep their whole prefix."""
    prompts = [(1, 2, *range(100, 140)), *[(1, 3, *range(40), n) for n in range(5)]]
    assert sorted((group.prefix, len(group.members)) for group in share_prefixes(prompts)) == [(41, 1), (42, 5)]
