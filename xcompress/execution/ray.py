"""Ray actors, each holding a model; shards go to whichever is free.

The driver hands out one shard after the other and stores what comes back, so results are the same files as in one process. A
shard whose actor or node dies goes to another actor; Ray starts the dead one again where there is room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xcompress import checkpoint
from xcompress.engines import choose
from xcompress.engines.base import Progress
from xcompress.execution.base import Batch, Done, Job, Jobs, Rows
from xcompress.execution.work import ROLES, make, model_folder
from xcompress.schema import UsageError
from xcompress.settings import Settings

if TYPE_CHECKING:
    import ray

log = logging.getLogger(__name__)


@dataclass
class Ray:
    """See :class:`xcompress.execution.base.Execution`; the keys are explained in ``configs/execution/ray.yaml``."""

    name: str = "ray"
    address: str | None = None
    actors: int = 1
    num_cpus: float = 1
    num_gpus: float = 0
    cache_gb: float | None = None
    prefill_tokens: int | None = None
    batch_tokens: int | None = None
    attempts: int = 3
    patience_seconds: float = 600
    object_store_mb: int | None = None
    runtime_env: Mapping[str, Any] | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.actors < 1 or self.attempts < 1:
            raise UsageError("execution.actors and execution.attempts must be 1 or more")
        self._pool: _Pool | None = None
        self._started = False

    def adapt(self, settings: Settings) -> Settings:
        """Devices as the actors have them: what is resolved here must hold there."""
        device = "cuda" if self.num_gpus else "cpu"
        parts: dict[str, Any] = {}
        for role in ("reader", "compressor"):
            model = getattr(settings, role)
            if model.device == "auto":
                model = dataclasses.replace(model, device=device)
            if model.device.startswith("cuda") and model.dtype == "auto" and not _has_cuda():
                raise UsageError(f"{role}.dtype=auto cannot be told here, where there is no GPU; set {role}.dtype=bfloat16")
            parts[role] = model
        if self.batch_tokens is not None:
            parts["reader"] = dataclasses.replace(parts["reader"], batch_tokens=self.batch_tokens)
        settings = choose.resolve(dataclasses.replace(settings, **parts))
        engine = dict(settings.engine)
        for key in ("cache_gb", "prefill_tokens"):
            if (value := getattr(self, key)) is not None:
                if key not in engine:
                    raise UsageError(f"execution.{key}: this engine has no such setting")
                engine[key] = value
        return dataclasses.replace(settings, engine=engine)

    def run(self, settings: Settings, stage: str, jobs: Jobs, progress: Progress) -> Iterator[Done]:
        """The jobs as actors finish them.

        Raises:
            UsageError: the cluster cannot be joined or has no room for an actor, a shard has ended ``attempts`` actors, or as
                the stage's work does.
        """
        self._connect()
        role = ROLES.get(stage, "reader")
        if self._pool is None or self._pool.role != role:  # a new process a model: a GPU's memory is given back for sure
            if self._pool is not None:
                self._pool.close()
            self._pool = _Pool(self, _resolved(settings), role)
        yield from self._pool.run(stage, jobs, progress)

    def close(self) -> None:
        """End the actors, and Ray where it was started here."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._started:
            import ray

            ray.shutdown()
            self._started = False

    def _connect(self) -> None:
        if self._started:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError:
            raise UsageError("execution=ray needs Ray: pip install -e '.[ray]'; or set execution=local") from None
        if self.address:
            _reach(self.address)
        options: dict[str, Any] = {"address": self.address} if self.address else {"include_dashboard": False}
        if not self.address and self.object_store_mb:
            options["object_store_memory"] = self.object_store_mb * 2**20
        try:
            ray.init(
                logging_level=logging.ERROR,
                log_to_driver=False,
                runtime_env=dict(self.runtime_env) if self.runtime_env else None,
                **options,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(f"execution.address={self.address}: {str(error).strip().splitlines()[0]}") from error
        self._started = True
        total = ray.cluster_resources()
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        log.info(
            "ray: %d nodes with %g CPUs and %g GPUs; %d actors of %g CPUs and %g GPUs asked for",
            *(nodes, total.get("CPU", 0), total.get("GPU", 0), self.actors, self.num_cpus, self.num_gpus),
        )


class Holder:
    """The actor: one model and the stage that uses it."""

    def __init__(self, settings: Settings) -> None:
        from xcompress.config import quiet_libraries

        quiet_libraries()
        self._settings = settings
        self._stage = ""
        self._work: Any = None

    def where(self) -> str:
        """Who holds the model, for messages."""
        return f"{socket.gethostname()} pid {os.getpid()}"

    def run(self, stage: str, batch: Batch) -> tuple[Rows, float, int, dict[str, Any]]:
        """Rows, seconds, tokens, and what describes the rows."""
        if stage != self._stage:
            self._work = None
            self._work, self._stage = make(self._settings, stage), stage
        started, tokens = time.monotonic(), 0

        def count(more: int) -> None:
            nonlocal tokens
            tokens += more

        rows = self._work.run(batch, count)
        return rows, time.monotonic() - started, tokens, dict(self._work.about)


class _Pool:
    """The actors of one role, and what each is doing."""

    def __init__(self, options: Ray, settings: Settings, role: str) -> None:
        self.role = role
        self._options = options
        self._settings = settings
        self._actors = [self._make() for _ in range(options.actors)]
        self._names = ["not started"] * options.actors
        self._starting: dict[ray.ObjectRef[Any], int] = {}
        self._idle: deque[int] = deque()
        for at in range(options.actors):
            self._ask(at)

    def _make(self) -> Any:
        import ray

        remote: Any = ray.remote(Holder)
        return remote.options(
            num_cpus=self._options.num_cpus,
            num_gpus=self._options.num_gpus,
            max_restarts=-1,
            max_task_retries=0,  # lost shards are handed out here, to any actor
            scheduling_strategy="SPREAD",
        ).remote(self._settings)

    def close(self) -> None:
        """End the actors."""
        import ray

        kill: Any = ray.kill
        for actor in self._actors:
            with contextlib.suppress(Exception):  # those that are gone already
                kill(actor)

    def run(self, stage: str, jobs: Jobs, progress: Progress) -> Iterator[Done]:
        """See :meth:`Ray.run`."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        busy: dict[Any, tuple[int, Job]] = {}
        lost: deque[Job] = deque()
        ended: dict[str, int] = {}  # actors that died with a shard
        alone_since = time.monotonic()
        while True:
            while self._idle:
                # Only with nothing under way may this wait for what other processes are doing.
                job = lost.popleft() if lost else jobs.take(wait=not busy)
                if job is None:
                    break
                at = self._idle.popleft()
                busy[self._actors[at].run.remote(stage, job.load())] = (at, job)
            if not busy and self._idle:
                return
            waiting = [*busy, *self._starting]
            ready, _ = ray.wait(waiting, num_returns=1, timeout=1.0)
            if busy or ready:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > self._options.patience_seconds:
                raise UsageError(
                    f"no actor of {self._options.num_cpus:g} CPUs and {self._options.num_gpus:g} GPUs could start within"
                    f" {self._options.patience_seconds:g} s; the cluster has {_resources()} (execution.patience_seconds)"
                )
            for ref in ready:
                if ref in self._starting:
                    self._started(self._starting.pop(ref), ref)
                    continue
                at, job = busy.pop(ref)
                try:
                    rows, seconds, tokens, about = ray.get(ref)
                except RayTaskError as error:
                    cause = error.cause if isinstance(error.cause, Exception) else error
                    cause.add_note(f"(on {self._names[at]}, shard {job.shard.stem})")
                    raise cause from None
                except RayError as error:
                    ended[job.shard.stem] = ended.get(job.shard.stem, 0) + 1
                    self._lost(stage, at, job, error, ended[job.shard.stem])
                    lost.append(job)
                    continue
                self._idle.append(at)
                progress(tokens)
                yield Done(job, rows, seconds, tokens, about)

    def _lost(self, stage: str, at: int, job: Job, error: Exception, times: int) -> None:
        why = type(error).__name__
        log.warning(
            "%s: actor %d (%s) is lost (%s); shard %s goes back to the queue", stage, at, self._names[at], why, job.shard.stem
        )
        if times >= self._options.attempts:
            raise UsageError(
                f"{stage}: shard {job.shard.stem} has ended {times} actors (the last: {why}); if they ran out of memory, lower"
                " execution.cache_gb, execution.prefill_tokens or execution.batch_tokens; finished shards are kept"
            )
        self._ask(at)

    def _ask(self, at: int) -> None:
        """An actor is free once it answers."""
        self._starting[self._actors[at].where.remote()] = at

    def _started(self, at: int, ref: Any) -> None:
        import ray
        from ray.exceptions import ActorDiedError, RayError

        try:
            name = ray.get(ref)
        except ActorDiedError:  # for good; an actor that Ray is starting again is only unavailable
            self._actors[at] = self._make()
            self._ask(at)
        except RayError:
            time.sleep(0.5)
            self._ask(at)
        else:
            if self._names[at] != "not started":
                log.info("actor %d is back (%s)", at, name)
            self._names[at] = name
            self._idle.append(at)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _resolved(settings: Settings) -> Settings:
    """dtypes as this machine resolves them, so that an actor cannot resolve another."""
    parts = {}
    for role in ("reader", "compressor"):
        model = getattr(settings, role)
        dtype = checkpoint.pick_dtype(model.dtype, model.device, model_folder(model))
        parts[role] = dataclasses.replace(model, dtype=dtype)
    return dataclasses.replace(settings, **parts)


def _reach(address: str) -> None:
    """Ray would look for minutes for a cluster that is not there."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return  # "auto": Ray's own message is quick
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UsageError(f"execution.address={address}: no Ray cluster answers there ({error})") from None


def _resources() -> str:
    import ray

    total = ray.cluster_resources()
    return (
        f"{total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs on {sum(bool(n['Alive']) for n in ray.nodes())} nodes"
    )
