"""One process, one shard after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from xcompress import checkpoint
from xcompress.engines import choose
from xcompress.engines.base import Progress, RowErrors
from xcompress.execution.base import Batch, Done, Jobs, Rows, Work
from xcompress.execution.work import make
from xcompress.schema import UsageError
from xcompress.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Local:
    """See :class:`xcompress.execution.base.Execution`."""

    name: str = "local"
    price_per_hour: float | None = None

    def adapt(self, settings: Settings) -> Settings:
        """The engine that runs on this machine, all else as it is."""
        return choose.resolve(settings)

    def run(self, settings: Settings, stage: str, jobs: Jobs, progress: Progress) -> Iterator[Done]:
        """The jobs in order. The model is loaded once; stages with the same model share it.

        Raises:
            UsageError: as the stage's work does. Where a server has failed for some questions, only after all others are done.
        """
        work = make(settings, stage)
        failed: dict[str, str] = {}
        while (job := jobs.take()) is not None:
            started, counted = time.monotonic(), 0

            def count(tokens: int) -> None:
                nonlocal counted
                counted += tokens
                progress(tokens)

            rows = _rows(work, job.load(), count, failed)
            if rows is not None:
                yield Done(job, rows, time.monotonic() - started, counted, work.about)
        if failed:
            names = ", ".join([*failed][:10]) + (f" and {len(failed) - 10} more" if len(failed) > 10 else "")
            why = "; ".join([*dict.fromkeys(failed.values())][:3])
            raise UsageError(
                f"{stage}: requests of {len(failed)} questions failed ({names}): {why}. All other answers are stored; the same"
                " command asks for these alone"
            )

    def close(self) -> None:
        """Release the model."""
        checkpoint.release()


def _rows(work: Work, batch: Batch, progress: Progress, failed: dict[str, str]) -> Rows | None:
    """The rows of a batch, or None where requests of some of its questions failed; these are noted in ``failed``.

    The other questions are then gone through all the same: their answers are in the engine's journal when the batch comes
    again.
    """
    whole = True
    while True:
        try:
            rows = work.run(batch, progress)
            return rows if whole else None
        except RowErrors as error:
            if not error.questions or batch.gate is not None:  # a gate's next shard needs this one
                raise
            whole = False
            log.warning("%s", error)
            failed.update(dict.fromkeys(error.questions, "; ".join(dict.fromkeys(error.rows.values()))))
            batch = batch.without(error.questions)
            if not batch.questions:
                return None
