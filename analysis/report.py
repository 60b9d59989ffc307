"""The tables of one run as files and on the terminal."""

from __future__ import annotations

import csv
import io
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

from analysis import ablations, correlation, differences, figures, regret, rows, specification, verdicts
from analysis.counts import count
from analysis.load import Pool, to_pool
from analysis.output import cell, markdown
from analysis.page import write_page
from analysis.provenance import provenance, work
from analysis.table1 import Row, choose, table
from xcompress.pipeline import Collected
from xcompress.settings import Settings
from xcompress.store import digest, write_atomically, write_json

log = logging.getLogger(__name__)
HEADINGS = (
    "method",
    "n",
    "EM",
    "F1",
    "EM minus CompAct",
    "F1 minus CompAct",
    "summary tokens",
    "compressor tokens",
    "selection tokens",
    "paper EM / F1",
)


_FULL_WIDTH = 170  # columns of a terminal that holds the whole table
_COSTS = (
    "Compressor tokens: prompt and new tokens of every trajectory a method needs, each prompt counted once a trajectory (an"
    " engine that shares prefixes computes fewer). Selection tokens: reader tokens of the choice itself. Means a question."
)


def write_tables(collected: Collected, started: float) -> Path:
    """Make all tables of a run and say where they are.

    Byte-identical for the same stored rows, but for the two records ``provenance.json`` and ``config.yaml`` and the part of
    ``report.html`` that shows them.
    """
    settings = collected.settings
    begun = time.monotonic()
    pool = to_pool(collected)
    choices = choose(pool, settings)
    lines = table(pool, settings, choices)
    counts = count(collected, pool)
    folder = collected.root / "tables" / _name(collected)
    note = _note(pool, settings)
    write_atomically(folder / "table1.csv", _csv(lines).encode())
    write_atomically(folder / "table1.md", _markdown(lines, note, settings).encode())
    write_json(folder / "table1.json", _json(lines, note, settings))
    write_atomically(folder / "table1.svg", figures.differences(lines, settings))
    correlation.write(pool, settings, folder, note)
    ablations.write(pool, settings, folder, note)
    regret.write(pool, settings, choices, folder, note)
    differences.write(pool, settings, folder, note)
    specification.write(pool, settings, folder, note)
    verdicts.write(verdicts.verdicts(pool, settings, choices), settings, folder, note)
    write_json(folder / "counts.json", counts)
    write_atomically(folder / "candidates.parquet", rows.candidates(pool, collected, choices))
    write_atomically(folder / "questions.parquet", rows.questions(pool, collected))
    write_atomically(
        folder / "config.yaml", yaml.safe_dump(dict(settings.resolved), sort_keys=False, allow_unicode=True).encode()
    )
    seconds = {"prepare": collected.prepare_seconds, "analyse": time.monotonic() - begun, "command": time.monotonic() - started}
    write_json(folder / "provenance.json", provenance(collected, seconds))
    write_page(folder)
    _show(lines, note, counts, collected, folder, seconds)
    return folder


def _name(collected: Collected) -> str:
    s = collected.settings
    golds = digest([[question.id, list(question.answers)] for question in collected.questions])
    what = [collected.shards, golds, asdict(s.method), asdict(s.statistics), s.seed, s.dataset.name, s.dataset.empty_golds]
    return f"{s.reader.name}-{s.compressor.name}-{s.dataset.name}-{s.method.name}-{digest(what)}"


