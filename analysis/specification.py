"""All SPS variants at once: how many beat CompAct, by how much, and how much of the best one is the search for it.

A specification curve (Simonsohn, Simmons and Nelson 2020) over start token, first token, subspace, layer, pooling and energy.
The best of thousands of variants looks good on any data; its p-value is therefore taken from the distribution of the *largest*
difference over all variants when there is no difference anywhere (bootstrap of centred differences, the max-statistic of
Westfall and Young 1993), so it holds however many variants were tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis import figures, output, stored
from analysis.ablations import members
from analysis.about import sentence
from analysis.load import Floats, Pool
from xcompress.settings import Settings
from xcompress.store import write_atomically

_BLOCK = 1024  # variants resampled at once


@dataclass(frozen=True)
class Curve:
    """Differences to CompAct in points, one a variant, ascending.

    Attributes:
        variants: the settings of each, in the order of the differences.
        differences: [V] mean EM (or F1) difference over labelled questions.
        low, high: [V] pointwise bootstrap bounds.
        best_p: p-value of the best variant over all variants.
        default: position of the method's own variant in the order.
        undefined: variants without a score on some question that has one under other variants (left out).
    """

    variants: list[dict[str, Any]]
    differences: Floats
    low: Floats
    high: Floats
    best_p: float | None
    default: int | None
    undefined: int


def curve(pool: Pool, settings: Settings, metric: str = "em") -> Curve:
    """The specification curve of every stored SPS variant, ungated."""
    competing = members(pool, settings)
    quality = pool.quality.em if metric == "em" else pool.quality.f1
    known = np.flatnonzero(pool.labelled)
    axes = list(pool.axes)
    shape = tuple(len(pool.axes[axis]) for axis in axes)
    if not len(known):
        nothing = np.zeros(0)
        return Curve([], nothing, nothing, nothing, None, None, 0)
    sps = pool.sps[np.ix_(known, competing)].reshape(len(known), len(competing), -1)  # [Q, C, V]
    usable = np.isfinite(sps)
    positions = np.argmin(np.where(usable, sps, np.inf), 1)  # [Q, V], ties to the lowest index
    picks = np.where(usable.any(1), competing[positions], 0)
    chosen = np.take_along_axis(quality[known], picks, 1)
    differences = chosen - quality[known, 0][:, None]
    scored = usable.any((0, 1))
    index = np.flatnonzero(scored)
    differences = differences[:, index]
    means = differences.mean(0)
    low, high, best_p = _bootstrap(differences, settings)
    order = np.argsort(means, kind="stable")
    own = int(np.ravel_multi_index(pool.place(settings.method), shape))
    places = {int(variant): at for at, variant in enumerate(index[order])}
    variants = []
    for variant in index[order]:
        values = np.unravel_index(int(variant), shape)
        variants.append({axis: pool.axes[axis][int(value)] for axis, value in zip(axes, values, strict=True)})
    return Curve(
        variants=variants,
        differences=means[order],
        low=low[order],
        high=high[order],
        best_p=best_p,
        default=places.get(own),
        undefined=int((~scored).sum()),
    )


def _bootstrap(differences: Floats, settings: Settings) -> tuple[Floats, Floats, float | None]:
    """Pointwise bounds [V], and the p-value of the largest mean among all variants."""
    questions, variants = differences.shape
    if questions < 2:
        nothing = np.full(variants, np.nan)
        return nothing, nothing, None
    generator = np.random.default_rng(settings.seed)
    resamples = settings.statistics.resamples
    counts = np.empty((resamples, questions))
    for at in range(resamples):
        counts[at] = np.bincount(generator.integers(0, questions, questions), minlength=questions)
    # Thousands of variants make far fewer different choices; each is resampled once.
    distinct, place = np.unique(differences, axis=1, return_inverse=True)
    tail = (1 - settings.statistics.level) / 2
    bounds = np.empty((2, distinct.shape[1]))
    largest = np.full(resamples, -np.inf)
    for at in range(0, distinct.shape[1], _BLOCK):
        block = distinct[:, at : at + _BLOCK]
        means = counts @ block / questions  # whole numbers (EM): exact, whatever the order of summation
        bounds[:, at : at + _BLOCK] = np.quantile(means, [tail, 1 - tail], axis=0)
        largest = np.maximum(largest, (means - block.mean(0)).max(1))
    best_p = (1 + int((largest >= differences.mean(0).max() - 1e-9).sum())) / (1 + resamples)
    low, high = bounds[:, place.ravel()]
    return low, high, float(best_p)


def write(pool: Pool, settings: Settings, folder: Path) -> Curve:
    """``specification.{csv,md,json,svg}``: every variant's EM difference to CompAct, ascending."""
    note = sentence(pool, settings)
    found = curve(pool, settings)
    n = len(found.variants)
    records = [
        {**variant, "em_difference": float(d), "em_difference_low": _plain(low), "em_difference_high": _plain(high)}
        for variant, d, low, high in zip(found.variants, found.differences, found.low, found.high, strict=True)
    ]
    above, below = int((found.differences > 0).sum()), int((found.differences < 0).sum())
    lines = ["# Specification curve: every SPS variant against CompAct (EM, no gate)", "", note, ""]
    if not n:
        lines += ["n/a: no question has a gold answer, or no variant has a score."]
    else:
        best = ", ".join(f"{key} {value}" for key, value in found.variants[-1].items())
        p = "n/a" if found.best_p is None else f"{found.best_p:.3f}"
        sure_above, sure_below = int((found.low > 0).sum()), int((found.high < 0).sum())
        lines += [
            f"{n} variants ({found.undefined} without a score left out): {above} above CompAct ({sure_above} with an interval"
            f" that excludes 0), {below} below ({sure_below} with an interval that excludes 0).",
            "",
            f"Median difference {np.median(found.differences):+.1f} points. Best: {found.differences[-1]:+.1f} points ({best});"
            f" p = {p} for the best of all variants (max-statistic over all {n}).",
        ]
        if found.default is not None:
            rank = n - found.default
            lines += ["", f"The method's own variant: {found.differences[found.default]:+.1f} points, place {rank} of {n}."]
    about = {"note": note, "best_p": found.best_p, "default": found.default}
    output.write_table(folder, "specification", records, "\n".join(lines) + "\n", about)
    write_atomically(folder / "specification.svg", figures.specification(found, settings))
    return found


def _plain(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


if __name__ == "__main__":
    stored.command(write)
