"""Figures as SVG: reproducible to the byte, legible in black and white, safe for colour-blind readers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from analysis.stats import Estimate
from xcompress.settings import Settings

if TYPE_CHECKING:
    from analysis.ablations import Setting
    from analysis.correlation import Cell
    from analysis.regret import Regret
    from analysis.specification import Curve
    from analysis.table1 import Row

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito's palette
METRICS = {
    "ppl": "PPL",
    "longppl": "LongPPL",
    "sps": "SPS",
    "question": "question likelihood",
    "confidence": "answer confidence",
    "tokens": "token count",
}
STYLE: Any = {
    "svg.hashsalt": "xcompress",
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def differences(rows: Sequence[Row], settings: Settings) -> bytes:
    """EM and F1 of every method minus CompAct's on the same questions, with intervals; the paper's difference where known."""
    shown = [row for row in rows if row.em_difference.value is not None or row.f1_difference.value is not None]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9, 0.42 * len(shown) + 1.7), sharey=True, layout="constrained")
        for axis, metric, title in zip(axes, ("em", "f1"), ("EM", "F1"), strict=True):
            axis.axvline(0, color=GREY, linewidth=1)
            for at, row in enumerate(shown):
                estimate = row.em_difference if metric == "em" else row.f1_difference
                ours = row.name == settings.method.name
                _point(axis, estimate, at, ORANGE if ours else BLUE, "D" if ours else "o")
                if row.paper and ours:
                    compact = next(r.paper for r in rows if r.name == "compact")
                    if compact:
                        index = 0 if metric == "em" else 1
                        axis.plot(row.paper[index] - compact[index], at, "x", color="black", markersize=8)
            axis.set_yticks(range(len(shown)), [row.label for row in shown])
            axis.set_xlabel(f"{title} minus CompAct's (points)")
            axis.grid(axis="x", color="#dddddd", linewidth=0.6)
            axis.set_axisbelow(True)
        axes[0].invert_yaxis()
        n = max((row.em.n for row in rows), default=0)
        figure.suptitle(
            f"Reader {settings.reader.name}, data set {settings.dataset.name}, n = {n} questions;"
            f" bars: {settings.statistics.level:.0%} intervals (paired bootstrap)",
            fontsize=10,
        )
        return _svg(figure)


def correlation(cells: Sequence[Cell], settings: Settings) -> bytes:
    """Every correlation with its interval; one panel per form, EM filled, F1 open; the paper's figures as crosses."""
    forms = list(dict.fromkeys(cell.form for cell in cells))
    names = list(dict.fromkeys(cell.metric for cell in cells))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(forms), figsize=(3 * len(forms), 0.7 * len(names) + 1.4), sharey=True, layout="constrained"
        )
        for axis, form in zip(axes, forms, strict=True):
            axis.axvline(0, color=GREY, linewidth=1)
            for cell in (cell for cell in cells if cell.form == form):
                at = names.index(cell.metric) + (-0.15 if cell.quality == "em" else 0.15)
                _point(axis, cell.estimate, at, BLUE if cell.quality == "em" else ORANGE, "o" if cell.quality == "em" else "s")
                if cell.paper is not None:
                    axis.plot(cell.paper, at, "x", color="black", markersize=7)
            axis.set_xlim(-1, 1)
            axis.set_title(form, fontsize=10)
            axis.set_xlabel("Pearson r")
            axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes[0].set_yticks(range(len(names)), [METRICS.get(n, n) for n in names])
        axes[0].invert_yaxis()
        figure.suptitle("Correlation with EM (circles) and F1 (squares); positive: prefers better summaries", fontsize=10)
        return _svg(figure)


