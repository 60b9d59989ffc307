"""Is the choice the reader's own? Two readers on the same candidates: python -m analysis.readers FIRST SECOND

Reads the published figures of both (``results/<reader>/<data set>/numbers.parquet``) alone and writes ``results/readers.md``.
If SPS says what *this* reader can use (the paper's claim), then each reader must read its own choice better than the other's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from analysis import output
from analysis.load import Floats
from analysis.stats import bootstrap_mean, within_group_pearson
from analysis.study import ALL, OPTIONS, Study, difference, load, plain, shown
from xcompress.config import ROOT
from xcompress.schema import UsageError
from xcompress.selectors import lowest

SCORES = {
    "sps": "SPS",
    "first_token=False": "SPS, first token left out",
    "start_token=True": "SPS, after the start token",
    "nll": "PPL",
    "em": "EM",
    "f1": "F1",
}
CHOICES = {"lowest_sps": "lowest SPS", "lowest_ppl": "lowest PPL", "oracle": "oracle"}


@dataclass(frozen=True)
class Pair:
    """The figures of two readers, question by question and candidate by candidate the same.

    Attributes:
        names: of the readers.
        studies: theirs, cut to the N questions that both have.
    """

    names: tuple[str, str]
    studies: tuple[Study, Study]


def pair(first: Path, second: Path) -> Pair:
    """The published runs of two readers.

    Raises:
        UsageError: a reader has nothing published, they share no data set, or their candidates are not the same ones.
    """
    folders = (first, second)
    studies = tuple(load(folder) for folder in folders)
    shared = [name for name in studies[0].names if name in studies[1].names]
    if not shared:
        raise UsageError(f"{first.name} and {second.name} have no data set in common; publish runs of both first")
    for name in shared:
        pools = [json.loads((folder / name / "provenance.json").read_text(encoding="utf-8"))["shards"] for folder in folders]
        if not set(pools[0]["candidates"]) & set(pools[1]["candidates"]):
            raise UsageError(
                f"{first.name} and {second.name} read different candidates of {name}; run both readers with the same"
                " compressor, seed and data, and publish both again"
            )
    keys = [_keys(folder, study) for folder, study in zip(folders, studies, strict=True)]
    both = [key for key in keys[0] if key in keys[1] and key[0] in shared]
    return Pair((first.name, second.name), (_cut(studies[0], keys[0], both, shared), _cut(studies[1], keys[1], both, shared)))


def _keys(folder: Path, study: Study) -> dict[tuple[str, str], int]:
    """Data set and id of each labelled question: its place."""
    found: dict[tuple[str, str], int] = {}
    for name in study.names:
        table = pq.read_table(folder / name / "numbers.parquet", columns=["question_id", "candidate", "em"]).to_pylist()
        for row in table:
            if row["candidate"] == 0 and row["em"] is not None:
                found[name, row["question_id"]] = len(found)
    return found


def _cut(study: Study, places: Mapping[tuple[str, str], int], keys: Sequence[tuple[str, str]], names: list[str]) -> Study:
    rows = np.array([places[key] for key in keys])

    def of(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: array[rows] for name, array in values.items()}

    dataset = np.array([names.index(name) for name, _ in keys])
    return Study(names, dataset, of(study.columns), of(study.chosen), of(study.variants))


def _score(study: Study, name: str) -> Floats | None:
    return study.columns[name] if name in study.columns else study.variants.get(name)


def _scores(both: Pair, name: str) -> tuple[Floats, Floats] | None:
    """A score under each reader, arrays [N, K + 1]. A reader without start token has one rule for it: its plain SPS."""
    found = [_score(study, name) for study in both.studies]
    if name == "start_token=True":
        if found[0] is None and found[1] is None:
            return None
        found = [_score(study, "sps") if values is None else values for study, values in zip(both.studies, found, strict=True)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def agreement(both: Pair) -> list[dict[str, Any]]:
    """Of each score: do the readers prefer the same candidate, and do they order a question's candidates alike?

    Share of questions with the same choice (of a blind one: 1 / (K + 1), or more where candidates are equal), and correlation
    within questions of one reader's score with the other's.
    """
    rows = []
    for name in SCORES:
        scores = _scores(both, name)
        if scores is None:
            continue
        quality = name in {"em", "f1"}
        picks = None if quality else [np.array([lowest(row)[0] for row in values]) for values in scores]
        for dataset in [ALL, *both.studies[0].names]:
            part = both.studies[0].part(dataset)
            groups = np.repeat(np.arange(part.sum()), scores[0].shape[1])
            r = within_group_pearson(scores[0][part].ravel(), scores[1][part].ravel(), groups, **OPTIONS)
            same = None if picks is None else plain(bootstrap_mean((picks[0] == picks[1])[part] * 100.0, **OPTIONS))
            rows.append({"dataset": dataset, "score": name, "same": same, "r": plain(r)})
    return rows


def exchanged(both: Pair) -> list[dict[str, Any]]:
    """Each reader on its own choice minus the same reader on the other's choice: EM and F1, paired."""
    rows = []
    for at, reader in enumerate(both.names):
        own, other = both.studies[at], both.studies[1 - at]
        for choice in CHOICES:
            for metric in ("em", "f1"):
                mine, theirs = own.picked(choice, metric), _read(own, other.chosen[choice], metric)
                for dataset in [ALL, *own.names]:
                    part = own.part(dataset)
                    found = difference(mine[part], theirs[part])
                    rows.append({"reader": reader, "dataset": dataset, "choice": choice, "metric": metric, **found})
    return rows


