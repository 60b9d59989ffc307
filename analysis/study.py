"""All published runs of a reader as one study: python -m analysis.study READER

Reads ``results/<reader>/<data set>/numbers.parquet`` alone (figures of every candidate, no text), so the tables can be made
from a fresh clone. Questions of all data sets are pooled: what no single one can decide, several together may. Intervals
resample questions; every data set weighs by its number of questions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from analysis import output
from analysis.correlation import adjusted_share
from analysis.load import Floats
from analysis.stats import (
    Estimate,
    bootstrap_ratio,
    bootstrap_table,
    minimum_detectable_difference,
    partial_pearson,
    within_correlation_difference,
    within_group_pearson,
)
from analysis.table1 import exact_p
from xcompress.config import ROOT
from xcompress.schema import UsageError
from xcompress.selectors import lowest

SELECTORS = {
    "random": "random candidate",
    "shortest": "shortest",
    "longest": "longest",
    "lowest_ppl": "lowest PPL",
    "lowest_longppl": "lowest LongPPL",
    "compressor": "compressor's likeliest",
    "question": "question likelihood",
    "confidence": "answer confidence",
    "majority": "majority answer",
    "lowest_sps": "lowest SPS",
    "xcompress": "xCompress (gate + SPS)",
    "oracle": "oracle",
}
METRICS = {"sps": "SPS", "nll": "PPL", "longppl": "LongPPL", "tokens": "token count"}
OPTIONS: Any = {"seed": 0, "level": 0.95, "resamples": 10_000}
ALL = "all"


@dataclass(frozen=True)
class Study:
    """N labelled questions of several data sets, K + 1 candidates each.

    Attributes:
        names: data sets, in order.
        dataset: [N] index of each question's data set.
        columns: figures of the candidates by name, arrays [N, K + 1]; NaN without.
        chosen: candidate that each selector picks, arrays [N]; -1 where it picks none.
        variants: SPS of every ablation's variant, arrays [N, K + 1].
    """

    names: list[str]
    dataset: npt.NDArray[np.intp]
    columns: dict[str, Floats]
    chosen: dict[str, npt.NDArray[np.intp]]
    variants: dict[str, Floats]

    def picked(self, name: str, metric: str) -> Floats:
        """Quality [N] of what a selector reads; NaN in data sets where it was not run."""
        quality = self.columns[metric]
        if name == "random":
            mean: Floats = quality.mean(1)
            return mean
        picks = self.chosen[name]
        values: Floats = np.where(picks >= 0, quality[np.arange(len(quality)), picks], np.nan)
        return values

    def by_variant(self, name: str, metric: str) -> Floats:
        """Quality [N] of choosing the lowest SPS of a variant."""
        picks = [lowest(row)[0] for row in self.variants[name]]
        values: Floats = self.columns[metric][np.arange(len(picks)), picks]
        return values

    def part(self, name: str) -> npt.NDArray[np.bool_]:
        """[N] questions of a data set, or all of them."""
        return np.ones(len(self.dataset), bool) if name == ALL else self.dataset == self.names.index(name)


def load(folder: Path) -> Study:
    """The published runs of one reader, those of other methods (``<data set>-<method>``) left out.

    Raises:
        UsageError: nothing is published there, or pools differ in size.
    """
    files = [path for path in sorted(folder.glob("*/numbers.parquet")) if path.parent.name not in {"mini"}]
    files = [path for path in files if "-" not in path.parent.name]
    if not files:
        raise UsageError(f"{folder} holds no <data set>/numbers.parquet; publish runs first (make publish RUN=...)")
    columns: dict[str, list[Floats]] = {}
    chosen: dict[str, list[Any]] = {name: [] for name in SELECTORS if name != "random"}
    variants: dict[str, list[Floats]] = {}
    dataset: list[int] = []
    for at, path in enumerate(files):
        table = pq.read_table(path)
        size = int(max(table["candidate"].to_pylist())) + 1
        em = np.array(table["em"].to_pylist(), float).reshape(-1, size)
        known = np.isfinite(em).all(1)
        dataset += [at] * int(known.sum())
        for name in ("em", "f1", "tokens", "nll", "longppl", "sps", "first_token", "compressor_tokens"):
            columns.setdefault(name, []).append(np.array(table[name].to_pylist(), float).reshape(-1, size)[known])
        marks = np.array([set(names) for names in table["chosen_by"].to_pylist()], object).reshape(-1, size)
        for name, picks in chosen.items():
            hits = np.array([[name in mark for mark in row] for row in marks[known]])
            picks.append(np.where(hits.any(1), hits.argmax(1), -1))
        values = np.array(table["variants"].to_pylist(), float).reshape(*em.shape, -1)[known]
        for place, name in enumerate(json.loads(table.schema.metadata[b"variants"])):
            variants.setdefault(name, []).append(values[:, :, place])
    return Study(
        names=[path.parent.name for path in files],
        dataset=np.array(dataset),
        columns={name: np.concatenate(parts) for name, parts in columns.items()},
        chosen={name: np.concatenate(parts) for name, parts in chosen.items()},
        variants={name: np.concatenate(parts) for name, parts in variants.items() if len(parts) == len(files)},
    )


def difference(values: Floats, reference: Floats) -> dict[str, Any]:
    """A paired difference in points: value, interval, n, exact p, smallest detectable difference.

    Questions of data sets where a side was not run are left out; n counts the others.
    """
    both = np.isfinite(values) & np.isfinite(reference)
    values, reference = values[both], reference[both]
    if not len(values):
        return {"value": None, "low": None, "high": None, "n": 0, "reason": "not run", "p": None, "detectable": None}
    estimate = bootstrap_table(np.stack([reference, values], 1), reference=0, **OPTIONS)[1]
    p, least = exact_p(values, reference, OPTIONS["seed"]), minimum_detectable_difference(values - reference)
    return {**plain(estimate), "p": p, "detectable": least}


def selection(study: Study) -> list[dict[str, Any]]:
    """Every selector against CompAct, by data set and over all: EM, F1, share of the oracle's headroom."""
    rows = []
    for name in [ALL, *study.names]:
        part = study.part(name)
        for selector in ("compact", *SELECTORS):
            row: dict[str, Any] = {"dataset": name, "selector": selector}
            for metric in ("em", "f1"):
                base, best = study.columns[metric][part, 0], study.picked("oracle", metric)[part]
                own = base if selector == "compact" else study.picked(selector, metric)[part]
                run = np.isfinite(own)
                row[metric] = plain(bootstrap_table(own[run][:, None], **OPTIONS)[0])
                row[f"{metric}_difference"] = None if selector == "compact" else difference(own, base)
                share = bootstrap_ratio((own - base)[run], (best - base)[run], **OPTIONS)
                row[f"{metric}_share"] = None if selector in {"compact", "oracle"} else plain(share)
            rows.append(row)
    return rows


