"""The main job with the embedded language model, as a user runs it: the command line, a real LM, a kill, and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from analysis.page.build import PROVENANCE
from xcompress.config import ROOT

pytestmark = pytest.mark.slow
COMMAND = [
    *(sys.executable, str(ROOT / "scripts" / "run.py"), "experiment=laptop", "limit=4", "shard_size=2"),
    *("generation.candidates=2", "dataset.calibration_limit=4", "dataset.passages=5"),
]


def run(root: Path) -> subprocess.CompletedProcess[str]:
    """The command to its end; two threads, as on the machine the bytes are compared on."""
    return subprocess.run([*COMMAND, f"run_root={root}"], capture_output=True, text=True, timeout=800, check=False)


def contents(folder: Path, without: set[str]) -> dict[str, bytes]:
    """A run's files, the page without the part that shows the records of how and when it was made."""
    begin, end = (mark.encode() for mark in PROVENANCE)
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in without}
    page = found["report.html"]
    found["report.html"] = page[: page.index(begin)] + page[page.index(end) :]
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """An uninterrupted run: its tables folder and what it printed."""
    root = tmp_path_factory.mktemp("clean")
    done = run(root)
    assert done.returncode == 0, done.stderr
    (folder,) = (root / "tables").iterdir()
    return folder, done


def test_a_real_model_makes_table_1(clean: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Summaries are real text about the question, scores and answers are there, the table and the summary are printed."""
    folder, done = clean
    for words in (
        *("CompAct (initial)", "lowest SPS", "xCompress", "oracle"),
        *("this command:", "tables:", "cut off", "report.html"),
    ):
        assert words in done.stdout
    rows = {row["method"]: row for row in json.loads((folder / "table1.json").read_text())["rows"]}
    assert {row["n"] for row in rows.values()} == {4}
    assert rows["oracle"]["f1"] >= max(rows["compact"]["f1"], rows["lowest_sps"]["f1"])
    candidates = pq.read_table(folder / "candidates.parquet").to_pylist()
    assert len(candidates) == 4 * 3
    assert sum(len(row["summary"].split()) >= 5 for row in candidates) >= 10
    assert all(0 < row["nll"] < 10 and row["sps"] > 0 for row in candidates if row["summary"])
    assert len({row["summary"] for row in candidates}) >= 8, "sampling gives different summaries"
    work = json.loads((folder / "provenance.json").read_text())["work"]
    assert all(work[stage]["seconds"] > 0 for stage in ("generate", "score", "rivals", "read"))


def test_again_is_quick_and_equal(clean: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """With everything there no model is loaded, and every table is the same to the byte."""
    folder, _ = clean
    before = contents(folder, {"provenance.json", "checksums.json"})
    done = run(folder.parents[1])
    assert done.returncode == 0 and "loading" not in done.stderr + done.stdout
    assert contents(folder, {"provenance.json", "checksums.json"}) == before


@pytest.mark.parametrize("stage", ["candidates", "scores"])
def test_kill_and_go_on(clean: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, stage: str) -> None:
    """SIGKILL once the stage has its first shard; the same command ends with the clean run's tables."""
    environment = dict(os.environ)
    process = subprocess.Popen(
        [*COMMAND, f"run_root={tmp_path}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    deadline = time.monotonic() + 600
    while process.poll() is None and not list((tmp_path / stage).rglob("*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "tables").iterdir()
    records = {"provenance.json", "config.yaml", "checksums.json"}
    assert contents(folder, records) == contents(clean[0], records)


def hear_interrupts() -> None:
    """In the child: undo an inherited "ignore SIGINT" (shells set it for background jobs, and so may a CI)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_says_what_to_do(tmp_path: Path) -> None:
    """Ctrl-C in the middle: no traceback, the exit code of an interrupt, and the sentence that the same command goes on."""
    process = subprocess.Popen(
        [*COMMAND, f"run_root={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    deadline = time.monotonic() + 300
    while not list((tmp_path / "questions").rglob("manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(5)  # in the middle of loading or generating
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command to go on" in errors and "Traceback" not in errors
