"""The tables of the page: stored records to cells with their text and their drawn interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.page import drawing
from analysis.page.drawing import Mark
from analysis.verdicts import LEAST_QUESTIONS

Record = Mapping[str, Any]
MINUS, NONE = "\N{MINUS SIGN}", "\N{EN DASH}"
# Never by colour alone: each verdict has its own sign and word.
SIGNS = {"REPRODUCED": "✓", "CONTRADICTED": "✗", "INCONCLUSIVE": "≈", "NOT RUN": NONE}


def number(value: Any, digits: int = 1, signed: bool = False) -> str:
    """A figure with a true minus sign, or an en dash where there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NONE
    text = f"{value:{'+' if signed else ''},.{digits}f}"
    return text.lstrip("+-") if not text.strip("+-0.") else text.replace("-", MINUS)  # no sign on a zero


def cell(record: Record, name: str, digits: int = 1, signed: bool = False, reason: str | None = None) -> dict[str, str]:
    """Value and interval of an estimate as two texts."""
    value, low, high = record.get(name), record.get(f"{name}_low"), record.get(f"{name}_high")
    if value is None:
        return {"value": NONE, "interval": reason or ""}
    between = "" if low is None or high is None else f"{number(low, digits, signed)} to {number(high, digits, signed)}"
    return {"value": number(value, digits, signed), "interval": between}


def facts(table: Record) -> list[tuple[str, str]]:
    """The run in a line: what was read by what, and how much of it."""
    method = next((row for row in table["rows"] if row["gate_skipped"] is not None), None)
    found = [("Reader", table["reader"]), ("Compressor", table["compressor"]), ("Data set", table["dataset"])]
    found.append(("Questions with a gold answer", number(max((row["n"] for row in table["rows"]), default=0), 0)))
    if method and table["method"]["gate"] != "none":
        found.append(("Sampling skipped by the gate", f"{method['gate_skipped']} of {method['n']}"))
    return found


def headline(table: Record) -> list[dict[str, Any]]:
    """The verdict on the paper's main claim, for EM and F1."""
    found: list[dict[str, Any]] = []
    for row in table["rows"]:
        for metric, (label, sentence) in row["verdicts"].items():
            found.append(
                {
                    "metric": metric.upper(),
                    "label": label,
                    "sign": SIGNS.get(label, ""),
                    "sentence": sentence[:1].upper() + sentence[1:],
                    **cell(row, f"{metric}_difference", 1, True, row["reason"]),
                }
            )
    return found


