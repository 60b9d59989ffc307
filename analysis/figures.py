"""Figures as SVG: reproducible to the byte, legible in black and white, safe for colour-blind readers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from analysis.table1 import Row
from xcompress.settings import Settings

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito's palette
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
                if estimate.value is None:
                    continue
                ours = row.name == settings.method.name
                colour = ORANGE if ours else BLUE
                if estimate.low is not None and estimate.high is not None:
                    axis.plot([estimate.low, estimate.high], [at, at], color=colour, linewidth=2, solid_capstyle="butt")
                axis.plot(estimate.value, at, "D" if ours else "o", color=colour, markersize=6)
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
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "xcompress"})
        plt.close(figure)
    return buffer.getvalue()
