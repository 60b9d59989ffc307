"""The paper's ablations as choices from the same read pool: no model runs again.

Settings come with the EM and F1 of choosing by them, their difference to CompAct, and intervals over questions. No gate, so
that only what is ablated varies; the gate has its own curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from analysis import figures, output, stored
from analysis.about import sentence
from analysis.load import Floats, Pool
from analysis.stats import Estimate, bootstrap_table, expected_best_of_k
from analysis.table1 import gate_decisions
from xcompress.forward import POOLINGS, resolve_layer
from xcompress.selectors import gate_skips, gate_threshold, lowest
from xcompress.settings import Settings
from xcompress.store import write_atomically


@dataclass(frozen=True)
class Setting:
    """One value of what is varied. ``cost`` is compressor tokens a question, where the setting changes it."""

    ablation: str
    value: str
    em: Estimate
    f1: Estimate
    em_difference: Estimate
    f1_difference: Estimate
    default: bool
    cost: float | None = None


def ablations(pool: Pool, settings: Settings) -> list[Setting]:
    """Pooling, layer, energy, first token, start token, subspace, K and gate; each varied alone around ``settings.method``."""
    method = settings.method
    found: list[Setting] = []
    for name, values in varied(pool).items():
        chosen = {str(value): choice_by_sps(pool, settings, **{name: value}) for value in values}
        found += _settings(pool, settings, name, chosen, str(_default(pool, method, name)))
    found += _by_number(pool, settings)
    found += _by_gate(pool, settings)
    return found


def varied(pool: Pool) -> Mapping[str, Sequence[Any]]:
    """The settings of SPS that are varied, one at a time, and their stored values."""
    return {
        "pooling": POOLINGS,
        "layer": [*range(pool.blocks + 1), "normed"],
        "energy": pool.axes["energy"],
        "first_token": [True, False],
        "start_token": pool.axes["start_token"],
        "subspace": pool.axes["subspace"],
    }


def _default(pool: Pool, method: Any, name: str) -> Any:
    if name == "layer":
        index = resolve_layer(method.layer, pool.blocks)
        return "normed" if index > pool.blocks else index
    if name == "energy":
        return min(pool.axes["energy"], key=lambda energy: abs(energy - method.energy))
    return getattr(method, name)


def members(pool: Pool, settings: Settings) -> np.ndarray[Any, Any]:
    """Candidate indices that compete."""
    start = 0 if settings.method.include_initial or settings.generation.candidates == 0 else 1
    return np.arange(start, pool.quality.em.shape[1])


def choice_by_sps(pool: Pool, settings: Settings, **changes: Any) -> tuple[Floats, Floats]:
    """EM and F1 [Q] of choosing the lowest SPS of a changed variant."""
    competing = members(pool, settings)
    view = pool.view(replace(settings.method, **changes))[:, competing]
    picks = np.array([0 if bare else competing[position] for position, bare in map(lowest, view)])
    rows = np.arange(len(picks))
    return pool.quality.em[rows, picks], pool.quality.f1[rows, picks]


def _settings(
    pool: Pool,
    settings: Settings,
    name: str,
    chosen: Mapping[str, tuple[Floats, Floats]],
    default: str,
    costs: Mapping[str, float] | None = None,
) -> list[Setting]:
    """Estimates of each value, all from the same resampled questions."""
    estimates: list[list[Estimate]] = []
    options: Any = {
        "seed": settings.seed,
        "level": settings.statistics.level,
        "resamples": settings.statistics.resamples,
    }
    for index, quality in enumerate((pool.quality.em, pool.quality.f1)):
        columns = [quality[:, 0], *(values[index] for values in chosen.values())]
        matrix = np.stack(columns, 1)[pool.labelled]
        estimates.append(bootstrap_table(matrix, **options)[1:])
        estimates.append(bootstrap_table(matrix, reference=0, **options)[1:])
    return [
        Setting(
            ablation=name,
            value=value,
            em=estimates[0][at],
            f1=estimates[2][at],
            em_difference=estimates[1][at],
            f1_difference=estimates[3][at],
            default=value == default,
            cost=costs.get(value) if costs else None,
        )
        for at, value in enumerate(chosen)
    ]


def _by_number(pool: Pool, settings: Settings) -> list[Setting]:
    """K = 1, 2, ...: the exact expectation over all subsets of K sampled candidates, without and with the initial summary."""
    sampled = pool.quality.em.shape[1] - 1
    found: list[Setting] = []
    for name, with_initial in (("K (sampled only)", False), ("K (and the initial summary)", True)):
        chosen: dict[str, tuple[Floats, Floats]] = {}
        costs: dict[str, float] = {}
        for k in range(1, sampled + 1):
            chosen[str(k)] = (
                expected_quality(pool, settings, pool.quality.em, k, with_initial),
                expected_quality(pool, settings, pool.quality.f1, k, with_initial),
            )
            per_candidate = pool.compressor_tokens[:, 1:].mean(1) * k
            costs[str(k)] = float((per_candidate + with_initial * pool.compressor_tokens[:, 0]).mean())
        found += _settings(pool, settings, name, chosen, str(settings.generation.candidates), costs)
    return found


def expected_quality(pool: Pool, settings: Settings, quality: Floats, k: int, with_initial: bool) -> Floats:
    """Expected quality [Q] of the lowest SPS over all subsets of ``k`` sampled candidates; NaN where unlabelled."""
    sps = pool.view(settings.method)
    column = np.full(len(quality), np.nan)
    for at in np.flatnonzero(pool.labelled):
        column[at] = _expected(sps[at], quality[at], k, with_initial)
    return column


def _expected(scores: Floats, values: Floats, k: int, with_initial: bool) -> float:
    """Expected quality of the lowest score among k of the sampled candidates (and the initial one, index 0)."""
    if not with_initial:
        return expected_best_of_k(scores[1:], values[1:], k)
    # The initial summary is in every subset: it wins unless a lower-scored candidate is drawn (ties go to it, index 0).
    initial = scores[0]
    if not np.isfinite(initial):
        # An unusable initial score never wins while a usable one is drawn; only an all-unusable draw falls back to it.
        usable = np.isfinite(scores[1:])
        filled = np.where(usable, values[1:], values[0])
        return expected_best_of_k(scores[1:], filled, k)
    better = np.isfinite(scores[1:]) & (scores[1:] < initial)
    # Candidates that cannot beat the initial summary all give its quality.
    merged_scores = np.where(better, scores[1:], np.inf)
    merged_values = np.where(better, values[1:], values[0])
    return expected_best_of_k(merged_scores, merged_values, k)


def _by_gate(pool: Pool, settings: Settings) -> list[Setting]:
    """The gate over all thresholds: the share of calibration questions it would keep against quality and cost."""
    if not len(pool.calibration_ratio):
        return []
    method = settings.method
    sampled_em, sampled_f1 = choice_by_sps(pool, settings)
    ratios = pool.calibration_ratios(method)
    decisions: dict[str, Any] = {}
    for share in np.round(np.arange(0.0, 1.01, 0.1), 2):
        threshold = -np.inf if share == 1 else np.inf if share == 0 else gate_threshold(ratios, float(share))
        assert threshold is not None
        decisions[f"{share:.1f}"] = [gate_skips(ratio, float(threshold)) for ratio in pool.initial_ratio(method)]
    # The gate of the release judges by the test questions before, in their order, and by no calibration.
    decisions[RELEASE] = gate_decisions(pool, replace(method, gate="release", gate_share=0.30))
    chosen: dict[str, tuple[Floats, Floats]] = {}
    costs: dict[str, float] = {}
    for key, decided in decisions.items():
        skips = np.asarray(decided)
        chosen[key] = (
            np.where(skips, pool.quality.em[:, 0], sampled_em),
            np.where(skips, pool.quality.f1[:, 0], sampled_f1),
        )
        costs[key] = float(np.where(skips, pool.compressor_tokens[:, 0], pool.compressor_tokens.sum(1)).mean())
    own = RELEASE if method.gate == "release" else f"{method.gate_share:.1f}"
    return _settings(pool, settings, "gate (share kept on calibration)", chosen, own, costs)


RELEASE = "release (rolling)"
PAPER = Path(__file__).parent / "paper" / "ablations.yaml"


def write(pool: Pool, settings: Settings, folder: Path) -> list[Setting]:
    """``ablations.{csv,md,json,svg}``: one block per ablation, the default marked."""
    note = sentence(pool, settings)
    found = ablations(pool, settings)
    paper = yaml.safe_load(PAPER.read_text(encoding="utf-8"))
    records = []
    text = [
        "# Ablations",
        "",
        note,
        "",
        "Choosing by lowest SPS without a gate; one thing varied at a time; * marks the default.",
        "",
    ]
    for name in dict.fromkeys(setting.ablation for setting in found):
        block = [setting for setting in found if setting.ablation == name]
        priced = any(setting.cost is not None for setting in block)
        headings = [name, "EM", "F1", "EM minus CompAct", "F1 minus CompAct", *(["compressor tokens"] if priced else [])]
        rows = []
        for setting in block:
            row = [f"{setting.value}{' *' if setting.default else ''}", output.cell(setting.em), output.cell(setting.f1)]
            row += [output.cell(setting.em_difference, True), output.cell(setting.f1_difference, True)]
            rows.append([*row, *([f"{setting.cost:.0f}"] if setting.cost is not None else [])])
            records.append(
                {
                    "ablation": name,
                    "value": setting.value,
                    "default": setting.default,
                    **output.flat("em", setting.em),
                    **output.flat("f1", setting.f1),
                    **output.flat("em_difference", setting.em_difference),
                    **output.flat("f1_difference", setting.f1_difference),
                    "compressor_tokens": setting.cost,
                }
            )
        text += [f"## {name}", "", output.markdown(headings, rows)]
        cells = paper.get(settings.dataset.name, {}).get(name, {})
        if cells:
            text += [f"The paper's EM: {', '.join(f'{key} {value}' for key, value in cells.items())} (reader not stated).", ""]
    output.write_table(folder, "ablations", records, "\n".join(text), {"note": note})
    write_atomically(folder / "ablations.svg", figures.ablations(found, settings))
    return found


if __name__ == "__main__":
    stored.command(write)
