"""One process, one shard after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from xcompress import checkpoint
from xcompress.engines import choose
from xcompress.engines.base import Progress
from xcompress.execution.base import Done, Jobs
from xcompress.execution.work import make
from xcompress.settings import Settings


@dataclass(frozen=True)
class Local:
    """See :class:`xcompress.execution.base.Execution`."""

    name: str = "local"
    price_per_hour: float | None = None

    def adapt(self, settings: Settings) -> Settings:
        """The engine that runs on this machine, all else as it is."""
        return choose.resolve(settings)

    def run(self, settings: Settings, stage: str, jobs: Jobs, progress: Progress) -> Iterator[Done]:
        """The jobs in order. The model is loaded once; stages with the same model share it."""
        work = make(settings, stage)
        while (job := jobs.take()) is not None:
            started, counted = time.monotonic(), 0

            def count(tokens: int) -> None:
                nonlocal counted
                counted += tokens
                progress(tokens)

            rows = work.run(job.load(), count)
            yield Done(job, rows, time.monotonic() - started, counted, work.about)

    def close(self) -> None:
        """Release the model."""
        checkpoint.release()
