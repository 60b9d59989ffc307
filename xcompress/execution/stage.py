"""Running one stage: what is there is used, the rest is computed and stored shard by shard, shared with other processes."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from xcompress.execution.base import Done, Execution, Job
from xcompress.execution.claims import Claims
from xcompress.progress import Bar
from xcompress.schema import UsageError
from xcompress.settings import Settings
from xcompress.store import StageFolder, disk_trouble, write_json
from xcompress.tracking import Tracker

log = logging.getLogger(__name__)
_POLL_SECONDS = 1.0


class Remaining:
    """The jobs that nobody has done. See :class:`xcompress.execution.base.Jobs`.

    A job is claimed before it is handed out. Those that another process has claimed come last, and are handed out after all if
    that process ends without storing them.

    Args:
        stage: its name, for messages.
        jobs: the jobs whose shards were missing.
        skipped: called with a job that another process has done.
    """

    def __init__(self, stage: str, jobs: Sequence[Job], skipped: Callable[[Job], None]) -> None:
        self._stage = stage
        self._jobs = deque(jobs)
        self._skipped = skipped
        self._claims = {path: Claims(path) for path in dict.fromkeys(job.folder.path for job in jobs)}
        self._contested: set[str] = set()

    def take(self, wait: bool = True) -> Job | None:
        """The next job of which this process now has the claim."""
        said: list[str] = []
        while self._jobs:
            for _ in range(len(self._jobs)):
                job = self._jobs.popleft()
                if not self._ready(job):
                    self._jobs.append(job)
                    continue
                if not self._claims[job.folder.path].take(job.shard.stem):
                    self._contested.add(job.shard.stem)
                    self._jobs.append(job)
                    continue
                # Another process may have stored it since this one looked; one that was killed in between left no note.
                job.folder.catch_up(all_files=job.shard.stem in self._contested)
                if job.folder.find(job.shard) is None:
                    return job
                self.finished(job)
                self._skipped(job)
            if not self._jobs or not wait:
                break
            others = sorted({name for claims in self._claims.values() for name in claims.others()})
            if others != said:
                said = others
                who = ", ".join(others) or "another process"
                log.info("%s: the last %d shards are being computed by %s; waiting", self._stage, len(self._jobs), who)
            time.sleep(_POLL_SECONDS)
        return None

    @staticmethod
    def _ready(job: Job) -> bool:
        if job.ready():
            return True
        job.folder.catch_up()
        return job.ready()

    def finished(self, job: Job) -> None:
        """The job's shard is stored."""
        self._claims[job.folder.path].give_back(job.shard.stem)

    def close(self) -> None:
        """Give back all claims."""
        for claims in self._claims.values():
            claims.close()


def run_stage(settings: Settings, execution: Execution, tracker: Tracker, name: str, jobs: Sequence[Job]) -> None:
    """Compute and store the jobs whose shards are missing; nothing is loaded if none is.

    Raises:
        UsageError: as the stage's work does, or the shards cannot be stored (disk full, read-only).
    """
    with _stage_errors(name):
        missing = [job for job in jobs if job.folder.find(job.shard) is None]
        total, todo = sum(job.questions for job in jobs), sum(job.questions for job in missing)
        if not missing:
            log.info("%s: all %d questions are there already", name, total)
            return
        log.info("%s: %d of %d questions to do", name, todo, total)
        with Bar(name, todo) as bar:
            store = _Store()
            remaining = Remaining(name, missing, lambda job: bar.advance(job.questions))
            try:
                for done in execution.run(settings, name, remaining, bar.tokens):
                    store.put(done)
                    remaining.finished(done.job)
                    bar.advance(done.job.questions)
                    tracker.progress(name, bar.questions, todo, bar.all_tokens)
            finally:
                remaining.close()


class _Store:
    """Writes rows where they go; what describes them is there before the first of them."""

    def __init__(self) -> None:
        self._described: set[StageFolder] = set()

    def put(self, done: Done) -> None:
        """Store the rows of a job."""
        folder = done.job.folder
        if folder not in self._described:
            for file, content in done.about.items():
                write_json(folder.path / file, content)
            self._described.add(folder)
        note = {"seconds": round(done.seconds, 3), "questions": done.job.questions, "tokens": done.tokens}
        folder.write(done.job.shard, done.rows, note)


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
    except OSError as error:
        if sentence := disk_trouble(error):
            raise UsageError(f"{sentence} (in stage {name})") from error
        error.add_note(f"(in stage {name}; finished shards are kept, run the same command to go on)")
        raise
    except Exception as error:
        error.add_note(f"(in stage {name}; finished shards are kept, run the same command to go on)")
        raise
