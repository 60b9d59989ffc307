"""Copy a run's small tables and figures to ``results/``, rebuild ``results/verdicts.md``: python -m analysis.publish FOLDER.

``--all TABLES`` takes the newest run of each reader, data set and method below TABLES. Numbers and plots only: no text of a
data set or a model leaves the run's folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from analysis import correlation, table1
from analysis.output import markdown
from xcompress.config import ROOT
from xcompress.schema import UsageError
from xcompress.store import write_atomically

NAMES = ("table1", "correlation", "ablations", "regret", "differences", "specification", "verdicts")
SUFFIXES = ("md", "csv", "json", "svg")
LARGE = {"specification.csv", "specification.json"}  # a line for each of thousands of variants; the run's folder keeps them
RECORDS = ("counts.json", "config.yaml", "provenance.json")
TEXTS = ("question", "answers", "summary", "prediction")  # columns of candidates.parquet that hold text
OWN = ("xcompress", "xcompress_no_gate")  # methods whose tables stand under the data set's own name


def place(folder: Path, results: Path) -> Path:
    """Where the tables of a run go: ``results/<reader>/<data set>``, with the method's name where it is another one.

    Raises:
        UsageError: ``folder`` is not a finished tables folder.
    """
    table = folder / "table1.json"
    if not table.is_file():
        raise UsageError(f"{folder} holds no table1.json; give a folder below <run root>/tables")
    about = json.loads(table.read_text(encoding="utf-8"))
    method = about["method"]["name"]
    return results / str(about["reader"]) / (about["dataset"] if method in OWN else f"{about['dataset']}-{method}")


def newest_of_each(tables: Path, results: Path) -> list[Path]:
    """Of the runs below ``tables`` that go to the same place, the one whose tables were made last."""
    runs = sorted(tables.glob("*/table1.json"), key=lambda path: (path.stat().st_mtime_ns, path.parent.name))
    return list({place(path.parent, results): path.parent for path in runs}.values())


def publish(folder: Path, results: Path) -> Path:
    """Copy one run's tables to its :func:`place`; every candidate's figures go there as ``numbers.parquet``.

    Raises:
        UsageError: ``folder`` is not a finished tables folder.
    """
    target = place(folder, results)
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.iterdir():
        stale.unlink()  # never a mix of two runs
    for name in [*RECORDS, *(f"{name}.{suffix}" for name in NAMES for suffix in SUFFIXES)]:
        if (folder / name).is_file() and name not in LARGE:
            shutil.copyfile(folder / name, target / name)
    if (folder / "candidates.parquet").is_file():
        numbers = pq.read_table(folder / "candidates.parquet").drop_columns(list(TEXTS))
        pq.write_table(numbers, target / "numbers.parquet", compression="zstd")
    config = target / "config.yaml"
    if config.is_file():  # where the run lay on somebody's disk is nobody else's business
        lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
        config.write_text("".join(line for line in lines if not line.startswith("run_root:")), encoding="utf-8")
    summarise(results)
    return target


def summarise(results: Path) -> None:
    """``results/verdicts.md``: the paper's cells, and every claim against every published run with what it rests on."""
    runs = []
    for path in sorted(results.glob("*/*/verdicts.json")):
        runs.append((path.parent.relative_to(results), json.loads(path.read_text(encoding="utf-8"))))
    claims = list(dict.fromkeys(row["claim"] for _, run in runs for row in run["rows"]))
    lines = ["# Verdicts", "", "## The paper's cells", "", *_paper_cells(results), "", "## The paper's claims", ""]
    for name, run in runs:
        lines.append(f"- **{name}**: {run['rests_on']}. {run['note']}")
    lines += [
        "",
        "Label, difference (positive: the paper's side) and interval; * where it survives correction for all claims of a run.",
        "",
    ]
    rows = []
    for claim in claims:
        row = [claim]
        for _, run in runs:
            found = next((entry for entry in run["rows"] if entry["claim"] == claim), None)
            row.append("-" if found is None else _cell(found))
        rows.append(row)
    lines.append(markdown(["claim", *(str(name) for name, _ in runs)], rows))
    write_atomically(results / "verdicts.md", "\n".join(lines).encode())


def _paper_cells(results: Path) -> list[str]:
    """A verdict on every figure of the paper that is known: of the published run of that reader and data set, or NOT RUN."""
    rows = []
    for reader, datasets in yaml.safe_load(table1.PAPER.read_text(encoding="utf-8")).items():
        for dataset, cells in datasets.items():
            for at, metric in enumerate(("em", "f1")):
                paper = f"{cells['xcompress'][at] - cells['compact'][at]:+.1f}"
                label, sentence = _on_cell(results / reader / dataset, metric)
                rows.append([f"xCompress minus CompAct, {metric.upper()}", reader, dataset, paper, f"**{label}**", sentence])
    for dataset, metrics in yaml.safe_load(correlation.PAPER.read_text(encoding="utf-8")).items():
        for metric, values in metrics.items():
            for quality, value in values.items():
                name = f"r of {metric.upper()} and {quality.upper()}"
                reason = "the paper's reader and form are not stated; the forms are in each run's correlation table"
                rows.append([name, "not stated", dataset, f"{value:+.3f}", "**NOT RUN**", reason])
    return [markdown(["figure", "reader", "data set", "paper", "verdict", "on what"], rows)]


def _on_cell(folder: Path, metric: str) -> tuple[str, str]:
    if not (folder / "table1.json").is_file():
        return "NOT RUN", "no published run of this reader on this data set"
    rows: list[dict[str, Any]] = json.loads((folder / "table1.json").read_text(encoding="utf-8"))["rows"]
    found = next((row["verdicts"][metric] for row in rows if metric in row["verdicts"]), None)
    return ("NOT RUN", "the run has no xCompress row") if found is None else (found[0], found[1])


def _cell(row: dict[str, object]) -> str:
    value = row["difference"]
    if not isinstance(value, float):
        return f"{row['label']} ({row['difference_reason']})"
    digits = 1 if row["unit"] == "points" else 2
    low, high = row["difference_low"], row["difference_high"]
    bounds = f" [{low:+.{digits}f}, {high:+.{digits}f}]" if isinstance(low, float) and isinstance(high, float) else ""
    star = " *" if row["label"] == row["corrected"] and row["label"] in {"REPRODUCED", "CONTRADICTED"} else ""
    return f"{row['label']}{star} {value:+.{digits}f}{bounds}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m analysis.publish TABLES_FOLDER [...] | --all TABLES")
    try:
        chosen = [Path(text) for text in sys.argv[1:]]
        if sys.argv[1] == "--all":
            chosen = newest_of_each(Path(sys.argv[2]), ROOT / "results")
        for argument in chosen:
            print(publish(argument, ROOT / "results"))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
    print(ROOT / "results" / "verdicts.md")
