"""Selectors and the gate, on values worked out by hand and by properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcompress.selectors import gate_skips, gate_threshold, lowest, majority, oracle

NAN, INF = float("nan"), float("inf")
SCORES = st.lists(
    st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.integers(-2, 2).map(float), min_size=1, max_size=8
)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([2.0, 1.0, 3.0], (1, False)),
        ([1.0, 1.0, 1.0], (0, False)),
        ([2.0, 1.0, 1.0], (1, False)),
        ([None, NAN, 5.0, INF, -INF], (2, False)),
        ([-INF, 7.0], (1, False)),
        ([INF, 7.0], (1, False)),
        ([NAN, None, INF, -INF], (0, True)),
        ([None], (0, True)),
        ([0.0], (0, False)),
        ([-1.0, 0.0], (0, False)),
        (np.array([NAN, 3.0, 2.0]), (2, False)),
    ],
)
def test_lowest(scores: list[float | None], expected: tuple[int, bool]) -> None:
    assert lowest(scores) == expected


def test_lowest_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one"):
        lowest([])


@given(SCORES)
def test_lowest_is_the_first_of_the_usable_minima(scores: list[float | None]) -> None:
    usable = [(score, at) for at, score in enumerate(scores) if score is not None and math.isfinite(score)]
    assert lowest(scores) == ((min(usable)[1], False) if usable else (0, True))


@given(SCORES, st.lists(st.sampled_from([None, NAN, INF, -INF]), max_size=4))
def test_unusable_scores_change_nothing(scores: list[float | None], unusable: list[float | None]) -> None:
    assert lowest([*scores, *unusable]) == lowest(scores)


@pytest.mark.parametrize(
    ("f1", "em", "expected"),
    [
        ([0.2, 0.9, 0.5], [0, 0, 1], 1),
        ([1.0, 1.0], [0, 1], 1),
        ([0.5, 0.5, 0.5], [0, 1, 1], 1),
        ([0.0, 0.0], [0, 0], 0),
        ([0.7, 0.7], [1, 1], 0),
    ],
)
def test_oracle(f1: list[float], em: list[float], expected: int) -> None:
    assert oracle(f1, em) == expected


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=8))
def test_oracle_is_the_first_of_the_best(pairs: list[tuple[float, float]]) -> None:
    assert oracle([f1 for f1, _ in pairs], [em for _, em in pairs]) == pairs.index(max(pairs))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["a", "b", "b"], 1),
        (["a", "b"], 0),
        (["a", "b", "b", "a"], 0),
        (["c", "a", "b", "b", "a"], 1),
        (["a"], 0),
        (["", "", "a"], 2),  # a blank answer is no vote
        (["", "b", "", "a", "b"], 1),
        (["", ""], 0),
    ],
)
def test_majority(answers: list[str], expected: int) -> None:
    assert majority(answers) == expected


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=9))
def test_majority_is_the_first_with_the_most_votes(answers: list[str]) -> None:
    chosen = majority(answers)
    votes = {answer: answers.count(answer) for answer in answers if answer}
    if not votes:
        assert chosen == 0
        return
    assert votes[answers[chosen]] == max(votes.values())
    assert all(votes.get(answer, 0) < votes[answers[chosen]] for answer in answers[:chosen])


def test_threshold_by_hand() -> None:
    ratios = [float(n) for n in range(11)]
    assert gate_threshold(ratios, 0.30) == pytest.approx(7.0)
    assert gate_threshold(list(reversed(ratios)), 0.25) == pytest.approx(7.5)
    assert gate_threshold([None, NAN, INF, *ratios], 0.30) == pytest.approx(7.0)
    assert gate_threshold([4.0], 0.30) == 4.0
    assert gate_threshold([None, NAN], 0.30) is None
    assert gate_threshold([], 0.30) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_threshold_is_the_interpolated_quantile(ratios: list[float], share: float) -> None:
    ordered, place = sorted(ratios), (1 - share) * (len(ratios) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    found = gate_threshold(ratios, share)
    assert found == pytest.approx(low + (high - low) * (place - math.floor(place)), abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40, unique=True), st.floats(0.01, 0.99))
def test_the_gate_skips_at_most_the_share_rounded_up(ratios: list[float], share: float) -> None:
    threshold = gate_threshold(ratios, share)
    assert threshold is not None
    assert sum(gate_skips(ratio, threshold) for ratio in ratios) <= math.ceil(share * len(ratios))


ABOVE = [(0.51, True), (0.5, False), (0.49, False), (None, False), (NAN, False), (INF, False), (np.float32(0.6), True)]


@pytest.mark.parametrize(("ratio", "skips"), ABOVE)
def test_the_gate_skips_strictly_above(ratio: float | None, skips: bool) -> None:
    assert gate_skips(ratio, 0.5) is skips
