"""Running one stage: what is there is used, the rest is computed and stored shard by shard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from xcompress.execution.base import Execution, Job
from xcompress.progress import Bar
from xcompress.schema import UsageError
from xcompress.settings import Settings
from xcompress.store import StageFolder, write_json

log = logging.getLogger(__name__)


class _Remaining:
    """See :class:`xcompress.execution.base.Jobs`."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = iter(jobs)

    def take(self, wait: bool = True) -> Job | None:
        """The next job."""
        return next(self._jobs, None)


def run_stage(settings: Settings, execution: Execution, name: str, jobs: Sequence[Job]) -> None:
    """Compute and store the jobs whose shards are missing; nothing is loaded if none is."""
    missing = [job for job in jobs if job.folder.find(job.shard) is None]
    total, todo = sum(job.questions for job in jobs), sum(job.questions for job in missing)
    if not missing:
        log.info("%s: all %d questions are there already", name, total)
        return
    log.info("%s: %d of %d questions to do", name, todo, total)
    described: set[StageFolder] = set()
    with _stage_errors(name), Bar(name, todo) as bar:
        for done in execution.run(settings, name, _Remaining(missing), bar.tokens):
            folder = done.job.folder
            if folder not in described:  # what describes the rows is there before the first of them
                for file, content in done.about.items():
                    write_json(folder.path / file, content)
                described.add(folder)
            note = {"seconds": round(done.seconds, 3), "questions": done.job.questions, "tokens": done.tokens}
            folder.write(done.job.shard, done.rows, note)
            bar.advance(done.job.questions)


@contextmanager
def _stage_errors(name: str) -> Iterator[None]:
    """Name the stage in what went wrong; what is finished stays."""
    try:
        yield
    except UsageError:
        raise
    except (KeyboardInterrupt, SystemExit):
        log.warning("stopped in %s; finished shards are kept, run the same command to go on", name)
        raise
    except Exception as error:
        error.add_note(f"(in stage {name}; finished shards are kept, run the same command to go on)")
        raise
