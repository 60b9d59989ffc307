"""A deterministic engine without a model, and a tracker of time and memory: what is left is the program's own cost."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from xcompress.engines.base import Generation, Progress, Request

TEXTS = ("the old mill by the river", "a bridge and a hill", "nothing is said of it")


class ScriptedEngine:
    """Three texts; which one follows from the draw's seed and the prompt's length."""

    name = "scripted"
    reproducible = True
    max_context = 1 << 20

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        """A text for each draw."""
        found = []
        for request in requests:
            texts = [TEXTS[(draw.seed + len(request.prompt)) % len(TEXTS)] for draw in request.draws]
            found.append([Generation(text, (5, 6, 7), "stop", -1.5) for text in texts])
            if progress is not None:
                progress(3 * len(texts))
        return found

    def token_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The same for every token."""
        return [[-0.5] * len(continuation) for _, continuation in pairs]

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Sums of them."""
        return [-0.5 * len(continuation) for _, continuation in pairs]


def open_engine(folder: Path, dtype: str, device: str, **_: Any) -> ScriptedEngine:
    """See ``configs/engine``; whatever another engine's file sets is taken and not used."""
    return ScriptedEngine()


@dataclass
class Meter:
    """Writes stage, questions done, processor seconds and resident megabytes into a file."""

    file: str
    name: str = "meter"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("end", 0)

    def begin(self, settings: Any, job: Path | None) -> None:
        """Nothing to begin."""
        self._write("begin", 0)

    def progress(self, stage: str, done: int, todo: int, tokens: int) -> None:
        """A line a shard."""
        self._write(stage, done)

    def tables(self, folder: Path) -> None:
        """The tables are there."""
        self._write("tables", 0)

    def _write(self, stage: str, done: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        row = {
            "stage": stage,
            "done": done,
            "cpu": time.process_time(),
            "wall": time.monotonic(),
            "mb": pages * resource.getpagesize() / 2**20,
        }
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
