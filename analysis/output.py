"""One way to write a table: CSV for programs, Markdown for people, strict JSON for both."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.stats import Estimate
from xcompress.store import write_atomically, write_json

Record = Mapping[str, Any]


def cell(estimate: Estimate, signed: bool = False, digits: int = 1) -> str:
    """``value [low, high]``, or n/a with the reason."""
    if estimate.value is None:
        return "-" if estimate.reason == "the reference" else f"n/a ({estimate.reason})"
    sign = "+" if signed else ""
    bounds = "" if estimate.low is None else f" [{estimate.low:{sign}.{digits}f}, {estimate.high:{sign}.{digits}f}]"
    return f"{estimate.value:{sign}.{digits}f}{bounds}"


def flat(name: str, estimate: Estimate) -> dict[str, Any]:
    """An estimate as columns: value, bounds, and why there is none."""
    return {
        name: estimate.value,
        f"{name}_low": estimate.low,
        f"{name}_high": estimate.high,
        f"{name}_n": estimate.n,
        f"{name}_reason": estimate.reason or None,
    }


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_table(folder: Path, name: str, records: Sequence[Record], text: str, about: Record | None = None) -> None:
    """``name.csv`` and ``name.json`` of the records, ``name.md`` of the text; atomically, byte-identical for equal input."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(records)
    write_atomically(folder / f"{name}.csv", buffer.getvalue().encode())
    write_json(folder / f"{name}.json", {**(about or {}), "rows": [dict(record) for record in records]})
    write_atomically(folder / f"{name}.md", text.encode())


def write_record(folder: Path, name: str, record: Record, text: str) -> None:
    """``name.json`` of one nested record, ``name.md`` of the text."""
    write_json(folder / f"{name}.json", dict(record))
    write_atomically(folder / f"{name}.md", text.encode())
