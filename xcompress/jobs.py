"""One job's own records: its log, its configuration, and a status that is true even after ``kill -9``.

A job's folder is Hydra's (``<run root>/logs/...``). ``status.json`` says running, finished, failed or stopped, with the reason.
While it says running, the job holds a lock on its log, which the kernel gives back however the job ends; so a reader can tell
a running job from a killed one (:func:`read_status`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import yaml

from xcompress.schema import UsageError
from xcompress.settings import Settings
from xcompress.store import alive, write_atomically, write_json

log = logging.getLogger(__name__)
STATUS, LOG = "status.json", "job.log"
FAILED, FINISHED, RUNNING, STOPPED, KILLED = "failed", "finished", "running", "stopped", "killed"


class Terminated(SystemExit):
    """SIGTERM: what is finished is kept, as after Ctrl-C."""


class JobRecord:
    """The records of a job while it runs; a context manager.

    Args:
        folder: the job's own; made if it is not there.
        overrides: what the job was asked for.
    """

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder = folder
        self._status: dict[str, Any] = {
            "state": RUNNING,
            "reason": "",
            "overrides": overrides,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _now(),
            "ended": None,
            "tables": None,
        }
        for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
            if name in os.environ:
                self._status[name.lower()] = os.environ[name]

    def __enter__(self) -> JobRecord:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(self.folder / LOG, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._handler.setLevel(logging.INFO)
        assert self._handler.stream is not None
        try:
            fcntl.flock(self._handler.stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            log.warning("%s cannot be locked (%s); its status may stay 'running' if the job is killed", self.folder, error)
        logging.getLogger().addHandler(self._handler)
        self._write()
        self._catch_terminate()
        return self

    def describe(self, settings: Settings) -> None:
        """What the job is about, once its configuration is understood."""
        for name in ("reader", "compressor", "dataset", "method"):
            self._status[name] = getattr(settings, name).name
        self._status["seed"] = settings.seed
        text = yaml.safe_dump(dict(settings.resolved), sort_keys=False, allow_unicode=True)
        write_atomically(self.folder / "config.yaml", text.encode())
        self._write()

    def finished(self, tables: Path | None) -> None:
        """The job has done what it was asked for; ``tables`` is where they are, if it made them."""
        self._status |= {"state": FINISHED, "tables": None if tables is None else str(tables.resolve())}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            self._status |= {"state": STOPPED if stopped else FAILED, "reason": reason(error)}
            record = logging.makeLogRecord(
                {"name": __name__, "levelno": logging.ERROR, "levelname": "ERROR", "msg": "this job %s: %s"}
            )
            record.args = (self._status["state"], self._status["reason"])
            record.exc_info = None if kind is None or error is None or stopped else (kind, error, trace)
            self._handler.emit(record)  # the traceback goes to the job's own log alone, at once
        self._status["ended"] = _now()
        try:
            self._write()
        except OSError as problem:  # a full disk: what ended the job matters more
            log.warning("the status of this job cannot be written: %s", problem)
        finally:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._before)

    def _write(self) -> None:
        write_json(self.folder / STATUS, self._status)

    def _catch_terminate(self) -> None:
        """SIGTERM ends the job as Ctrl-C does; submitit handles it in its own way (the job goes on until it is requeued)."""
        self._before: Any = None
        if threading.current_thread() is threading.main_thread() and "SUBMITIT_EXECUTOR" not in os.environ:
            self._before = signal.signal(signal.SIGTERM, _terminate)


def reason(error: BaseException) -> str:
    """Why a job ended, in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(error, Terminated):
        return "SIGTERM"
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}".rstrip(": ")


def read_status(folder: Path) -> dict[str, Any] | None:
    """The status of a job, None if it has not started. A job that says running but is not there any more is "killed"."""
    try:
        status: dict[str, Any] = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if status["state"] == RUNNING and not _is_running(folder, status):
        status |= {
            "state": KILLED,
            "reason": f"{status['host']} pid {status['pid']} ended without a word (SIGKILL, out of memory, ...)",
        }
    return status


def _is_running(folder: Path, status: dict[str, Any]) -> bool:
    here = status["host"] == socket.gethostname()
    if here and status["pid"] == os.getpid():
        return True
    if here and not alive(status["pid"]):
        return False
    try:
        with (folder / LOG).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return True  # no locks there: nothing says that it has ended
    return False


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(128 + number)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
