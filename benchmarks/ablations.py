"""The paper's ablations from one pool, against one run per setting."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import Row, Section
from benchmarks.timing import summary
from benchmarks.workload import Setting
from xcompress.checkpoint import Loaded
from xcompress.config import compose, to_settings
from xcompress.execution import work
from xcompress.pipeline import Run
from xcompress.schema import Question
from xcompress.settings import Settings

_POOLINGS, _ENERGIES, _SUBSPACES, _SIZES = 3, 8, 3, (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Cost:
    """Seconds, and tokens that went through the blocks (prompts that several candidates share are counted once)."""

    seconds: float
    tokens: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.tokens + other.tokens)

    def times(self, factor: float) -> Cost:
        return Cost(self.seconds * factor, round(self.tokens * factor))


@contextmanager
def counted(costs: dict[str, Cost], name: str) -> Iterator[None]:
    """Add the cost of what runs inside to ``costs[name]``."""
    own = Loaded.states
    tokens = 0

    def states(self: Loaded, ids: Any, positions: Any) -> Any:
        nonlocal tokens
        tokens += ids.numel()
        return own(self, ids, positions)

    Loaded.states = states  # type: ignore[method-assign]
    started = time.perf_counter()
    try:
        yield
    finally:
        Loaded.states = own  # type: ignore[method-assign]
        costs[name] = costs.get(name, Cost(0, 0)) + Cost(time.perf_counter() - started, tokens)


def one_run(settings: Settings, questions: Sequence[Question], size: int, everything: bool, cache: Path) -> dict[str, Cost]:
    """Generate, score and read for K = ``size``: every candidate and variant, or as one setting needs it.

    One setting scores one variant and reads the one summary it chooses; one pool scores all variants and reads all summaries.
    """
    settings = dataclasses.replace(settings, generation=dataclasses.replace(settings.generation, candidates=size))
    scoring = settings.scoring if everything else work.narrowed(settings)
    writer, reader = work.compressor(settings), work.question_reader(settings)
    scorer = work.text_scorer(settings, scoring, cache)
    scorer.score(["to warm up"])
    costs: dict[str, Cost] = {}
    with counted(costs, "generate"):
        rows = writer.candidates(questions)
    with counted(costs, "score"):
        distinct = list(dict.fromkeys(row["summary"] for row in rows))
        scorer.score(distinct)
    by_id = {question.id: question for question in questions}
    if everything:
        pairs = list(dict.fromkeys((row["question_id"], row["summary"]) for row in rows))
    else:
        pairs = list({row["question_id"]: (row["question_id"], row["summary"]) for row in rows}.values())
    with counted(costs, "read"):
        reader.answer([reader.fit_summary(by_id[name], text) for name, text in pairs], None)
    return costs


def total(costs: dict[str, Cost]) -> Cost:
    """Of all stages."""
    return sum(costs.values(), Cost(0, 0))


def run(setting: Setting) -> Section:
    """One pool and two single settings (K = 1 and K = 5) are run; the others follow by the arithmetic that is shown."""
    section = Section("Ablations: one pool against one run per setting")
    count = 1 if setting.quick else 4
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["experiment=laptop", f"limit={count}", "method=xcompress_no_gate", f"run_root={folder}"]
        settings = to_settings(compose(overrides))
        split = next(each for each in Run(settings).prepare() if each.name == "test")
        questions = [question for part in split.questions for question in part]
        runs = {}
        for name, size, everything in (("pool", 5, True), ("K = 5", 5, False), ("K = 1", 1, False)):
            runs[name] = one_run(settings, questions, size, everything, Path(folder))
            setting.say(f"{name}: {total(runs[name])}")
    layers = len(setting.loaded.blocks) + 1
    variants = _POOLINGS * layers * _ENERGIES * _SUBSPACES
    pool, large, small = (total(runs[name]) for name in ("pool", "K = 5", "K = 1"))
    # Cost is linear in K, so the mean over K = 1..5 is that of its ends.
    mean = (large + small).times(0.5)
    separate = mean.times(variants * len(_SIZES))
    # Frugal: summaries made once, answers kept; a pass of scoring for every variant (a larger K includes the smaller).
    frugal = runs["pool"]["generate"] + runs["K = 5"]["score"].times(variants) + runs["pool"]["read"]
    what = f"{variants * len(_SIZES):,} settings, {count} questions"
    for name, other, target in (
        ("one run per setting", separate, 50.0),
        ("summaries and answers kept, scored per setting", frugal, None),
    ):
        for unit in ("seconds", "tokens"):
            share = getattr(other, unit) / getattr(pool, unit)
            own, theirs = (_time(cost.seconds) if unit == "seconds" else f"{cost.tokens:,}" for cost in (pool, other))
            label = f"{what}: {'wall time' if unit == 'seconds' else 'forward tokens'} against {name}"
            section.rows.append(Row(label, own, theirs, summary([share]), target))
    lines = [
        [name, *(f"{costs[stage].seconds:.1f} s, {costs[stage].tokens:,}" for stage in ("generate", "score", "read"))]
        for name, costs in runs.items()
    ]
    section.tables.append((["measured: seconds, forward tokens", "generate", "score", "read"], lines))
    section.notes += [
        f"arithmetic: {_POOLINGS} poolings x {layers} layers x {_ENERGIES} energies x {_SUBSPACES} subspaces ="
        f" {variants:,} variants, times K = 1..5. A run costs a + b K, on average"
        f" ({large.seconds:.1f} + {small.seconds:.1f}) / 2 = {mean.seconds:.1f} s,"
        f" times {variants * len(_SIZES):,} = {_time(separate.seconds)}. The pool: {pool.seconds:.1f} s.",
        f"a frugal script that keeps summaries and answers still scores {variants:,} times: {_time(frugal.seconds)}.",
    ]
    section.raw["runs"] = {
        name: {stage: dataclasses.asdict(cost) for stage, cost in costs.items()} for name, costs in runs.items()
    }
    return section


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 3600:,.1f} h"
