"""Copy a run's small tables and figures to ``results/``, rebuild ``results/verdicts.md``: python -m analysis.publish FOLDER.

Numbers and plots only: no text of a data set or a model leaves the run's folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from analysis.output import markdown
from xcompress.config import ROOT
from xcompress.schema import UsageError
from xcompress.store import write_atomically

NAMES = ("table1", "correlation", "ablations", "regret", "differences", "specification", "verdicts")
SUFFIXES = ("md", "csv", "json", "svg")
LARGE = {"specification.csv", "specification.json"}  # a line for each of thousands of variants; the run's folder keeps them
RECORDS = ("counts.json", "config.yaml", "provenance.json")


def publish(folder: Path, results: Path) -> Path:
    """Copy one run's tables to ``results/<reader>/<data set>/``.

    Raises:
        UsageError: ``folder`` is not a finished tables folder.
    """
    table = folder / "table1.json"
    if not table.is_file():
        raise UsageError(f"{folder} holds no table1.json; give a folder below <run root>/tables")
    about = json.loads(table.read_text(encoding="utf-8"))
    target = results / str(about["reader"]) / str(about["dataset"])
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.iterdir():
        stale.unlink()  # never a mix of two runs
    for name in [*RECORDS, *(f"{name}.{suffix}" for name in NAMES for suffix in SUFFIXES)]:
        if (folder / name).is_file() and name not in LARGE:
            shutil.copyfile(folder / name, target / name)
    config = target / "config.yaml"
    if config.is_file():  # where the run lay on somebody's disk is nobody else's business
        lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
        config.write_text("".join(line for line in lines if not line.startswith("run_root:")), encoding="utf-8")
    summarise(results)
    return target


def summarise(results: Path) -> None:
    """``results/verdicts.md``: every claim against every published run, and what each rests on."""
    runs = []
    for path in sorted(results.glob("*/*/verdicts.json")):
        runs.append((path.parent.relative_to(results), json.loads(path.read_text(encoding="utf-8"))))
    claims = list(dict.fromkeys(row["claim"] for _, run in runs for row in run["rows"]))
    lines = ["# Verdicts", ""]
    for name, run in runs:
        lines.append(f"- **{name}**: {run['rests_on']}. {run['note']}")
    lines += [
        "",
        "Label, difference (positive: the paper's side) and interval; * where it survives correction for all claims.",
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
        raise SystemExit("usage: python -m analysis.publish TABLES_FOLDER [...]")
    for argument in sys.argv[1:]:
        print(publish(Path(argument), ROOT / "results"))
