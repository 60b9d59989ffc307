"""Programs that need an environment of their own, run beside ours: one process, asked again and again over a pipe.

The worker is a file in ``benchmarks/workers`` that imports nothing of this project. It reads one JSON object a line and answers
with one; what it loads once is loaded before the first answer, and it times itself, so that a pipe's cost is not in the figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.timing import Spent

WORKERS = Path(__file__).parent / "workers"


class Absent(Exception):
    """The other program is not there; the text says how to get it."""


class External:
    """A worker process.

    Args:
        python: interpreter of the environment that holds the program.
        worker: file name in ``benchmarks/workers``.
        about: first object sent; the worker answers it once everything is loaded.

    Raises:
        Absent: the interpreter does not exist or the worker ended before it was ready.
    """

    def __init__(self, python: str, worker: str, about: Mapping[str, Any]) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (open until close)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(
                [python, str(WORKERS / worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise Absent(f"{python} cannot be started: {error.strerror}") from None
        try:
            self.about = self.ask(about)
        except RuntimeError as error:
            raise Absent(str(error)) from None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer to one request.

        Raises:
            RuntimeError: the worker ended instead; the text is its last words.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            words = [text.strip() for text in self._log.read().splitlines() if text.strip()]
            self.close()
            raise RuntimeError(words[-1] if words else f"it ended with code {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def timed(self, request: Mapping[str, Any]) -> tuple[Spent, dict[str, Any]]:
        """:meth:`ask` where the answer holds ``wall`` and ``cpu`` seconds."""
        answer = self.ask(request)
        return Spent(answer["wall"], answer["cpu"]), answer

    def close(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, with a request unread
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