def comparisons(study: Study) -> list[dict[str, Any]]:
    """Lowest SPS against the other selectors (pooled and by data set)."""
    return [
        {"dataset": name, "against": other, "metric": metric, **difference(own[part], study.picked(other, metric)[part])}
        for metric in ("em", "f1")
        for own in [study.picked("lowest_sps", metric)]
        for other in ("random", "shortest", "lowest_ppl", "lowest_longppl")
        for name in [ALL, *study.names]
        for part in [study.part(name)]
    ]


def correlations(study: Study) -> list[dict[str, Any]]:
    """Metric against quality within questions, and pooled given length; SPS against PPL and LongPPL within questions."""
    rows = []
    groups = np.repeat(np.arange(len(study.dataset)), study.columns["em"].shape[1])
    for name in [ALL, *study.names]:
        part = np.repeat(study.part(name), study.columns["em"].shape[1])
        length = study.columns["tokens"].ravel()[part]
        for quality in ("em", "f1"):
            y = study.columns[quality].ravel()[part]
            for metric in METRICS:
                x = -_values(study, metric).ravel()[part]
                about = {"dataset": name, "metric": metric, "quality": quality}
                rows.append({**about, "form": "within", **plain(within_group_pearson(x, y, groups[part], **OPTIONS))})
                if metric != "tokens":
                    given = partial_pearson(x, y, length, groups[part], **OPTIONS)
                    rows.append({**about, "form": "partial", **plain(given)})
            for other in ("nll", "longppl"):
                x, rival = (-_values(study, metric).ravel()[part] for metric in ("sps", other))
                found = within_correlation_difference(x, rival, y, groups[part], **OPTIONS)
                rows.append({"dataset": name, "metric": f"sps-{other}", "quality": quality, "form": "within", **plain(found)})
    return rows


def _values(study: Study, metric: str) -> Floats:
    values = study.columns[metric]
    return np.log(values) if metric == "longppl" else np.where(values > 0, values, np.nan) if metric == "tokens" else values


def explained(study: Study) -> list[dict[str, Any]]:
    """Share of the variance of SPS (adjusted R^2) that the first token's identity explains, by variant and data set."""
    rows = []
    names = ("first_token=True", "first_token=False", "start_token=True", "subspace=q_proj", "pooling=mean")
    for variant in (name for name in names if name in study.variants):
        for name in [ALL, *study.names]:
            part = study.part(name)
            values, first = study.variants[variant][part].ravel(), study.columns["first_token"][part].ravel()
            keep = np.isfinite(values)
            share = adjusted_share(values[keep], first[keep])
            rows.append({"variant": variant, "dataset": name, "share": share, "n": int(keep.sum())})
    return rows


