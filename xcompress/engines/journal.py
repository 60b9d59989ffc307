"""Answers already paid for: one line each in a file, found again by the digest of what was asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """A file of answers that only grows; a torn last line (a killed process) is not read, and several processes may append.

    Only places are held in memory: at the paper's scale the answers themselves would not fit.

    Args:
        path: of the file; made with its folders when the first answer is put in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}
        self._read_to = 0
        self._catch_up()

    def _catch_up(self) -> None:
        """Take up the lines that were added since, by whomever."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                place = self._read_to
                self._read_to += len(line)
                try:
                    key = json.loads(line)["key"]
                except (ValueError, KeyError, TypeError):
                    continue  # torn, and then written on by another process
                self._places[key] = (place, len(line))

    def get(self, key: str) -> Any:
        """The answer under ``key``, or None."""
        if key not in self._places:
            return None
        place, length = self._places[key]
        with self.path.open("rb") as file:
            file.seek(place)
            return json.loads(file.read(length))["answer"]

    def put(self, key: str, answer: Any) -> None:
        """Add an answer; on disk when this returns, as far as the operating system knows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "answer": answer}, separators=(",", ":")).encode() + b"\n"
        # One write to a file opened for appending stays whole beside those of other processes.
        with self.path.open("ab", buffering=0) as file:
            if file.tell() and not self._ends_whole():
                line = b"\n" + line
            file.write(line)
        self._catch_up()

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
