"""What the page's question browser holds: one record a question, compact, compressed, bounded in size.

The record goes into the page as gzip in base64, which no text of a data set or a model can break out of.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Record = dict[str, Any]
BUDGET = 12_000_000  # bytes of compressed data in one page, so that it opens at once and can be sent by mail

# What the filters mean. The order is the page's; each holds of a question or does not, and several can be asked for together.
FLAGS = {
    "rescued": ("rescued by SPS", "the lowest-SPS summary is answered right (EM), the initial one wrong"),
    "harmed": ("harmed by SPS", "the initial summary is answered right (EM), the lowest-SPS one wrong"),
    "missed": ("missed by SPS", "some candidate is answered right, the lowest-SPS one wrong"),
    "all_wrong": ("all wrong", "no candidate is answered right"),
    "all_right": ("all right", "every candidate is answered right"),
    "gate_skipped": ("gate skipped", "the gate keeps the initial summary: nothing is sampled"),
    "cut_off": ("cut off", "a summary or an answer of the pool ended at the token limit"),
    "blank": ("blank", "a candidate has no text"),
    "unlabelled": ("no gold answer", "read, but in no mean"),
}


@dataclass(frozen=True)
class Browser:
    """The data of one page.

    Attributes:
        data: base64 of the gzipped JSON.
        held, all: questions in the page, questions of the run (fewer are held only where the size limit asks for it).
        flags: name, label, meaning and count of each filter that holds of some question in the page.
    """

    data: str
    held: int
    all: int
    flags: list[dict[str, Any]]


def load(folder: Path, labels: Mapping[str, str]) -> Browser | None:
    """The browser's data from a tables folder, or None where it was made before there was a browser."""
    if not (folder / "questions.parquet").is_file() or not (folder / "candidates.parquet").is_file():
        return None
    questions = records(folder)
    held = len(questions)
    data = _pack(questions, labels)
    while len(data) > BUDGET and held > 1:
        held = max(1, min(held - 1, int(held * BUDGET / len(data) * 0.97)))
        data = _pack(questions[:held], labels)
    counts = {name: sum(name in question["f"] for question in questions[:held]) for name in FLAGS}
    shown = [
        {"name": name, "label": label, "meaning": meaning, "count": counts[name]}
        for name, (label, meaning) in FLAGS.items()
        if counts[name] or name not in {"blank", "unlabelled"}
    ]
    return Browser(data, held, len(questions), shown)


def records(folder: Path) -> list[Record]:
    """One record a question, in the data set's order. Short keys: they are repeated thousands of times."""
    pools: dict[str, list[Record]] = {}
    for row in pq.read_table(folder / "candidates.parquet").to_pylist():
        pools.setdefault(row["question_id"], []).append(row)
    found = []
    for row in pq.read_table(folder / "questions.parquet").to_pylist():
        pool = sorted(pools.get(row["question_id"], []), key=lambda candidate: int(candidate["candidate"]))
        gold = set(row["gold_titles"])
        found.append(
            {
                "i": row["question_id"],
                "q": row["question"],
                "a": row["answers"],
                "t": row["kind"],
                "p": [[p["title"], p["text"], int(p["title"] in gold)] for p in row["passages"]],
                "f": flags(row, pool),
                "g": [_number(row["ratio"]), row["gate_skipped"]],
                "r": [row["raw_prediction"], _number(row["raw_em"]), _number(row["raw_f1"])],
                "b": [row["closed_prediction"], _number(row["closed_em"]), _number(row["closed_f1"])],
                "c": [_candidate(candidate) for candidate in pool],
            }
        )
        if row["stepwise_summary"] is not None:
            answer = [row["stepwise_prediction"] or "", _number(row["stepwise_em"]), _number(row["stepwise_f1"])]
            found[-1]["z"] = [row["stepwise_summary"], *answer]
    return found


def _candidate(row: Record) -> Record:
    return {
        "s": row["summary"],
        "y": row["prediction"],
        "e": _number(row["em"]),
        "f": _number(row["f1"]),
        "m": [_number(row[name]) for name in ("sps", "ppl", "longppl", "tokens")],
        "w": row["chosen_by"],
        "o": [row["rounds"], row["rounds_cut"], int(row["answer_cut"])],
    }


def flags(question: Mapping[str, Any], pool: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which of :data:`FLAGS` hold of a question (rows of ``questions.parquet`` and ``candidates.parquet``)."""
    right = [row["em"] is not None and row["em"] == 100 for row in pool]
    holds = {
        "gate_skipped": bool(question["gate_skipped"]),
        "cut_off": any(row["rounds_cut"] or row["answer_cut"] for row in pool),
        "blank": any(not row["summary"].strip() for row in pool),
        "unlabelled": not question["answers"],
    }
    if question["answers"] and pool:
        chosen = next((at for at, row in enumerate(pool) if "lowest_sps" in row["chosen_by"]), 0)
        holds |= {
            "rescued": right[chosen] and not right[0],
            "harmed": right[0] and not right[chosen],
            "missed": any(right) and not right[chosen],
            "all_wrong": not any(right),
            "all_right": all(right),
        }
    return [name for name in FLAGS if holds.get(name)]


def _number(value: Any) -> float | None:
    """Six figures are more than is shown; infinity (an overflowing perplexity) is no JSON and has no place on a scale."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _pack(questions: Sequence[Record], labels: Mapping[str, str]) -> str:
    content = {"labels": dict(labels), "questions": list(questions)}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
