"""What follows a run beside its files: nothing, or Weights & Biases. Nothing is known only here; nothing here stops a run."""

from __future__ import annotations

import csv
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from xcompress.schema import UsageError
from xcompress.settings import Settings, build

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A context manager around a run; leaving it with an exception marks the run as failed."""

    name: str

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def begin(self, settings: Settings, job: Path | None) -> None:
        """Before anything is loaded.

        Raises:
            UsageError: the package is not installed.
        """
        ...

    def progress(self, stage: str, done: int, todo: int, tokens: int) -> None:
        """So many of the questions to do are done."""
        ...

    def tables(self, folder: Path) -> None:
        """The tables are there."""
        ...


@dataclass
class NoTracker:
    """Follows nothing."""

    name: str = "none"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def begin(self, settings: Settings, job: Path | None) -> None:
        """Nothing."""

    def progress(self, stage: str, done: int, todo: int, tokens: int) -> None:
        """Nothing."""

    def tables(self, folder: Path) -> None:
        """Nothing."""


@dataclass
class Wandb:
    """A Weights & Biases run; the keys are explained in ``configs/logger/wandb.yaml``."""

    name: str = "wandb"
    mode: str = "offline"
    project: str = "xcompress"
    entity: str | None = None
    timeout_seconds: float = 60

    def __post_init__(self) -> None:
        if self.mode not in {"offline", "online"}:
            raise UsageError(f"logger.mode={self.mode} is not known; choose offline or online")
        self._run: Any = None
        self._sent: tuple[str, float] = ("", 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._try("end", lambda run: run.finish(exit_code=0 if error is None else 1))

    def begin(self, settings: Settings, job: Path | None) -> None:
        """Start the run with its whole configuration."""
        try:
            import wandb
        except ImportError:
            raise UsageError("logger=wandb needs wandb: pip install -e '.[wandb]'; or set logger=none") from None
        folder = Path(settings.run_root)
        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = self.mode
        if mode == "online" and not _has_key(wandb):
            log.warning("wandb: no login on this machine (wandb login); recording offline, send it later with `wandb sync`")
            mode = "offline"
        sweep = job.parent.name if job is not None and job.parent.name.startswith("sweep-") else None
        label = f"{settings.reader.name}-{settings.compressor.name}-{settings.dataset.name}-{settings.method.name}"

        def start(_: Any) -> Any:
            return wandb.init(
                project=self.project,
                entity=self.entity,
                name=f"{label}-{job.name}" if sweep and job else label,
                group=sweep,
                config=dict(settings.resolved),
                mode=mode,
                dir=str(folder),
                reinit="finish_previous",
                settings=wandb.Settings(
                    silent=True,
                    console="off",  # what is printed stays here
                    disable_code=True,
                    disable_git=True,
                    login_timeout=self.timeout_seconds,
                    init_timeout=self.timeout_seconds,
                    finish_timeout=self.timeout_seconds,
                ),
            )

        self._run = True
        self._run = self._try("start", start)

    def progress(self, stage: str, done: int, todo: int, tokens: int) -> None:
        """Questions and tokens, at most once a second, and at the end of a stage."""
        now = time.monotonic()
        if done < todo and self._sent[0] == stage and now - self._sent[1] < 1:
            return
        self._sent = (stage, now)
        self._try("log", lambda run: run.log({f"{stage}/questions": done, f"{stage}/to_do": todo, f"{stage}/tokens": tokens}))

    def tables(self, folder: Path) -> None:
        """Table 1 as a table and as summary figures, and the figures as they are."""
        self._try("log the tables", lambda run: _log_tables(run, folder))

    def _try(self, what: str, action: Callable[[Any], Any]) -> Any:
        """Do it; after the first trouble nothing more is sent."""
        if self._run is None:
            return None
        try:
            return action(self._run)
        except Exception as error:
            log.warning("wandb could not %s (%s); the run goes on without it", what, str(error).strip().split("\n")[0])
            self._run = None
            return None


def open_tracker(settings: Settings, job: Path | None) -> Tracker:
    """The tracker that ``logger`` names, begun.

    Raises:
        UsageError: an unknown or wrong setting, or its package is missing.
    """
    from hydra.utils import get_class

    values: Mapping[str, Any] = settings.logger
    try:
        kind = get_class(str(values.get("_target_")))
    except Exception as error:  # Hydra wraps whatever the import raised
        raise UsageError(f"logger._target_={values.get('_target_')} cannot be found: {str(error).splitlines()[0]}") from None
    tracker: Tracker = build(kind, {key: value for key, value in values.items() if key != "_target_"}, "logger")
    tracker.begin(settings, job)
    return tracker


def _has_key(wandb: Any) -> bool:
    """Whether there is a login already (environment or netrc); never asks for one."""
    try:
        return bool(wandb.api.api_key)
    except Exception:
        return False


def _log_tables(run: Any, folder: Path) -> None:
    import wandb

    with (folder / "table1.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    figures = {f"figures/{path.stem}": wandb.Html(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.svg"))}
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    run.log({"table1": table, **figures})
    for row in rows:
        for metric in ("em", "f1"):
            if row[metric]:
                run.summary[f"{row['method']}/{metric}"] = float(row[metric])
    run.summary["tables"] = folder.name
