"""How an answer is scored: exact match, F1 and containment. Pure functions of strings; no file, no model.

EM and F1 are the official HotpotQA ones (SQuAD normalisation; yes / no / noanswer on one side only gives F1 0), each
the maximum over the gold answers on its own. An empty list of golds means *unlabelled* and is a ``ValueError``: the
caller counts such rows and shows 'not available', never 0.

**Golds that normalise to nothing.** ``The`` or ``!!`` lose all their words, and there the official script contradicts
itself: such a gold has EM 1 but F1 0 against itself, and EM 1 against *every* prediction that normalises to nothing,
the empty one included. ``empty_golds`` says what to do with them; other golds are scored alike under both settings.

- ``"official"`` (default): the script's values, so that our figures compare with published ones.
- ``"match_raw"``: such a gold is compared as written (letter case and outer white space apart), for EM and F1 alike:
  ``The`` scores 1 / 1 for ``The`` and 0 / 0 for ``Lima``, ``a`` or an empty prediction. A blank gold matches nothing.
  So a bad alias (``!!`` beside ``Lima``) is in effect skipped, and a model that says nothing earns nothing.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Literal, Protocol

EmptyGolds = Literal["official", "match_raw"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Answers that stand for a class: sharing a word with one of them is no partial credit.
_CLASS_ANSWERS = frozenset({"yes", "no", "noanswer"})


class Metric(Protocol):
    """The common form of :func:`exact_match` and :func:`f1`."""

    def __call__(self, prediction: str, golds: Sequence[str], *, empty_golds: EmptyGolds = "official") -> float: ...


def normalize(text: str) -> str:
    """Lower-case, delete ASCII punctuation, drop the words a / an / the, squeeze white space, in this order.

    Deleting (not replacing) punctuation means that "3.14" equals "314" and "twenty-one" does not equal "twenty one";
    accents and non-ASCII punctuation stay. That is what the official script does.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str], *, empty_golds: EmptyGolds = "official") -> float:
    """1.0 if the prediction equals some gold after normalisation, else 0.0.

    Raises:
        ValueError: no golds (an unlabelled question has no score), or an unknown ``empty_golds``.
        TypeError: ``golds`` is one string (its letters would be taken for golds).
    """
    _check(golds, empty_golds)
    predicted = normalize(prediction)
    for gold in golds:
        wanted = normalize(gold)
        if not wanted and empty_golds == "match_raw":
            if _same_as_written(prediction, gold):
                return 1.0
        elif predicted == wanted:
            return 1.0
    return 0.0


def f1(prediction: str, golds: Sequence[str], *, empty_golds: EmptyGolds = "official") -> float:
    """The best F1 over the golds, in [0, 1], of the bags of normalised words; raises as :func:`exact_match`."""
    _check(golds, empty_golds)
    predicted = normalize(prediction)
    best = 0.0
    for gold in golds:
        wanted = normalize(gold)
        if not wanted and empty_golds == "match_raw":
            best = max(best, float(_same_as_written(prediction, gold)))
        else:
            best = max(best, _word_f1(predicted, wanted))
    return best


def containment(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if some normalised gold occurs in the normalised prediction as whole words, else 0.0.

    A gold that normalises to nothing is contained in nothing (a plain substring test would find it everywhere).
    Raises as :func:`exact_match`.
    """
    _check(golds, "official")
    predicted = f" {normalize(prediction)} "
    wanted = (normalize(gold) for gold in golds)
    return float(any(gold and f" {gold} " in predicted for gold in wanted))


def self_check(golds: Sequence[str], *, metric: Metric = exact_match, empty_golds: EmptyGolds = "official") -> list[str]:
    """The golds that do not score 1 when given as the prediction, in their order; [] is the good result.

    With the official EM (the default) a failure would mean a broken metric. With ``metric=f1`` it lists the golds
    that no prediction can fully match (``The``, ``!!``); with ``empty_golds="match_raw"`` the blank ones.
    """
    if isinstance(golds, str):
        raise TypeError("golds is one string; give a list of strings")
    return [gold for gold in golds if metric(gold, [gold], empty_golds=empty_golds) != 1.0]


def _word_f1(predicted: str, wanted: str) -> float:
    if predicted != wanted and (predicted in _CLASS_ANSWERS or wanted in _CLASS_ANSWERS):
        return 0.0
    predicted_words, wanted_words = predicted.split(), wanted.split()
    shared = sum((Counter(predicted_words) & Counter(wanted_words)).values())
    if shared == 0:  # also where both are empty: the official script gives F1 0 there, though EM 1
        return 0.0
    precision, recall = shared / len(predicted_words), shared / len(wanted_words)
    return 2 * precision * recall / (precision + recall)


def _same_as_written(prediction: str, gold: str) -> bool:
    return bool(gold.strip()) and prediction.strip().lower() == gold.strip().lower()


def _check(golds: Sequence[str], empty_golds: str) -> None:
    if isinstance(golds, str):
        raise TypeError("golds is one string; give a list of strings")
    if not golds:
        raise ValueError("no gold answers: an unlabelled question has no score")
    if empty_golds not in ("official", "match_raw"):
        raise ValueError(f"empty_golds is {empty_golds!r}; it is 'official' or 'match_raw'")