def _note(pool: Pool, settings: Settings) -> str:
    method = settings.method
    sps = (
        f"SPS: {method.subspace} basis, {method.energy:.1%} energy, {method.layer} layer, {method.pooling} pooling,"
        f" first token {'pooled' if method.first_token else 'left out'},"
        f" {'after a start token' if method.start_token else 'no start token'}"
    )
    threshold = pool.threshold(method) if method.gate == "paper" else None
    gate = "no gate"
    if method.gate == "release":
        gate = f"gate: rolling, the first {method.gate_pool} always sampled, then at or below quantile {method.gate_share}"
    elif threshold is not None:
        gate = (
            f"gate: ratio above {threshold:.4g} keeps the initial summary"
            f" (from {len(pool.calibration_ratio)} calibration questions)"
        )
    if method.policy == "stepwise":
        options = f"{method.beams} beams" if method.options == "beams" else "samples"
        gate += f"; chosen in every round among the greedy output and {options}"
    labelled = int(pool.labelled.sum())
    return (
        f"Reader {settings.reader.name}, compressor {settings.compressor.name}, data set {settings.dataset.name}"
        f" ({settings.dataset.split}); n = {labelled} labelled questions of {len(pool.questions)};"
        f" K = {settings.generation.candidates} sampled candidates; seed {settings.seed}. {sps}; {gate}."
        f" Per cent with {settings.statistics.level:.0%} intervals (bootstrap over questions,"
        f" {settings.statistics.resamples} resamples)."
    )


def _cells(row: Row) -> list[str]:
    return [
        row.label,
        str(row.em.n),
        cell(row.em),
        cell(row.f1),
        cell(row.em_difference, signed=True),
        cell(row.f1_difference, signed=True),
        "-" if row.summary_tokens is None else f"{row.summary_tokens:.0f}",
        "-" if row.compressor_tokens is None else f"{row.compressor_tokens:.0f}",
        "-" if row.selection_tokens is None else f"{row.selection_tokens:.0f}",
        f"{row.paper[0]} / {row.paper[1]}" if row.paper else "-",
    ]


def _markdown(rows: Sequence[Row], note: str, settings: Settings) -> str:
    lines = [f"# Table 1: {settings.reader.name} on {settings.dataset.name}", "", note, ""]
    lines += [markdown(HEADINGS, [_cells(row) for row in rows])]
    lines += ['Verdicts on "xCompress beats CompAct":', ""]
    lines += [f"- {metric}: **{label}**: {sentence}" for metric, label, sentence in _verdicts(rows)]
    lines += ["", _COSTS]
    skipped = [row for row in rows if row.skipped is not None]
    if skipped:
        lines += ["", f"The gate kept the initial summary of {skipped[0].skipped} of {skipped[0].em.n} questions."]
    return "\n".join(lines) + "\n"


def _verdicts(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    return [(metric.upper(), *found) for row in rows for metric, found in row.verdicts.items()]  # type: ignore[misc]


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {"method": row.name, "label": row.label, "n": row.em.n}
    for key, estimate in (
        ("em", row.em),
        ("f1", row.f1),
        ("em_difference", row.em_difference),
        ("f1_difference", row.f1_difference),
    ):
        flat |= {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}
    flat |= {
        "em_p_holm": row.em_p,
        "f1_p_holm": row.f1_p,
        "summary_tokens": row.summary_tokens,
        "compressor_tokens": row.compressor_tokens,
        "selection_tokens": row.selection_tokens,
        "gate_skipped": row.skipped,
        "fallbacks": row.fallbacks,
        "paper_em": row.paper[0] if row.paper else None,
        "paper_f1": row.paper[1] if row.paper else None,
        "em_verdict": row.verdicts.get("em", [None])[0],
        "f1_verdict": row.verdicts.get("f1", [None])[0],
        "reason": row.em.reason,
    }
    return flat


def _csv(rows: Sequence[Row]) -> str:
    flat = [_flat(row) for row in rows]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _json(rows: Sequence[Row], note: str, settings: Settings) -> dict[str, Any]:
    return {
        "reader": settings.reader.name,
        "compressor": settings.compressor.name,
        "dataset": settings.dataset.name,
        "method": asdict(settings.method),
        "note": note,
        "rows": [{**_flat(row), "verdicts": row.verdicts} for row in rows],
    }


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
        shown.add_row(*_cells(row)[:columns], style="bold" if row.verdicts else None)
    console.print()
    console.print(shown)
    if columns < len(HEADINGS):
        console.print(f"(narrow terminal; also in table1.md: {', '.join(HEADINGS[columns:])})")
    console.print(note, markup=False)
    for metric, label, sentence in _verdicts(rows):
        console.print(f"{metric}: {label}: {sentence}", markup=False)
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
