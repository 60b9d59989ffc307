"""The tables of one run as files and on the terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from analysis import ablations, correlation, differences, regret, rows, specification, table1, verdicts
from analysis.about import sentence
from analysis.counts import count
from analysis.load import to_pool
from analysis.page import write_page
from analysis.provenance import provenance, work
from analysis.table1 import HEADINGS, Row, cells, choose, spoken, table
from analysis.verify import seal
from xcompress.pipeline import Collected
from xcompress.store import digest, write_atomically, write_json

log = logging.getLogger(__name__)
TABLES = (
    table1.write,
    correlation.write,
    ablations.write,
    regret.write,
    differences.write,
    specification.write,
    verdicts.write,
)
_FULL_WIDTH = 170  # columns of a terminal that holds the whole table


def write_tables(collected: Collected, started: float) -> Path:
    """Make all tables of a run and say where they are.

    Byte-identical for the same stored rows, but for the two records ``provenance.json`` and ``config.yaml`` and the part of
    ``report.html`` that shows them.
    """
    settings = collected.settings
    begun = time.monotonic()
    pool = to_pool(collected)
    choices = choose(pool, settings)
    counts = count(collected, pool)
    folder = collected.root / "tables" / _name(collected)
    for make in TABLES:
        make(pool, settings, folder)
    write_json(folder / "counts.json", counts)
    write_atomically(folder / "candidates.parquet", rows.candidates(pool, collected, choices))
    write_atomically(folder / "questions.parquet", rows.questions(pool, collected))
    write_atomically(
        folder / "config.yaml", yaml.safe_dump(dict(settings.resolved), sort_keys=False, allow_unicode=True).encode()
    )
    seconds = {"prepare": collected.prepare_seconds, "analyse": time.monotonic() - begun, "command": time.monotonic() - started}
    write_json(folder / "provenance.json", provenance(collected, seconds))
    write_page(folder)
    seal(folder)
    _show(table(pool, settings, choices), sentence(pool, settings), counts, collected, folder, seconds)
    return folder


def _name(collected: Collected) -> str:
    s = collected.settings
    golds = digest([[question.id, list(question.answers)] for question in collected.questions])
    # Not the files of questions: they are named by the limit too, and the candidates' files stand for them.
    shards = {stage: names for stage, names in collected.shards.items() if stage != "questions"}
    what = [shards, golds, asdict(s.method), asdict(s.statistics), s.seed, s.dataset.name, s.dataset.empty_golds]
    if s.selectors:  # tables with rows of one's own lie beside those without
        what.append(dict(s.selectors))
    return f"{s.reader.name}-{s.compressor.name}-{s.dataset.name}-{s.method.name}-{digest(what)}"


def _show(
    rows: Sequence[Row], note: str, counts: dict[str, Any], collected: Collected, folder: Path, seconds: dict[str, float]
) -> None:
    # In a file or a pipe there is no width to keep to; the table then keeps its natural one.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FULL_WIDTH)
    columns = len(HEADINGS) if console.width >= _FULL_WIDTH else 6 if console.width >= 100 else 4
    shown = Table(title=None, show_lines=False, pad_edge=False)
    for at, heading in enumerate(HEADINGS[:columns]):
        shown.add_column(heading, justify="left" if at == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*cells(row)[:columns], style="bold" if row.verdicts else None)
    console.print()
    console.print(shown)
    if columns < len(HEADINGS):
        console.print(f"(narrow terminal; also in table1.md: {', '.join(HEADINGS[columns:])})")
    console.print(note, markup=False)
    for metric, label, words in spoken(rows):
        console.print(f"{metric}: {label}: {words}", markup=False)
    console.print()
    for where, entries in counts.items():
        console.print(f"{where}: " + "; ".join(f"{what} {value}" for what, value in entries.items()), markup=False)
    console.print()
    for stage, total in work(collected).items():
        if total["questions"]:
            each = total["seconds"] / total["questions"]
            console.print(f"{stage}: {total['seconds']:.0f} s for {total['questions']:.0f} questions ({each:.2f} s each)")
    console.print(
        f"prepare {seconds['prepare']:.1f} s, analyse {seconds['analyse']:.1f} s; this command: {seconds['command']:.0f} s"
    )
    console.print(
        f"tables: {folder}/table1.md; beside it: verdicts, correlation, ablations, regret, differences, specification",
        soft_wrap=True,
    )
    console.print(f"page with figures and every question: {(folder / 'report.html').resolve().as_uri()}", soft_wrap=True)
