"""One row a candidate and one row a question, as Parquet: for the report's question browser and for your own analysis.

These files hold data-set and model text; they stay in the run's folder (``analysis.publish`` does not copy them).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.ablations import varied
from analysis.load import Pool
from analysis.table1 import Choice, gate_decisions
from xcompress.perplexity import perplexity
from xcompress.pipeline import Collected
from xcompress.schema import PASSAGE

CANDIDATES = pa.schema(
    [
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("answers", pa.list_(pa.string())),  # gold answers; empty: unlabelled
        ("candidate", pa.int64()),  # 0: the initial (greedy) summary; 1..K: sampled
        ("summary", pa.string()),
        ("prediction", pa.string()),  # the reader's answer from this summary
        ("em", pa.float64()),  # per cent, null where unlabelled; so are the next two
        ("f1", pa.float64()),
        ("containment", pa.float64()),
        ("tokens", pa.float64()),  # summary tokens under the reader
        ("nll", pa.float64()),  # nats a token, null without a score; so are the next five
        ("ppl", pa.float64()),
        ("longppl", pa.float64()),  # perplexity over key tokens
        ("question_nll", pa.float64()),  # minus log p(question | summary), nats a question token
        ("answer_nll", pa.float64()),  # minus the reader's log-probability of its answer, nats a token
        ("compressor_nll", pa.float64()),  # minus the compressor's log-probability of all it wrote, nats a token
        ("sps", pa.float64()),  # of the method's variant
        ("compressor_tokens", pa.float64()),
        ("rounds", pa.int64()),  # compressor rounds
        ("rounds_cut", pa.int64()),  # of which cut off at the token limit
        ("answer_cut", pa.bool_()),  # the reader's answer was cut off at the token limit
        ("first_token", pa.int64()),  # id of the summary's first token under the reader, null for a blank one
        ("chosen_by", pa.list_(pa.string())),  # methods of Table 1 that pick this candidate
        ("variants", pa.list_(pa.float32())),  # SPS of every ablation's variant; their names are the file's metadata "variants"
    ]
)

QUESTIONS = pa.schema(
    [
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("answers", pa.list_(pa.string())),
        ("kind", pa.string()),  # question type of the source, or ""
        ("passages", pa.list_(PASSAGE)),  # in retrieval order
        ("gold_titles", pa.list_(pa.string())),
        ("ratio", pa.float64()),  # concentration ratio of the initial summary
        ("gate_skipped", pa.bool_()),  # the gate keeps the initial summary; null without a calibrated gate
        ("raw_prediction", pa.string()),  # the reader's answer from the raw passages
        ("raw_em", pa.float64()),
        ("raw_f1", pa.float64()),
        ("closed_prediction", pa.string()),  # closed book
        ("closed_em", pa.float64()),
        ("closed_f1", pa.float64()),
        ("stepwise_summary", pa.string()),  # where the method chooses in every round: what it ends with, else null
        ("stepwise_prediction", pa.string()),
        ("stepwise_em", pa.float64()),
        ("stepwise_f1", pa.float64()),
    ]
)


def candidates(pool: Pool, collected: Collected, choices: Mapping[str, Choice]) -> bytes:
    """Every candidate with its scores, its answer and who chose it."""
    sps = pool.view(collected.settings.method)
    variants = {
        f"{name}={value}": pool.view(replace(collected.settings.method, **{name: value}))
        for name, values in varied(pool).items()
        for value in values
    }
    stacked = np.stack(list(variants.values()), -1)
    rounds = {(row["question_id"], row["candidate"]): row["rounds"] for row in collected.candidates}
    cut = {
        (row["question_id"], row["candidate"]): row["finish_reason"] == "length"
        for row in collected.answers
        if row["source"] == "candidate"
    }
    records = []
    for at, question in enumerate(pool.questions):
        for k, summary in enumerate(pool.summaries[at]):
            key = (question.id, k)
            written = rounds.get(key, [])
            record: dict[str, Any] = {
                "question_id": question.id,
                "question": question.question,
                "answers": list(question.answers),
                "candidate": k,
                "summary": summary,
                "prediction": pool.predictions[at][k],
                "em": _number(pool.quality.em[at, k]),
                "f1": _number(pool.quality.f1[at, k]),
                "containment": _number(pool.quality.containment[at, k]),
                "tokens": _number(pool.tokens[at, k]),
                "nll": _number(pool.nll[at, k]),
                "ppl": _perplexity(pool.nll[at, k]),
                "longppl": _perplexity(pool.longppl[at, k]),
                "question_nll": _number(pool.question_nll[at, k]),
                "answer_nll": _number(pool.answer_nll[at, k]),
                "compressor_nll": _number(pool.compressor_nll[at, k]),
                "sps": _number(sps[at, k]),
                "compressor_tokens": _number(pool.compressor_tokens[at, k]),
                "rounds": len(written),
                "rounds_cut": sum(round_["finish_reason"] == "length" for round_ in written),
                "answer_cut": cut.get(key, False),
            }
            chosen = [name for name, choice in choices.items() if choice.picks is not None and choice.picks[at] == k]
            record["first_token"] = None if np.isnan(pool.first_token[at, k]) else int(pool.first_token[at, k])
            numbers = [_number(value) for value in stacked[at, k]]
            records.append({**record, "chosen_by": chosen, "variants": numbers})
    return _parquet(records, CANDIDATES.with_metadata({"variants": json.dumps(list(variants))}))


def questions(pool: Pool, collected: Collected) -> bytes:
    """Every question with its passages, the gate's decision, and what the reader says without a summary."""
    method = collected.settings.method
    skips = gate_decisions(pool, method) if method.gate != "none" else None
    if method.policy == "stepwise":
        skips = ~pool.stepwise.drawn if pool.stepwise else None
    ratios = pool.initial_ratio(method)
    stepwise = _stepwise(pool, collected)
    said = {(row["question_id"], row["source"]): row["prediction"] for row in collected.answers if row["source"] != "candidate"}
    records = [
        {
            "question_id": question.id,
            "question": question.question,
            "answers": list(question.answers),
            "kind": question.kind,
            "passages": [{"title": passage.title, "text": passage.text} for passage in question.passages],
            "gold_titles": list(question.gold_titles),
            "ratio": _number(ratios[at]),
            "gate_skipped": None if skips is None else bool(skips[at]),
            "raw_prediction": said.get((question.id, "raw_passages"), ""),
            "raw_em": _number(pool.raw.em[at]),
            "raw_f1": _number(pool.raw.f1[at]),
            "closed_prediction": said.get((question.id, "closed_book"), ""),
            "closed_em": _number(pool.closed.em[at]),
            "closed_f1": _number(pool.closed.f1[at]),
            **stepwise[at],
        }
        for at, question in enumerate(pool.questions)
    ]
    return _parquet(records, QUESTIONS)


def _stepwise(pool: Pool, collected: Collected) -> list[dict[str, Any]]:
    """Columns of the summary that a stepwise method ends with, a question; none where the method chooses from the pool."""
    if pool.stepwise is None:
        return [{} for _ in pool.questions]
    summaries = {row["question_id"]: row["summary"] for row in collected.stepwise}
    said = {row["question_id"]: row["prediction"] for row in collected.stepwise_answers}
    quality = pool.stepwise.quality
    return [
        {
            "stepwise_summary": summaries.get(question.id),
            "stepwise_prediction": said.get(question.id),
            "stepwise_em": _number(quality.em[at]),
            "stepwise_f1": _number(quality.f1[at]),
        }
        for at, question in enumerate(pool.questions)
    ]


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _perplexity(nll: Any) -> float | None:
    return perplexity(float(nll)) if np.isfinite(nll) else None


def _parquet(records: Sequence[Mapping[str, Any]], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([dict(record) for record in records], schema=schema), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data
