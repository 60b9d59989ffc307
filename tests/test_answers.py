"""Scores against hand-computed values, and against the official scripts' values where the shared data is present."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xcompress.answers import containment, exact_match, f1, normalize, self_check

EVAL_CASES = Path(__file__).parents[2] / "shared" / "data" / "eval_cases.jsonl"

# prediction, golds, EM, F1, containment; computed by hand from the official definition
BY_HAND = [
    ("The Lighthouse", ["lighthouse"], 1, 1.0, 1),
    ("lighthouse keeper", ["the lighthouse"], 0, 2 / 3, 1),  # precision 1/2, recall 1
    ("It was built by Ada Brook in 1901", ["Ada Brook"], 0, 4 / 10, 1),  # 2 of 8 words, recall 1
    ("Brook Ada", ["Ada Brook"], 0, 1.0, 0),  # the same bag of words in another order
    ("no no no", ["no no"], 0, 0.8, 1),  # repeated words count as often as both sides have them
    ("yes it is", ["yes"], 0, 0.0, 1),  # a class answer on one side only
    ("yes", ["no", "Yes!"], 1, 1.0, 1),
    ("noanswer", ["noanswer"], 1, 1.0, 1),
    ("2,500", ["2500"], 1, 1.0, 1),  # punctuation is deleted
    ("north-west", ["north west"], 0, 0.0, 0),  # not replaced by a space
    ("Café Olé", ["Cafe Ole"], 0, 0.0, 0),  # accents stay
    ("scarlet", ["car"], 0, 0.0, 0),  # whole words only
    ("red barn", ["barn owl", "big red barn"], 0, 0.8, 0),  # the best gold: 2 of 2, 2 of 3
    ("", ["Lima"], 0, 0.0, 0),
    ("Lima", ["Lima", "!!"], 1, 1.0, 1),
]


@pytest.mark.parametrize(("prediction", "golds", "em", "f", "contained"), BY_HAND)
def test_values_by_hand(prediction: str, golds: list[str], em: float, f: float, contained: float) -> None:
    assert exact_match(prediction, golds) == em
    assert f1(prediction, golds) == pytest.approx(f, abs=1e-12)
    assert containment(prediction, golds) == contained
    # golds with words are scored alike under both settings
    assert exact_match(prediction, golds, empty_golds="match_raw") == em
    assert f1(prediction, golds, empty_golds="match_raw") == pytest.approx(f, abs=1e-12)


def test_values_of_the_official_scripts() -> None:
    if not EVAL_CASES.exists():
        pytest.skip("the shared data is not here")
    cases = [json.loads(line) for line in EVAL_CASES.read_text(encoding="utf-8").split("\n") if line]
    assert len(cases) == 66
    for case in cases:
        assert exact_match(case["prediction"], case["answers"]) == pytest.approx(case["em"], abs=1e-9), case["note"]
        assert f1(case["prediction"], case["answers"]) == pytest.approx(case["f1"], abs=1e-9), case["note"]


def test_normalize() -> None:
    assert normalize("  The  U.S.\tand\n a theatre, an Ant ") == "us and theatre ant"
    assert normalize("The!") == normalize("?") == normalize("") == ""
    assert normalize("a\u00a0b\u2028c") == "b c"  # all Unicode white space separates words, as in the official script


# Golds that normalise to nothing: prediction, gold, official (EM, F1), match_raw (EM, F1)
EMPTY = [
    ("The", "The", (1, 0), (1, 1)),
    ("the ", "The", (1, 0), (1, 1)),
    ("Lima", "The", (0, 0), (0, 0)),
    ("!!", "!!", (1, 0), (1, 1)),
    ("a", "The", (1, 0), (0, 0)),
    ("", "!!", (1, 0), (0, 0)),
    ("", "", (1, 0), (0, 0)),
]


@pytest.mark.parametrize(("prediction", "gold", "official", "match_raw"), EMPTY)
def test_golds_that_normalise_to_nothing(
    prediction: str, gold: str, official: tuple[float, float], match_raw: tuple[float, float]
) -> None:
    assert (exact_match(prediction, [gold]), f1(prediction, [gold])) == official
    raw = (
        exact_match(prediction, [gold], empty_golds="match_raw"),
        f1(prediction, [gold], empty_golds="match_raw"),
    )
    assert raw == match_raw
    assert containment(prediction, [gold]) == 0.0
    assert containment(f"{prediction} Lima", [gold, "Lima"]) == 1.0


@pytest.mark.parametrize("score", [exact_match, f1, containment])
def test_unlabelled_is_not_zero(score) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="unlabelled"):
        score("Lima", [])
    with pytest.raises(TypeError, match="one string"):
        score("Lima", "Lima")


def test_unknown_setting() -> None:
    with pytest.raises(ValueError, match="empty_golds"):
        f1("Lima", ["Lima"], empty_golds="strict")  # type: ignore[arg-type]


def test_self_check() -> None:
    golds = ["Lima", "The", "!!", "yes", "3.14", " "]
    assert self_check(golds) == []
    assert self_check(golds, metric=f1) == ["The", "!!", " "]
    assert self_check(golds, empty_golds="match_raw") == self_check(golds, metric=f1, empty_golds="match_raw") == [" "]
    assert self_check([]) == []
    with pytest.raises(TypeError):
        self_check("Lima")
