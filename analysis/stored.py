"""A finished run's rows again from its tables folder: no model, no data file, only what the run stored.

    python -m analysis.correlation results/runs/tables/NAME

makes one table anew; every table's module is such a command (without an argument: the newest run).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from analysis.load import Pool, to_pool
from xcompress.config import ROOT
from xcompress.pipeline import Collected
from xcompress.schema import UsageError, from_row
from xcompress.settings import Settings, from_config

TABLES = Path("results/runs/tables")


def collected(folder: Path) -> Collected:
    """What the analysis was given when the tables in ``folder`` were made.

    Raises:
        UsageError: ``folder`` holds no finished tables, or a shard that they were made from is gone or damaged.
    """
    try:
        settings = from_config(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no finished run ({error}); give a folder below <run root>/tables") from None
    root, shards = folder.resolve().parents[1], record["shards"]

    def rows(stage: str, kind: str) -> list[dict[str, Any]]:
        return [row for name in shards.get(stage, ()) for row in _read(root / kind / name)]

    score_folder = Path(shards["scores"][0]).parent if shards["scores"] else Path()
    return Collected(
        settings=settings,
        root=root,
        questions=[from_row(row) for row in rows("questions", "questions")],
        health=record["health"],
        prepare_seconds=0.0,
        candidates=rows("candidates", "candidates"),
        scores=rows("scores", "scores"),
        rivals=rows("rivals", "rivals"),
        answers=rows("answers", "answers"),
        calibration_scores=rows("calibration", "scores"),
        stepwise=rows("stepwise", "stepwise"),
        stepwise_answers=rows("stepwise_answers", "answers"),
        scores_folder=root / "scores" / score_folder,
        identities=record["identities"],
        shards=shards,
        work={},
    )


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except FileNotFoundError:
        raise UsageError(f"{path} is gone; run the command of that run again, it makes what is missing") from None
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{path} is damaged ({error}); run the command of that run again, it makes it anew") from None
    return rows


def newest(tables: Path) -> Path:
    """The run whose tables were made last.

    Raises:
        UsageError: there is none.
    """
    runs = sorted(tables.glob("*/table1.json"), key=lambda path: (path.stat().st_mtime, path.parent.name))
    if not runs:
        raise UsageError(f"{tables} holds no finished run; run `make reproduce-table1` first, or give a tables folder")
    return runs[-1].parent


def command(make: Callable[[Pool, Settings, Path], object]) -> None:
    """The command line of one table: the folder (or the newest run), then ``make`` writes into it; says what it wrote."""
    from analysis.verify import seal  # which takes the newest run from here

    if len(sys.argv) > 2:
        raise SystemExit(f"usage: python -m {Path(sys.argv[0]).stem} [TABLES_FOLDER]")
    try:
        folder = Path(sys.argv[1]) if len(sys.argv) == 2 else newest(ROOT / TABLES)
        found = collected(folder)
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        make(to_pool(found), found.settings, folder)
        seal(folder)
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
    for path in sorted(folder.iterdir()):
        if before.get(path) != path.stat().st_mtime_ns:
            print(path)
