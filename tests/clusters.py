"""A small run as a command of its own, for tests that kill, starve and compare whole processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from test_pipeline import write_questions

from xcompress.config import ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
TABLES = ("table1.csv", "table1.md", "table1.json", "table1.svg", "counts.json", "candidates.parquet", "verdicts.json")
STAGES = ("questions", "candidates", "scores", "rivals", "answers")


def small_run(folder: Path, model: Path, questions: int = 12, calibration: int = 4) -> list[str]:
    """The command of a complete run with a tiny model, but for ``run_root``."""
    demos = folder / "demos.yaml"
    demos.write_text('- {question: "What is by the hill?", answers: ["old mill"]}\n', encoding="utf-8")
    return [
        *(sys.executable, str(ROOT / "scripts" / "run.py"), "experiment=laptop"),
        *(f"dataset.demos_file={demos}", f"reader.model={model}", f"compressor.model={model}"),
        *("compressor.max_new_tokens=12", "reader.max_new_tokens=6", "generation.candidates=2", "dataset.segment_size=3"),
        f"dataset.path={write_questions(folder / 'test.jsonl', questions)}",
        f"dataset.calibration_path={write_questions(folder / 'train.jsonl', calibration, start=500)}",
        *("dataset.corpus=null", "shard_size=1", "statistics.resamples=50", "engine.prefill_tokens=512"),
        "scoring.subspaces={embedding: {matrix: embedding, center: false, energy_of: values, rows: all}}",
        *("scoring.energies=[0.95]", "scoring.start_token=[false]"),  # few variants, for quick tables
    ]


def swept(command: list[str], *more: str) -> list[str]:
    """The command as a sweep (Hydra wants -m before the overrides)."""
    return [*command[:2], "-m", *command[2:], *more]


def finish(command: list[str], timeout: float = 400, **more: str) -> subprocess.CompletedProcess[str]:
    """The command to its end."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env={**ENVIRONMENT, **more})


def tables(root: Path) -> dict[str, bytes]:
    """The files of the one finished run below ``root`` that must be equal to the byte."""
    (folder,) = (root / "tables").iterdir()
    return {name: (folder / name).read_bytes() for name in TABLES}


def shards(root: Path) -> list[str]:
    """The names of all shards, which hold hashes of their input and content."""
    return sorted(str(path.relative_to(root)) for stage in STAGES for path in (root / stage).rglob("*.parquet"))


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    """Until the condition holds.

    Raises:
        TimeoutError: it does not in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.05)


def pause(draw: random.Random, most: float) -> None:
    """A random time."""
    time.sleep(draw.uniform(0, most))
