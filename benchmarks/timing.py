"""Interleaved repetitions: every claim is a ratio of times taken side by side in one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_SHOWN = 12  # operators of a profile


@dataclass(frozen=True)
class Spent:
    """One repetition: seconds on the clock, and of all processor cores together."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Series:
    """The repetitions of one side, in order."""

    name: str
    spent: tuple[Spent, ...]

    @property
    def wall(self) -> list[float]:
        return [each.wall for each in self.spent]

    @property
    def median(self) -> float:
        """Median seconds on the clock."""
        return statistics.median(self.wall)

    @property
    def total(self) -> float:
        """Seconds of all repetitions."""
        return sum(self.wall)


@dataclass(frozen=True)
class Ratio:
    """How many times longer one side took: the median of the ratios repetition by repetition, and their range.

    ``cpu`` is the same median of processor time, which other programs on the machine disturb less.
    """

    median: float
    low: float
    high: float
    n: int
    cpu: float


def measure(run: Callable[[], Spent | None]) -> Spent:
    """Time a call; one that returns a :class:`Spent` (another process that measured itself) is believed."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    own = run()
    return own or Spent(time.perf_counter() - wall, time.process_time() - cpu)


def interleave(
    sides: Mapping[str, Callable[[int], Spent | None]], repetitions: int, say: Callable[[str], None]
) -> dict[str, Series]:
    """Time every side once a repetition, each repetition starting with another side.

    Args:
        sides: name to what is timed; it is called with the number of the repetition.
        repetitions: at least 1. Whatever must be warm is warmed by the caller.
        say: called with a line of progress after each repetition.
    """
    spent: dict[str, list[Spent]] = {name: [] for name in sides}
    names = list(sides)
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in [*names[first:], *names[:first]]:
            side = sides[name]
            spent[name].append(measure(lambda side=side, repetition=repetition: side(repetition)))  # type: ignore[misc]
        say(f"{repetition + 1} of {repetitions}: " + ", ".join(f"{name} {spent[name][-1].wall:.2f} s" for name in names))
    return {name: Series(name, tuple(values)) for name, values in spent.items()}


def ratio(slow: Series, fast: Series) -> Ratio:
    """How many times longer ``slow`` took than ``fast``, repetition by repetition."""
    pairs = list(zip(slow.spent, fast.spent, strict=True))
    return summary([a.wall / b.wall for a, b in pairs], [a.cpu / max(b.cpu, 1e-9) for a, b in pairs])


def summary(ratios: Sequence[float], cpu: Sequence[float] = ()) -> Ratio:
    """Median and range of ratios already formed."""
    middle = statistics.median(ratios)
    return Ratio(middle, min(ratios), max(ratios), len(ratios), statistics.median(cpu) if cpu else middle)


def operators(name: str, call: Callable[[], object]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Share of the time inside operators that each one has (torch.profiler, self time)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    lines = [[row.key, f"{row.self_cpu_time_total / total:.1%}", f"{row.count:,}"] for row in rows[:_SHOWN]]
    rest = sum(row.self_cpu_time_total for row in rows[_SHOWN:]) / total
    return [f"{name}: operator", "share of time", "calls"], [*lines, ["all others", f"{rest:.1%}", ""]]