def _read(study: Study, picks: npt.NDArray[np.intp], metric: str) -> Floats:
    values: Floats = np.where(picks >= 0, study.columns[metric][np.arange(len(picks)), picks], np.nan)
    return values


def compare(first: Path, second: Path) -> dict[str, Any]:
    """All of it, as one record."""
    both = pair(first, second)
    study = both.studies[0]
    return {
        "readers": list(both.names),
        "datasets": {name: int((study.dataset == at).sum()) for at, name in enumerate(study.names)},
        "candidates": study.columns["em"].shape[1],
        "agreement": agreement(both),
        "exchanged": exchanged(both),
    }


def markdown(record: dict[str, Any]) -> str:
    """The tables for people."""
    names = [ALL, *record["datasets"]]
    headings = ["", *(f"{n} (n = {record['datasets'].get(n, sum(record['datasets'].values()))})" for n in names)]
    first, second = record["readers"]
    chance = 100 / record["candidates"]
    lines = [
        f"# {first} and {second} on the same candidates",
        "",
        (__doc__ or "").split("\n\n", 1)[1].strip().replace("\n", " "),
    ]

    def table(rows: Sequence[dict[str, Any]], label: Any, value: Any) -> str:
        cells = []
        for key in dict.fromkeys(label(row) for row in rows):
            by_name = {row["dataset"]: row for row in rows if label(row) == key}
            cells.append([key, *(value(by_name[n]) for n in names)])
        return output.markdown(headings, cells)

    def score(row: dict[str, Any]) -> str:
        return SCORES[str(row["score"])]

    chosen = [row for row in record["agreement"] if row["same"] is not None]
    lines += ["", f"## Same choice by the lowest score (% of questions; blind choices: {chance:.1f})", ""]
    lines += [table(chosen, score, lambda row: shown(row["same"], signed=False))]
    lines += ["## Correlation within questions of one reader's score with the other's", ""]
    lines += [table(record["agreement"], score, lambda row: shown(row["r"], 2))]
    for metric in ("em", "f1"):
        rows = [row for row in record["exchanged"] if row["metric"] == metric]
        lines += [f"## A reader on its own choice minus the same reader on the other's choice, {metric.upper()} (points)", ""]
        lines += [table(rows, lambda row: f"{row['reader']}, {CHOICES[row['choice']]}", shown)]
    return "\n".join(lines)


def main(results: Path, first: str, second: str) -> None:
    """Write ``readers.json`` and ``readers.md`` below ``results``."""
    record = compare(results / first, results / second)
    output.write_record(results, "readers", record, markdown(record))


if __name__ == "__main__":
    try:
        main(ROOT / "results", *(sys.argv[1:3] if len(sys.argv) > 2 else ("smollm2_135m", "gemma3_270m")))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
