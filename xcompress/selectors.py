"""Which candidate of a pool is read: selectors and the gate, as pure functions of scores.

Lower is better everywhere; a selector that maximises passes negated scores. Ties go to the lowest candidate index, a blank or
non-finite score never wins, and a pool without any usable score falls back to its first candidate (the initial summary).

A selector of your own is one function (:data:`Selector`) named under ``selectors`` in a configuration; it then has a row in
Table 1 and can choose in :class:`xcompress.controller.XCompress`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xcompress.perplexity import perplexity
from xcompress.schema import Question, UsageError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """One summary of a question with its scores; None where there is no score (a blank summary).

    Attributes:
        index: 0 is the initial (greedy) summary, 1..K the sampled ones.
        summary: its text; "" is a blank candidate.
        sps: SPS of the method's variant under the reader; lower is better.
        nll: mean negative log-likelihood a token under the reader, nats.
        ratio: concentration ratio (what the gate looks at).
        tokens: summary tokens under the reader, no start token.
        compressor_tokens: prompt and new tokens of all its rounds.
        compressor_nll: minus the compressor's mean log-probability of all it wrote for this candidate, nats.
    """

    index: int
    summary: str
    sps: float | None
    nll: float | None
    ratio: float | None
    tokens: int
    compressor_tokens: int
    compressor_nll: float | None

    @property
    def ppl(self) -> float | None:
        """Perplexity, exp(NLL)."""
        return perplexity(self.nll)


Selector = Callable[[Question, Sequence[Candidate]], Sequence[float | None]]
"""One score a candidate, lower is better; None (or NaN) for a candidate that is not to win."""


def load_selectors(entries: Mapping[str, Any]) -> dict[str, Selector]:
    """The functions that the configuration's ``selectors`` name (``name: {_target_: module.function, ...}``).

    Further keys of an entry are passed to the function as keyword arguments.

    Raises:
        UsageError: an entry has no ``_target_``, or there is no such function.
    """
    from hydra.errors import HydraException
    from hydra.utils import instantiate

    loaded: dict[str, Selector] = {}
    for name, entry in entries.items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("_target_"), str):
            raise UsageError(f"selectors.{name} must be {{_target_: module.function}}, not {entry!r}")
        try:
            loaded[name] = instantiate({**entry, "_partial_": True}, _convert_="all")
        except HydraException as error:
            why = str(error.__cause__ or error).splitlines()[0]
            raise UsageError(f"selectors.{name}: {entry['_target_']} cannot be loaded: {why}") from None
    return loaded


def apply_selector(name: str, selector: Selector, question: Question, candidates: Sequence[Candidate]) -> list[float | None]:
    """The selector's scores as numbers.

    Raises:
        UsageError: it does not give one number (or None) a candidate.
    """
    try:
        scores = [None if score is None else float(score) for score in selector(question, candidates)]
    except (TypeError, ValueError) as error:
        raise UsageError(f"selector {name}, question {question.id!r}: {error}") from error
    if len(scores) != len(candidates):
        raise UsageError(f"selector {name}, question {question.id!r}: {len(scores)} scores for {len(candidates)} candidates")
    return scores


def lowest(scores: Sequence[float | None] | Floats) -> tuple[int, bool]:
    """Position of the lowest usable score and whether there was none (fallback to position 0).

    Args:
        scores: one a candidate, in candidate order; None, NaN and infinities never win.
    """
    values = np.array([np.nan if score is None else score for score in scores], dtype=np.float64)
    if not len(values):
        raise ValueError("a pool needs at least one candidate")
    usable = np.isfinite(values)
    if not usable.any():
        return 0, True
    return int(np.argmin(np.where(usable, values, np.inf))), False


def pick(scores: Sequence[float | None] | Floats, include_initial: bool = True) -> tuple[int, bool]:
    """Candidate with the lowest usable score, and whether there was none (fallback to the initial summary, candidate 0).

    Args:
        scores: one a candidate; candidate 0 is the initial summary.
        include_initial: False lets only the sampled ones compete (where there are any).
    """
    start = 0 if include_initial or len(scores) == 1 else 1
    position, none_usable = lowest(scores[start:])
    return (0, True) if none_usable else (start + position, False)


def oracle(f1: Sequence[float], em: Sequence[float]) -> int:
    """Position of the best answer: highest F1, EM breaking ties, then the lowest index."""
    order = sorted(range(len(f1)), key=lambda index: (-f1[index], -em[index], index))
    return order[0]


def majority(answers: Sequence[str]) -> int:
    """Position of the first candidate that gives the most frequent (normalised) answer; ties to the lowest index.

    A blank answer is no vote: it wins only where all are blank.
    """
    counts = {answer: answers.count(answer) if answer else 0 for answer in answers}
    return max(range(len(answers)), key=lambda index: (counts[answers[index]], -index))


def gate_threshold(ratios: Sequence[float | None] | Floats, share: float) -> float | None:
    """Concentration ratio above which the initial summary is kept: the (1 - share) quantile of the calibration ratios.

    None if there is no usable ratio (the paper's gate then cannot be run).
    """
    values = np.array([np.nan if ratio is None else ratio for ratio in ratios], dtype=np.float64)
    values = values[np.isfinite(values)]
    return float(np.quantile(values, 1 - share)) if len(values) else None


def gate_skips(ratio: float | None, threshold: float) -> bool:
    """Whether sampling is skipped: the initial summary's ratio lies above the threshold (an unscored one never does)."""
    return ratio is not None and bool(np.isfinite(ratio)) and float(ratio) > threshold


class RollingGate:
    """The gate of the authors' release: it judges each ratio by the last ones it has seen, so the order of questions matters.

    The first ``size`` ratios fill the pool and are always sampled. Later ones are sampled at or below the pool's ``share``
    quantile, and then take the place of its smallest ratio; the others are skipped and take the place of its largest.

    Args:
        share: quantile, 0.30 in the release.
        size: ratios in the pool, 50 in the release.
        pool: ratios seen before, from :attr:`pool` of an earlier gate.
    """

    def __init__(self, share: float, size: int, pool: Sequence[float] = ()) -> None:
        self.share = share
        self.size = size
        self.pool = [float(ratio) for ratio in pool]

    def skips(self, ratio: float | None) -> bool:
        """Whether sampling is skipped; the ratio joins the pool (an unscored one is sampled and joins nothing)."""
        if ratio is None or not np.isfinite(ratio):
            return False
        if len(self.pool) < self.size:
            self.pool.append(float(ratio))
            return False
        sampled = float(ratio) <= float(np.quantile(self.pool, self.share))
        place = int(np.argmin(self.pool)) if sampled else int(np.argmax(self.pool))
        self.pool[place] = float(ratio)
        return not sampled
