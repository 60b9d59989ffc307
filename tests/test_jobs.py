"""A job's own records: the log with the traceback, and a status that is true whatever ended the job."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from analysis.sweep import PLAN, Cell, cells, write
from xcompress.config import ROOT
from xcompress.jobs import LOG, JobRecord, Terminated, read_status, reason
from xcompress.schema import UsageError

RUNNING = """
import sys, time
from pathlib import Path
from xcompress.jobs import JobRecord
with JobRecord(Path(sys.argv[1]), ["seed=1"]):
    print("running", flush=True)
    time.sleep(60)
"""


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A job in another process, which is under way."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", RUNNING, str(folder)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    with process:
        yield process


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and its end."""
    process.kill()
    process.wait()


def test_a_failure_is_on_disk_with_its_traceback(tmp_path: Path) -> None:
    """The status says failed and why, the log has the traceback and what was logged before; the next job logs elsewhere."""
    with pytest.raises(UsageError), JobRecord(tmp_path / "1", ["a=b"]):
        logging.getLogger("xcompress").warning("before")
        assert (read_status(tmp_path / "1") or {})["state"] == "running"
        raise UsageError("no such model\nsecond line")
    status = read_status(tmp_path / "1")
    assert status is not None and (status["state"], status["reason"]) == ("failed", "no such model")
    assert status["overrides"] == ["a=b"] and status["ended"] >= status["started"]
    text = (tmp_path / "1" / LOG).read_text()
    assert "WARNING xcompress: before" in text and "Traceback" in text and "test_jobs.py" in text
    with JobRecord(tmp_path / "2", []) as job:
        logging.getLogger("xcompress").warning("other")
        job.finished(tmp_path)
    assert (read_status(tmp_path / "2") or {})["state"] == "finished"
    assert "other" in (tmp_path / "2" / LOG).read_text() and "other" not in (tmp_path / "1" / LOG).read_text()


def test_reasons_are_one_line() -> None:
    assert reason(ValueError("a\nb")) == "ValueError: a"
    assert reason(MemoryError()) == "MemoryError"
    assert reason(KeyboardInterrupt()) == "Ctrl-C"
    assert reason(Terminated(143)) == "SIGTERM"
    assert reason(SystemExit(144)) == "exit code 144"


def test_a_killed_job_does_not_run_for_ever(tmp_path: Path) -> None:
    """SIGKILL leaves "running" in the file; a reader sees that it is not, and says who it was."""
    with started(tmp_path) as process:
        assert (read_status(tmp_path) or {})["state"] == "running"
        kill(process)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    status = read_status(tmp_path)
    assert status is not None and status["state"] == "killed" and f"pid {process.pid}" in status["reason"]


def test_a_job_of_another_host_is_told_by_its_lock(tmp_path: Path) -> None:
    """The process number says nothing there: running while its lock is held, killed once it is not."""
    with started(tmp_path) as process:
        status = json.loads((tmp_path / "status.json").read_text())
        (tmp_path / "status.json").write_text(json.dumps({**status, "host": "elsewhere", "pid": 1}))
        assert (read_status(tmp_path) or {})["state"] == "running"
        kill(process)
    assert (read_status(tmp_path) or {})["state"] == "killed"


def test_terminate_is_a_stop(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    status = read_status(tmp_path)
    assert status is not None and (status["state"], status["reason"]) == ("stopped", "SIGTERM")


def test_the_table_has_a_row_for_every_planned_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finished, failed, killed, never started: each is a row, and why is said."""
    plan = [{"job": n, "reader": f"r{n}", "dataset": "d", "overrides": f"reader=r{n}"} for n in range(4)]
    (tmp_path / PLAN).write_text(json.dumps({"jobs": plan}))
    tables = tmp_path / "tables"
    tables.mkdir()
    figures = {"n": 7, "reason": "", "verdicts": {}}
    rows = [
        {"method": "compact", "em": 30.0, "f1": 40.0, **figures},
        {
            "method": "xcompress",
            "em": 32.5,
            "f1": 41.0,
            "em_verdict": "INCONCLUSIVE",
            **figures,
            "verdicts": {"em": ["x", "y"]},
        },
    ]
    (tables / "table1.json").write_text(json.dumps({"rows": rows}))
    with JobRecord(tmp_path / "0", []) as job:
        job.finished(tables)
    with pytest.raises(RuntimeError), JobRecord(tmp_path / "1", []):
        raise RuntimeError("weights | are gone")
    with started(tmp_path / "2") as process:
        kill(process)
    found = write(tmp_path)
    assert [cell.state for cell in found] == ["finished", "failed", "killed", "not started"]
    assert (found[0].n, found[0].compact_em, found[0].em, found[0].verdict) == (7, 30.0, 32.5, "INCONCLUSIVE")
    text = (tmp_path / "table.md").read_text()
    assert "1 of 4 jobs finished" in text and "FAILED: RuntimeError: weights \\| are gone" in text and "KILLED: " in text
    assert text.count("\n| r") == 5 and "30.0 / 40.0" in text
    assert len(json.loads((tmp_path / "table.json").read_text())["rows"]) == 4
    assert text in capsys.readouterr().out
    assert found == cells(tmp_path) and isinstance(found[0], Cell)
    with pytest.raises(UsageError, match=r"holds no sweep\.json"):
        cells(tables)


def test_the_command_line_of_the_table(tmp_path: Path) -> None:
    """It ends with 1 while a job has no table, with one sentence for a wrong folder."""
    command = [sys.executable, "-m", "analysis.sweep"]
    wrong = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1
    (tmp_path / PLAN).write_text(json.dumps({"jobs": [{"job": 0, "reader": "r", "dataset": "d", "overrides": ""}]}))
    begun = time.monotonic()
    right = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert right.returncode == 1 and "not started" in right.stdout, right.stderr
    assert time.monotonic() - begun < 60
