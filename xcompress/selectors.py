"""Which candidate of a pool is read: selectors and the gate, as pure functions of scores.

Lower is better everywhere; a selector that maximises passes negated scores. Ties go to the lowest candidate index, a blank or
non-finite score never wins, and a pool without any usable score falls back to its first candidate (the initial summary).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


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
