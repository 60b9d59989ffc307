"""The page's figures: what is drawn from which stored table, how to read it, and its numbers as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from analysis.figures import METRICS
from analysis.page import drawing, tables
from analysis.page.drawing import Mark, Point

Record = Mapping[str, Any]
FORMS = {"pooled": "pooled", "within": "within questions", "binned": "binned (deciles)", "partial": "given length"}
ABLATIONS = {  # what is drawn, in this order, and its axis
    "pooling": "pooling over tokens",
    "layer": "layer of the hidden states",
    "energy": "share of the spectrum in the subspace",
    "K (and the initial summary)": "sampled candidates K",
    "first_token": "first token pooled",
    "start_token": "start token prepended",
    "subspace": "matrix that spans the subspace",
}
TITLES = {"K (and the initial summary)": "K", "first_token": "first token", "start_token": "start token"}


def figures(folder: Path, table: Record) -> list[dict[str, Any]]:
    """All figures of a folder; one whose table is not there is left out.

    Each has a slug, a title, SVG ``panels``, a caption, and ``numbers`` (a generic table) for readers who want the figures.
    """
    makers = (
        ("regret", _regret),
        ("correlation", _correlation),
        ("ablations", _ablations),
        ("specification", _specification),
    )
    found = [_cost(table)]
    for name, make in makers:
        path = folder / f"{name}.json"
        if path.is_file():
            made = make(json.loads(path.read_text(encoding="utf-8")), table)
            found += [made] if made else []
    return found


def _cost(table: Record) -> dict[str, Any]:
    rows = [row for row in table["rows"] if row["em"] is not None and row["compressor_tokens"] is not None]
    ours = table["method"]["name"]
    points = []
    for row in rows:
        style, shape = ("ours", "diamond") if row["method"] == ours else ("em", "circle")
        if row["method"] == "oracle":
            style = "open"
        total = row["compressor_tokens"] + (row["selection_tokens"] or 0)
        points.append(Point(row["label"], total, row["em"], shape, style))
    axes = ("compressor and selection tokens a question", "EM")
    panels = []
    if points:
        panels = _twice(drawing.scatter(points, axes, 760, 430), drawing.scatter(points, axes, 340, 520))
    records = [
        {
            "method": row["label"],
            "compressor_tokens": row["compressor_tokens"],
            "selection_tokens": row["selection_tokens"],
            **{key: row[key] for key in ("em", "em_low", "em_high")},
        }
        for row in sorted(rows, key=lambda row: row["compressor_tokens"] + (row["selection_tokens"] or 0))
    ]
    return {
        "slug": "cost",
        "title": "Cost against quality",
        "panels": panels,
        "shape": "single",
        "caption": f"Up is better, left is cheaper; n = {_n(table)} questions. Across: tokens that the compressor reads and"
        " writes plus tokens that the reader spends on choosing, means a question; reading what was chosen is not in it (nor is"
        " reading raw passages). Diamond: the method; open circle: the oracle, which knows the answers and is a bound, not a"
        " method. Intervals are in Table 1: dots a few points apart are not different.",
        "numbers": tables.generic(records),
    }


def _regret(stored: Record, table: Record) -> dict[str, Any] | None:
    rows = stored["rows"]
    methods = dict.fromkeys((row["method"], row["label"]) for row in rows)
    panels = []
    for name, title in (("share_of_initial", "share over CompAct"), ("share_of_random", "share over a random choice")):
        lines = []
        for method, label in methods:
            ours = method == table["method"]["name"]
            marks = [
                drawing.estimate(row, name, "circle" if row["metric"] == "em" else "square", row["metric"])
                for row in rows
                if row["method"] == method and row[name] is not None
            ]
            if marks:
                lines.append((label, [replace(mark, style="ours") if ours else mark for mark in marks]))
        known = [bound for _, marks in lines for mark in marks for bound in (mark.value, mark.low, mark.high)]
        low, high = drawing.bounds(known, [0.0, 1.0])
        if lines:
            domain = max(low, -3.0), min(high, 1.5)
            panels.append(drawing.forest(lines, domain, title, "0: no better than that; 1: the oracle", 380, 168))
    if not panels:
        return None
    return {
        "slug": "regret",
        "title": "How much of what a perfect choice would gain?",
        "panels": panels,
        "shape": "panels broad",
        "caption": "Share of the oracle's headroom that each rule captures, over CompAct's initial summary and over a random"
        f" candidate; n = {_n(table)} questions. Right is better; left of 0: worse than not choosing. Circles: EM; squares: F1;"
        " bars: intervals of the ratio (bootstrap over questions), cut at the edge where they run on. In the other colour: the"
        " method.",
        "numbers": tables.generic(rows),
    }


def _correlation(stored: Record, table: Record) -> dict[str, Any] | None:
    rows = stored["rows"]
    if not rows:
        return None
    names = list(dict.fromkeys(row["metric"] for row in rows))
    panels = []
    for form in dict.fromkeys(row["form"] for row in rows):
        lines = []
        for name in names:
            marks = []
            for quality, shape, style in (("em", "circle", "em"), ("f1", "square", "f1")):
                row = next(r for r in rows if (r["metric"], r["quality"], r["form"]) == (name, quality, form))
                marks.append(drawing.estimate(row, "r", shape, style))
            lines.append((METRICS.get(name, name), marks))
        panels.append(drawing.forest(lines, (-1.0, 1.0), FORMS.get(form, form), "Pearson r"))
    within = [row for row in rows if row["form"] == "within" and row["metric"] == "sps"]
    vary = ", ".join(f"{row['questions'] or 0} for {row['quality'].upper()}" for row in within)
    shares = stored.get("sps_variance_explained") or {}
    explained = ", ".join(f"{name} {tables.number(value, 2)}" for name, value in shares.items() if value is not None)
    return {
        "slug": "correlation",
        "title": "Does the metric prefer better summaries?",
        "panels": panels,
        "shape": "panels",
        "caption": "Right of zero: the metric prefers summaries that are answered better. Circles: EM; squares: F1; bars:"
        f" intervals (bootstrap over questions); n = {_n(table)} questions with all their candidates. “Within questions” is the"
        f" form that choosing depends on; only questions in which both sides vary can speak there ({vary}). “Binned” averages"
        " noise away and comes near 1 for any trend. “Given length” holds the summary's length fixed."
        + (f" Share of the variance of SPS (adjusted R²) explained by: {explained}." if explained else ""),
        "numbers": tables.generic(
            [
                {
                    "metric": METRICS.get(row["metric"], row["metric"]),
                    "quality": row["quality"].upper(),
                    "form": FORMS.get(row["form"], row["form"]),
                    **{key: row[key] for key in ("r", "r_low", "r_high", "r_reason")},
                    "candidates": row["r_n"],
                    "paper": row["paper"],
                }
                for row in rows
            ]
        ),
    }


def _ablations(stored: Record, table: Record) -> dict[str, Any] | None:
    rows = stored["rows"]
    blocks: dict[str, list[Record]] = {}
    for row in rows:
        blocks.setdefault(row["ablation"], []).append(row)
    drawn = [name for name in ABLATIONS if len(blocks.get(name, [])) > 1]
    shown = [row for name in drawn for row in blocks[name]]
    keys = ("em_difference", "em_difference_low", "em_difference_high")
    domain = drawing.bounds([row[key] for row in shown for key in keys], [0.0])
    panels = [
        drawing.columns(
            [(_value(row["value"]), _own(row, "em_difference")) for row in blocks[name]],
            domain,
            f"{TITLES.get(name, name)}: EM minus CompAct's",
            ABLATIONS[name],
        )
        for name in drawn
    ]
    gate = next((block for name, block in blocks.items() if name.startswith("gate")), [])
    known = [row for row in gate if row["em"] is not None]
    curve, alone = (
        [(row["compressor_tokens"], _gate_mark(row)) for row in known if row["value"][:1].isdigit() == numeric]
        for numeric in (True, False)
    )
    if len(curve) > 1:
        panels.append(drawing.steps(curve, alone, "gate: EM against cost", ("compressor tokens a question", "EM")))
    if not panels:
        return None
    return {
        "slug": "ablations",
        "title": "What matters in the recipe?",
        "panels": panels,
        "shape": "panels",
        "caption": f"Choosing the lowest SPS without a gate, one thing varied at a time; n = {_n(table)} questions, the same"
        " read pool throughout. Above zero: better than CompAct's initial summary. Diamonds: the method's own setting; bars:"
        " intervals over questions. K: the exact expectation over all subsets of K sampled candidates beside the initial one."
        " The gate's curve runs from never sampling (left) to always sampling (right); square: the release's rolling gate.",
        "numbers": tables.generic(
            [
                {
                    "ablation": row["ablation"],
                    "value": f"{row['value']}{' (default)' if row['default'] else ''}",
                    **{key: row[key] for name in ("em", "em_difference", "f1_difference") for key in _bounds(name)},
                    "compressor_tokens": row["compressor_tokens"],
                }
                for row in rows
            ]
        ),
    }


def _specification(stored: Record, table: Record) -> dict[str, Any] | None:
    rows = [row for row in stored["rows"] if row["em_difference_low"] is not None]
    if len(rows) < 2:
        return None
    middle, low, high = (np.array([row[key] for row in rows]) for key in _bounds("em_difference"))
    lines = low.tolist(), middle.tolist(), high.tolist()
    title = "every SPS variant: EM minus CompAct's"
    best = stored.get("best_p")
    return {
        "slug": "specification",
        "title": "Would another variant have worked?",
        "panels": _twice(*(drawing.curve(*lines, stored.get("default"), title, width) for width in (720, 340))),
        "shape": "single",
        "caption": f"All {len(rows)} stored variants of SPS (start token, first token, subspace, layer, pooling, energy)"
        f" against CompAct, ascending; n = {_n(table)} questions; band: pointwise intervals; diamond: the method's own variant."
        f" {int((middle > 0).sum())} lie above CompAct ({int((low > 0).sum())} with an interval above 0),"
        f" {int((middle < 0).sum())} below ({int((high < 0).sum())} with an interval below 0). The best of so many looks good"
        f" on any data: its p-value, corrected for the search, is {'n/a' if best is None else f'{best:.3f}'}.",
        "numbers": None,
    }


def _twice(wide: Markup, narrow: Markup) -> list[Markup]:
    """One figure at two widths; the style sheet shows the one that fits, so labels keep their size on a phone."""
    return [Markup('<div class="wide">{}</div>').format(wide), Markup('<div class="narrow">{}</div>').format(narrow)]


def _own(row: Record, name: str) -> Mark:
    shape, style = ("diamond", "ours") if row["default"] else ("circle", "em")
    return drawing.estimate(row, name, shape, style)


def _gate_mark(row: Record) -> Mark:
    shape = "diamond" if row["default"] else "circle" if row["value"][:1].isdigit() else "square"
    return Mark(row["em"], None, None, shape, "ours" if row["default"] else "em" if shape == "circle" else "f1")


def _value(text: str) -> str:
    """A setting's value, short enough for an axis."""
    if text in ("True", "False"):
        return {"True": "yes", "False": "no"}[text]
    return text.replace("output_head", "head").replace("embedding_", "emb. ").replace("_", " ").replace("normed", "norm")


def _bounds(name: str) -> Sequence[str]:
    return name, f"{name}_low", f"{name}_high"


def _n(table: Record) -> int:
    return max((row["n"] for row in table["rows"]), default=0)