def verdicts(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """All claims, each with its difference drawn on the scale of its unit."""
    domains = {
        unit: drawing.bounds([row[k] for row in rows if row["unit"] == unit for k in _three("difference")], [0.0])
        for unit in {row["unit"] for row in rows}
    }
    return [
        {
            **row,
            "sign": SIGNS.get(row["label"], ""),
            "note": _lacks(row),
            **cell(row, "difference", 1 if row["unit"] == "points" else 2, True, row["difference_reason"]),
            "drawn": drawing.interval(drawing.estimate(row, "difference"), domains[row["unit"]], zero=True, width=150),
        }
        for row in rows
    ]


def _lacks(row: Record) -> str:
    """What an inconclusive claim would have needed."""
    if row["label"] != "INCONCLUSIVE":
        return ""
    if row["unit"] == "r" and (row["questions"] or 0) < LEAST_QUESTIONS:
        return f"only {row['questions']} questions vary, {LEAST_QUESTIONS} needed"
    return f"could have detected {number(row['detectable'])}" if row["detectable"] else ""


def methods(table: Record) -> dict[str, Any]:
    """Table 1 with a drawn interval under every estimate; one scale for EM and F1, one for both differences."""
    rows = table["rows"]
    level = drawing.bounds([row[k] for row in rows for name in ("em", "f1") for k in _three(name)], [0.0], 0.02)
    change = drawing.bounds(
        [row[k] for row in rows for name in ("em_difference", "f1_difference") for k in _three(name)], [0.0]
    )
    ours = table["method"]["name"]
    found = []
    for row in rows:
        style, shape = ("ours", "diamond") if row["method"] == ours else ("em", "circle")
        cells = []
        for name, signed, domain in (
            ("em", False, level),
            ("f1", False, level),
            ("em_difference", True, change),
            ("f1_difference", True, change),
        ):
            reason = "the reference" if row["method"] == "compact" else row["reason"]
            mark = drawing.estimate(row, name, shape, style)
            cells.append({**cell(row, name, 1, signed, reason), "drawn": drawing.interval(mark, domain, zero=signed)})
        paper = None if row["paper_em"] is None else f"{row['paper_em']} / {row['paper_f1']}"
        costs = [number(row[name], 0) for name in ("summary_tokens", "compressor_tokens", "selection_tokens")]
        found.append({**row, "ours": row["method"] == ours, "cells": cells, "costs": costs, "paper": paper})
    return {"rows": found, "paper": any(row["paper"] for row in found)}


def generic(records: Sequence[Record]) -> dict[str, Any]:
    """Any stored table: columns ``x``, ``x_low``, ``x_high``, ``x_n``, ``x_reason`` become one column of estimates."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    parts = {f"{name}_{suffix}" for name in columns for suffix in ("low", "high", "n", "reason")}
    shown = [name for name in columns if name not in parts]
    digits = {name: _digits([record.get(key) for record in records for key in _three(name)]) for name in shown}
    rows = []
    for record in records:
        row = []
        for name in shown:
            value = record.get(name)
            if f"{name}_low" in columns:
                row.append({**cell(record, name, digits[name], reason=record.get(f"{name}_reason")), "numeric": True})
            else:
                numeric = isinstance(value, int | float) and not isinstance(value, bool)
                text = number(value, digits[name]) if numeric else NONE if value is None else str(value)
                row.append({"value": text, "interval": "", "numeric": numeric})
        rows.append(row)
    named = {"em": "EM", "f1": "F1"}
    headings = [" ".join(named.get(word, word) for word in name.split("_")) for name in shown]
    return {"headings": headings, "rows": rows}


def _digits(values: Sequence[Any]) -> int:
    """Decimals for a column: none for whole or large numbers, one for per cent, two for shares and correlations."""
    known = [abs(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if not known or all(isinstance(value, int) for value in values if value is not None) or max(known) >= 1000:
        return 0
    return 1 if max(known) >= 10 else 2


def run(table: Record, claims: Sequence[Record], name: str, link: str) -> dict[str, Any]:
    """One run of a sweep, for its cell in the grid."""
    rows = {row["method"]: row for row in table["rows"]}
    method = rows.get(table["method"]["name"], {})
    labels = [claim["label"] for claim in claims]
    return {
        "name": name,
        "link": link,
        "reader": table["reader"],
        "dataset": table["dataset"],
        "compressor": table["compressor"],
        "method": table["method"]["name"],
        "n": max((row["n"] for row in table["rows"]), default=0),
        "compact": number(rows.get("compact", {}).get("em")),
        "em": number(method.get("em")),
        "difference": cell(method, "em_difference", 1, True, method.get("reason")),
        "mark": drawing.estimate(method, "em_difference", "diamond", "ours"),
        "label": method.get("em_verdict") or "NOT RUN",
        "sign": SIGNS.get(method.get("em_verdict") or "NOT RUN", ""),
        "tally": [(label, SIGNS[label], labels.count(label)) for label in SIGNS if label in labels],
    }


def grid(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Readers down, data sets across; a pair with no run is an empty cell, a pair with several lists them all."""
    readers = list(dict.fromkeys(entry["reader"] for entry in runs))
    datasets = list(dict.fromkeys(entry["dataset"] for entry in runs))
    marks: list[Mark] = [entry["mark"] for entry in runs]
    domain = drawing.bounds([value for mark in marks for value in (mark.value, mark.low, mark.high)], [0.0])
    rows = []
    for reader in readers:
        cells = []
        for dataset in datasets:
            found = [entry for entry in runs if (entry["reader"], entry["dataset"]) == (reader, dataset)]
            cells.append([{**entry, "drawn": drawing.interval(entry["mark"], domain, zero=True)} for entry in found])
        rows.append({"reader": reader, "cells": cells})
    return {"datasets": datasets, "rows": rows}


def _three(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"
