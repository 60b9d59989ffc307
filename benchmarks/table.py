"""What a comparison reports: rows with a ratio and a target, figures in words, and the Markdown of it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.output import markdown
from benchmarks.timing import Ratio


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        what: what is compared, with sizes.
        ours, other: as they are shown, with units.
        ratio: how many times more the other takes, or the quotient that the target speaks of.
        target: least (or, with ``at_most``, greatest) ratio that is good enough; None where there is none.
    """

    what: str
    ours: str
    other: str
    ratio: Ratio | None = None
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none or nothing was measured."""
        if self.target is None or self.ratio is None:
            return None
        return self.ratio.median <= self.target if self.at_most else self.ratio.median >= self.target


@dataclass
class Section:
    """A comparison's result: rows, sentences below them, and every single measurement for the JSON file."""

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)


def shown(ratio: Ratio | None) -> str:
    """``median [range], n``."""
    if ratio is None:
        return "-"
    digits = 0 if ratio.median >= 100 else 2
    text = f"{ratio.median:,.{digits}f}"
    return text if ratio.n == 1 else f"{text} [{ratio.low:,.{digits}f}, {ratio.high:,.{digits}f}]"


def _target(row: Row) -> tuple[str, str]:
    if row.target is None:
        return "", ""
    text = f"{'at most' if row.at_most else 'at least'} {row.target:g}"
    return text, {True: "yes", False: "**no**", None: "not measured"}[row.met]


def render(section: Section) -> str:
    """The section in Markdown."""
    parts = [f"## {section.title}\n"]
    if section.rows:
        lines = []
        for row in section.rows:
            n = "" if row.ratio is None else str(row.ratio.n)
            lines.append([row.what, row.ours, row.other, shown(row.ratio), n, *_target(row)])
        parts.append(markdown(["", "ours", "other", "ratio [range]", "n", "target", "met"], lines))
    parts += [markdown(headings, rows) for headings, rows in section.tables]
    if section.notes:
        parts.append("\n".join(f"- {note}" for note in section.notes) + "\n")
    return "\n".join(parts)


def record(section: Section) -> Mapping[str, Any]:
    """The section for the JSON file."""
    rows = [
        {
            "what": row.what,
            "ours": row.ours,
            "other": row.other,
            "ratio": None if row.ratio is None else vars(row.ratio),
            "target": row.target,
            "at_most": row.at_most,
            "met": row.met,
        }
        for row in section.rows
    ]
    return {"title": section.title, "rows": rows, "notes": section.notes, "raw": section.raw}