def variants(study: Study) -> list[dict[str, Any]]:
    """Every ablation's variant against CompAct and against a random candidate, over all data sets."""
    compact, chance = study.columns["em"][:, 0], study.columns["em"].mean(1)
    rows = []
    for name in study.variants:
        own = study.by_variant(name, "em")
        rows.append({"variant": name, "compact": difference(own, compact), "random": difference(own, chance)})
    return rows


def plain(estimate: Estimate) -> dict[str, Any]:
    """An estimate as a record: value, interval, number of questions, why there is none."""
    return {
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "n": estimate.groups if estimate.groups is not None else estimate.n,
        "reason": estimate.reason or None,
    }


def shown(found: dict[str, Any] | None, digits: int = 1, signed: bool = True) -> str:
    """``value [low, high]`` of one of the records above."""
    if found is None:
        return "-"
    values = {key: found[key] for key in ("value", "low", "high", "n")}
    return output.cell(Estimate(**values, reason=found.get("reason") or ""), signed, digits)


def study(folder: Path) -> dict[str, Any]:
    """All of it, as one record."""
    found = load(folder)
    return {
        "reader": folder.name,
        "datasets": {name: int((found.dataset == at).sum()) for at, name in enumerate(found.names)},
        "candidates": found.columns["em"].shape[1],
        "selection": selection(found),
        "comparisons": comparisons(found),
        "correlations": correlations(found),
        "explained": explained(found),
        "variants": variants(found),
    }


def markdown(record: dict[str, Any]) -> str:
    """The study's tables for people."""
    names = [*record["datasets"], ALL]
    headings = ["", *(f"{n} (n = {record['datasets'].get(n, sum(record['datasets'].values()))})" for n in names)]
    labels = {"compact": "CompAct (initial)", **SELECTORS}

    def table(rows: Sequence[dict[str, Any]], key: str, row_key: str, label: Any, digits: int = 1, signed: bool = True) -> str:
        lines, left_out = [], []
        for value in dict.fromkeys(row[row_key] for row in rows):
            by_name = {row["dataset"]: row for row in rows if row[row_key] == value}
            records = [by_name[n].get(key, by_name[n]) for n in names]
            if all(found["value"] is None for found in records):
                left_out.append(label(value))
            else:
                lines.append([label(value), *(shown(found, digits, signed) for found in records)])
        return output.markdown(headings, lines) + (f"\nNot run: {', '.join(left_out)}.\n" if left_out else "")

    chosen = record["selection"]
    differing = [row for row in chosen if row["selector"] != "compact"]
    lines = [f"# {record['reader']} on all data sets", "", (__doc__ or "").split("\n\n", 1)[1].strip().replace("\n", " "), ""]
    lines += ["## EM", "", table(chosen, "em", "selector", labels.get, signed=False)]
    lines += ["## EM minus CompAct (points)", "", table(differing, "em_difference", "selector", labels.get)]
    lines += ["## F1 minus CompAct (points)", "", table(differing, "f1_difference", "selector", labels.get)]
    shares = [row for row in differing if row["selector"] != "oracle"]
    lines += ["## Share of the oracle's headroom over CompAct (EM)", "", table(shares, "em_share", "selector", labels.get, 2)]
    for metric in ("em", "f1"):
        rows = [row for row in record["comparisons"] if row["metric"] == metric]
        lines += [f"## Lowest SPS minus ..., {metric.upper()} (points)", "", table(rows, "", "against", SELECTORS.get)]
    for quality in ("em", "f1"):
        for form in ("within", "partial"):
            rows = [row for row in record["correlations"] if (row["quality"], row["form"]) == (quality, form)]
            title = "within questions" if form == "within" else "pooled, given the summary's length"
            label = {**METRICS, "sps-nll": "SPS minus PPL", "sps-longppl": "SPS minus LongPPL"}.get
            lines += [f"## Correlation with {quality.upper()}, {title}", "", table(rows, "", "metric", label, 2)]
    lines += ["## Share of the variance of SPS explained by the first token's identity (adjusted R^2)", ""]
    cells = []
    for variant in dict.fromkeys(row["variant"] for row in record["explained"]):
        by_name = {row["dataset"]: row["share"] for row in record["explained"] if row["variant"] == variant}
        cells.append([variant, *("n/a" if by_name[n] is None else f"{by_name[n]:.3f}" for n in names)])
    lines += [output.markdown(headings, cells), "## Every SPS variant, all data sets: EM minus ... (points)", ""]
    cells = [[row["variant"], shown(row["compact"]), shown(row["random"])] for row in record["variants"]]
    lines += [output.markdown(["variant", "CompAct", "random candidate"], cells)]
    return "\n".join(lines)


def main(folder: Path) -> None:
    """Write ``study.json`` and ``study.md`` beside the data sets' folders."""
    record = study(folder)
    output.write_record(folder, "study", record, markdown(record))


if __name__ == "__main__":
    try:
        main(ROOT / "results" / (sys.argv[1] if len(sys.argv) > 1 else "smollm2_135m"))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