def ablations(settings_found: Sequence[Setting], settings: Settings) -> bytes:
    """EM minus CompAct's by pooling, layer, energy and K, and EM against cost over the gate's thresholds."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings_found:
        groups.setdefault(setting.ablation, []).append(setting)
    shown = [
        name
        for name in ("pooling", "layer", "energy", "K (and the initial summary)", "first_token", "subspace")
        if name in groups
    ]
    gate = next((block for name, block in groups.items() if name.startswith("gate")), [])
    count = len(shown) + bool(gate)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(-(-count // 3), 3, figsize=(11, 2.9 * -(-count // 3)), layout="constrained", squeeze=False)
        panels = list(grid.ravel())
        for axis, name in zip(panels, shown, strict=False):
            block = groups[name]
            axis.axhline(0, color=GREY, linewidth=1)
            for at, setting in enumerate(block):
                _point(
                    axis, setting.em_difference, at, ORANGE if setting.default else BLUE, "D" if setting.default else "o", True
                )
            every = max(1, len(block) // 8)
            axis.set_xticks(range(0, len(block), every), [setting.value for setting in block[::every]], fontsize=8)
            axis.set_title(name, fontsize=10)
            axis.set_ylabel("EM minus CompAct's", fontsize=8)
        if gate:
            axis = panels[len(shown)]
            measured = [setting for setting in gate if setting.em.value is not None]
            static = [setting for setting in measured if not setting.value.startswith("release")]
            axis.plot([s.cost for s in static], [s.em.value for s in static], color=BLUE, linewidth=1)
            for setting in measured:
                release = setting not in static
                marker = "^" if release else "D" if setting.default else "o"
                axis.plot(setting.cost, setting.em.value, marker, color=ORANGE if setting.default or release else BLUE)
                if setting.default or release:
                    mark = "release" if release else "paper" if settings.method.gate == "paper" else "own"
                    axis.annotate(mark, (setting.cost, setting.em.value), (4, 4), textcoords="offset points", fontsize=8)
            axis.set_title("gate: EM against compressor tokens", fontsize=10)
            axis.set_xlabel("compressor tokens a question", fontsize=8)
            axis.set_ylabel("EM", fontsize=8)
        for axis in panels[count:]:
            axis.set_visible(False)
        figure.suptitle(
            "Lowest SPS, one thing varied at a time; diamonds: the default; bars: intervals over questions", fontsize=10
        )
        return _svg(figure)


def regret(found: Sequence[Regret], settings: Settings) -> bytes:
    """Share of the oracle's headroom over CompAct that each selector captures; EM circles, F1 squares."""
    names = list(dict.fromkeys(entry.name for entry in found))
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 0.34 * len(names) + 1.3), layout="constrained")
        axis.axvline(0, color=GREY, linewidth=1)
        axis.axvline(1, color=GREY, linewidth=1, linestyle=":")
        for entry in found:
            at = names.index(entry.name) + (-0.15 if entry.metric == "em" else 0.15)
            first = entry.metric == "em"
            _point(axis, entry.of_initial, at, BLUE if first else ORANGE, "o" if first else "s")
        axis.set_yticks(range(len(names)), [next(e.label for e in found if e.name == name) for name in names])
        axis.invert_yaxis()
        axis.set_xlabel("share of the oracle's headroom over CompAct (0: CompAct, 1: oracle)")
        axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        n = max((entry.regret.n for entry in found), default=0)
        figure.suptitle(
            f"Selection: EM circles, F1 squares; {settings.reader.name}, {settings.dataset.name}, n = {n}", fontsize=10
        )
        return _svg(figure)


def specification(curve: Curve, settings: Settings) -> bytes:
    """All variants' differences to CompAct in ascending order, with pointwise intervals; the method's own variant marked."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
        # Thousands of variants are drawn at a few hundred places: more cannot be seen, and would be megabytes.
        count = len(curve.differences)
        places = np.unique(np.linspace(0, count - 1, min(count, 600)).round().astype(int))
        low, middle, high = (values[places] for values in (curve.low, curve.differences, curve.high))
        axis.fill_between(places, low, high, color="#bbbbbb", linewidth=0)
        axis.plot(places, middle, color=BLUE, linewidth=1.5)
        axis.axhline(0, color=GREY, linewidth=1)
        if curve.default is not None:
            axis.plot(curve.default, curve.differences[curve.default], "D", color=ORANGE, markersize=7)
        axis.set_xlabel("SPS variants, worst to best (diamond: the method's own)")
        axis.set_ylabel("EM minus CompAct's (points)")
        return _svg(figure)


def _point(axis: Any, estimate: Estimate, at: float, colour: str, marker: str, upright: bool = False) -> None:
    """An estimate with its interval, at a place on the other axis."""
    if estimate.value is None:
        return
    if estimate.low is not None and estimate.high is not None:
        bounds, place = [estimate.low, estimate.high], [at, at]
        axis.plot(*((place, bounds) if upright else (bounds, place)), color=colour, linewidth=2, solid_capstyle="butt")
    axis.plot(*((at, estimate.value) if upright else (estimate.value, at)), marker, color=colour, markersize=5)


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "xcompress"})
    plt.close(figure)
    return buffer.getvalue()
