"""What became of every job of a sweep, one row a reader and data set: python -m analysis.sweep FOLDER (make sweep-table).

The jobs are written down when the sweep starts, so one that never started is a row too. A failed one says FAILED and why.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from analysis.output import markdown, write_table
from xcompress.jobs import FINISHED, RUNNING, read_status
from xcompress.schema import UsageError
from xcompress.store import write_json

PLAN = "sweep.json"
_NOT_STARTED = "not started"


@dataclass(frozen=True)
class Cell:
    """One job.

    Attributes:
        job: its number, which is also its folder's name.
        reader, dataset: of the job; "?" if its configuration could not be made.
        overrides: what sets it apart.
        state: running, finished, failed, stopped, killed or not started.
        reason: why it has no figures.
        n, compact_em, em, compact_f1, f1: labelled questions, and quality in per cent of the initial summary and of the method.
        verdict: on EM.
        tables: folder of its tables.
    """

    job: int
    reader: str
    dataset: str
    overrides: str
    state: str
    reason: str = ""
    n: int | None = None
    compact_em: float | None = None
    em: float | None = None
    compact_f1: float | None = None
    f1: float | None = None
    verdict: str | None = None
    tables: str | None = None


class SweepTable(Callback):
    """Hydra's hooks: the plan at a sweep's start, the table at its end."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Write down which jobs there will be."""
        begin(config)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Every job has returned."""
        finish()


_under_way: Path | None = None


def begin(config: DictConfig) -> None:
    """Note the sweep of this process and its jobs."""
    global _under_way
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    folder = Path(str(config.hydra.sweep.dir))
    parameters = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*parameters, *config.hydra.overrides.task])
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    varied = {o.get_key_element() for o in overrides if o.is_sweep_override()}
    plan = []
    for number, job in enumerate(jobs):
        plan.append(
            {"job": number, **_names(job, config), "overrides": " ".join(o for o in job if o.partition("=")[0] in varied)}
        )
    write_json(folder / PLAN, {"jobs": plan})
    _under_way = folder


def finish() -> list[Cell]:
    """Write the table of this process's sweep, once; returns its cells (none if there is no sweep)."""
    global _under_way
    folder, _under_way = _under_way, None
    return [] if folder is None else write(folder)


def cells(folder: Path) -> list[Cell]:
    """What became of each planned job.

    Raises:
        UsageError: ``folder`` is not a sweep's.
    """
    if not (folder / PLAN).is_file():
        raise UsageError(f"{folder} holds no {PLAN}; give a sweep's folder, <run root>/logs/sweep-...")
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))["jobs"]
    return [_cell(folder, job) for job in plan]


def write(folder: Path) -> list[Cell]:
    """Write ``table.md``, ``.csv`` and ``.json`` into a sweep's folder and print the first."""
    found = cells(folder)
    headings = ("reader", "data set", "job", "state", "n", "CompAct EM / F1", "method EM / F1", "verdict (EM)")
    rows = [[c.reader, c.dataset, f"{c.job}: {c.overrides}", *_shown(c)] for c in found]
    done = sum(cell.state == FINISHED for cell in found)
    lines = [f"# Sweep: {done} of {len(found)} jobs finished", "", markdown(headings, rows)]
    if done < len(found):
        lines += ["Each job's own log: <job>/job.log beside this file. The same command goes on where the jobs stopped."]
    text = "\n".join(lines) + "\n"
    write_table(folder, "table", [asdict(cell) for cell in found], text)
    print(text)
    print(f"sweep table: {folder / 'table.md'}")
    return found


def _cell(folder: Path, job: dict[str, Any]) -> Cell:
    status = read_status(folder / str(job["job"]))
    if status is None:
        return Cell(**job, state=_NOT_STARTED, reason="no record of it yet")
    known = {**job, "reader": status.get("reader", job["reader"]), "dataset": status.get("dataset", job["dataset"])}
    tables = status["tables"]
    if status["state"] != FINISHED or tables is None:
        why = "its stages made no tables" if status["state"] == FINISHED else status["reason"]
        return Cell(**known, state=status["state"], reason=why)
    try:
        table = json.loads((Path(tables) / "table1.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Cell(**known, state=status["state"], reason=f"its table cannot be read: {error}", tables=tables)
    rows = {row["method"]: row for row in table["rows"]}
    compact, method = rows["compact"], next((row for row in table["rows"] if row.get("verdicts")), rows.get("xcompress", {}))
    return Cell(
        **known,
        state=FINISHED,
        reason=method.get("reason") or "",
        n=compact["n"],
        compact_em=compact["em"],
        em=method.get("em"),
        compact_f1=compact["f1"],
        f1=method.get("f1"),
        verdict=method.get("em_verdict"),
        tables=tables,
    )


def _shown(cell: Cell) -> list[str]:
    if cell.state != FINISHED or cell.tables is None or cell.n is None:
        state = cell.state if cell.state in {RUNNING, _NOT_STARTED} else cell.state.upper()
        return [f"{state}: {cell.reason}" if cell.reason else state, "-", "-", "-", "-"]
    return [
        cell.state,
        str(cell.n),
        f"{_number(cell.compact_em)} / {_number(cell.compact_f1)}",
        f"{_number(cell.em)} / {_number(cell.f1)}" if cell.em is not None or not cell.reason else f"n/a ({cell.reason})",
        cell.verdict or "-",
    ]


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f}"


def _names(overrides: list[str], config: DictConfig) -> dict[str, str]:
    """Reader and data set of a job, as far as its overrides say; its own status corrects them."""
    given = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    return {group: given.get(f"{group}.name", given.get(group, str(config[group].name))) for group in ("reader", "dataset")}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m analysis.sweep SWEEP_FOLDER")
    try:
        sys.exit(any(cell.state != FINISHED for cell in write(Path(sys.argv[1]))))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
