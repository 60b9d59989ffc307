"""The contract between a stage and what runs its shards.

The driver (the process of the command) reads a shard's input and stores its rows; what runs shards only turns a :class:`Batch`
into rows. So workers need no common file system beyond the model folders, and there is one writer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from xcompress.engines.base import Progress
from xcompress.schema import Question, UsageError
from xcompress.settings import Settings, build
from xcompress.store import Shard, StageFolder

if TYPE_CHECKING:
    from xcompress.stages.stepwise import Gate

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Batch:
    """The input of one shard of any stage: what is sent to a worker."""

    split: str  # "test" or "calibration"
    questions: Sequence[Question]
    candidates: Rows = field(default_factory=list)  # empty where the stage makes them
    chosen: Rows = field(default_factory=list)  # stepwise rows, for reading them
    answers: Rows = field(default_factory=list)  # to the candidates, for reading stepwise rows
    gate: Gate | None = None  # of the stepwise stage, as the questions before have left it

    def without(self, questions: Collection[str]) -> Batch:
        """The batch of the other questions."""

        def others(rows: Rows) -> Rows:
            return [row for row in rows if row["question_id"] not in questions]

        return Batch(
            self.split,
            [question for question in self.questions if question.id not in questions],
            others(self.candidates),
            others(self.chosen),
            others(self.answers),
            self.gate,
        )


@dataclass(frozen=True)
class Work:
    """A stage with its model loaded.

    Attributes:
        run: rows of a batch; the second argument is called with the tokens just done.
        about: JSON files that describe the rows as a whole, by name; they are stored beside the shards.
    """

    run: Callable[[Batch, Progress], Rows]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A shard to compute.

    Attributes:
        folder, shard: where it goes.
        questions: how many it has.
        load: reads its input.
        ready: whether its input is there (a rolling gate's shards follow one another).
    """

    folder: StageFolder
    shard: Shard
    questions: int
    load: Callable[[], Batch]
    ready: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Done:
    """What a worker made of a job."""

    job: Job
    rows: Rows
    seconds: float  # of the worker, input and model loading not counted
    tokens: int
    about: Mapping[str, Any]


class Jobs(Protocol):
    """The jobs of a stage that are not done."""

    def take(self, wait: bool = True) -> Job | None:
        """The next job; None if there is none (or, with ``wait`` false, none at this moment)."""
        ...


class Execution(Protocol):
    """Runs the jobs of a stage somewhere. Implementations are dataclasses named by ``_target_`` in ``configs/execution``."""

    name: str
    price_per_hour: float | None

    def adapt(self, settings: Settings) -> Settings:
        """The settings as they are where the work is done (devices, batch sizes)."""
        ...

    def run(self, settings: Settings, stage: str, jobs: Jobs, progress: Progress) -> Iterator[Done]:
        """The jobs as they are done, in any order.

        Raises:
            UsageError: as the stage's work does.
        """
        ...

    def close(self) -> None:
        """Give back what is held between stages."""
        ...


def open_execution(values: Mapping[str, Any]) -> Execution:
    """The execution that ``_target_`` names, with its settings.

    Raises:
        UsageError: there is none of that name, or a setting is unknown or has a wrong value.
    """
    from hydra.utils import get_class

    known = dict(values)
    target = known.pop("_target_", None)
    try:
        kind = get_class(str(target))
    except Exception as error:  # Hydra wraps whatever the import raised
        raise UsageError(f"execution._target_={target} cannot be found: {str(error).splitlines()[0]}") from None
    execution: Execution = build(kind, known, "execution")
    return execution
