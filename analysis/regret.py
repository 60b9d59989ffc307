"""Selection regret: how much of what a perfect choice from the same pool would gain does each selector capture?

Per selector: its distance to the oracle in points (regret), and the share of the oracle's headroom over the initial summary and
over a random candidate that it captures (a ratio of means; 0 is no better than that, 1 is the oracle, negative is worse). The
share's interval resamples questions and takes the ratio anew each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis import figures, output, stored
from analysis.about import sentence
from analysis.load import Pool
from analysis.stats import Estimate, bootstrap_ratio, bootstrap_table
from analysis.table1 import Choice, choose, labels
from xcompress.settings import Settings
from xcompress.store import write_atomically

LEFT_OUT = ("closed_book", "raw_passages", "oracle")  # they do not choose from the pool, or are the measure


@dataclass(frozen=True)
class Regret:
    """One selector and metric. ``regret`` in points (oracle minus selector); shares as fractions."""

    name: str
    label: str
    metric: str
    regret: Estimate
    of_initial: Estimate
    of_random: Estimate


def regrets(pool: Pool, settings: Settings, choices: Mapping[str, Choice]) -> list[Regret]:
    """Every selector of Table 1 that chooses from the pool, for EM and F1."""
    known = pool.labelled
    names = [name for name in choices if name not in LEFT_OUT]
    found: list[Regret] = []
    for metric in ("em", "f1"):
        columns = {name: np.asarray(getattr(choice, metric))[known] for name, choice in choices.items()}
        for name in names:
            reason = choices[name].reason or ("" if known.any() else "no question has a gold answer")
            if reason:
                absent = Estimate(None, None, None, 0, reason)
                found.append(Regret(name, labels(settings)[name], metric, absent, absent, absent))
                continue
            table = np.stack([columns["oracle"], columns[name]], 1)
            options = settings.statistics
            gap = bootstrap_table(table, reference=1, seed=settings.seed, level=options.level, resamples=options.resamples)[0]
            shares = [
                bootstrap_ratio(
                    columns[name] - columns[base],
                    columns["oracle"] - columns[base],
                    seed=settings.seed,
                    level=options.level,
                    resamples=options.resamples,
                )
                if base != name
                else Estimate(None, None, None, 0, "the reference")
                for base in ("compact", "random")
            ]
            found.append(Regret(name, labels(settings)[name], metric, gap, shares[0], shares[1]))
    return found


def write(pool: Pool, settings: Settings, folder: Path) -> list[Regret]:
    """``regret.{csv,md,json,svg}``."""
    note = sentence(pool, settings)
    found = regrets(pool, settings, choose(pool, settings))
    records = [
        {
            "method": entry.name,
            "label": entry.label,
            "metric": entry.metric,
            **output.flat("regret", entry.regret),
            **output.flat("share_of_initial", entry.of_initial),
            **output.flat("share_of_random", entry.of_random),
        }
        for entry in found
    ]
    text = ["# Selection regret", "", note, "", (__doc__ or "").split("\n\n", 1)[1].strip().replace("\n", " "), ""]
    headings = ["method", "oracle minus method (points)", "share of headroom over CompAct", "share of headroom over random"]
    for metric in ("em", "f1"):
        rows = [
            [entry.label, output.cell(entry.regret), *(output.cell(e, True, 2) for e in (entry.of_initial, entry.of_random))]
            for entry in found
            if entry.metric == metric
        ]
        text += [f"## {metric.upper()}", "", output.markdown(headings, rows)]
    output.write_table(folder, "regret", records, "\n".join(text), {"note": note})
    write_atomically(folder / "regret.svg", figures.regret(found, settings))
    return found


if __name__ == "__main__":
    stored.command(write)
