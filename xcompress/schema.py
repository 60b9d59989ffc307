"""The rows that pass between the stages, column by column, and their validation.

Stages meet only in files (Parquet shards). The schemas below are the whole contract between them; every column has one
sentence. ``Question`` and ``Passage`` are the only row types that code handles as objects, since every source format is turned
into them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa


class UsageError(Exception):
    """Something the user can mend: a wrong file, row, key or setting, said in one clear sentence (no traceback is shown)."""


@dataclass(frozen=True)
class Passage:
    """A retrieved text with a title (the title may be empty)."""

    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """One question of a data set in the form every stage uses.

    Attributes:
        id: unique within its file, always text.
        question: the question as it stands in the source.
        answers: gold answers, main answer first, then aliases; empty means *unlabelled* (never scored, always counted).
        passages: in the source's (retrieval) order.
        gold_titles: titles of the passages that hold the evidence, each once, where the source says so.
        kind: the source's question type ("bridge", "comparison", ...), or "" where it has none.
    """

    id: str
    question: str
    answers: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()
    gold_titles: tuple[str, ...] = field(default=())
    kind: str = ""


PASSAGE = pa.struct([("title", pa.string()), ("text", pa.string())])

QUESTIONS = pa.schema(
    [
        ("id", pa.string()),  # unique in the data set
        ("question", pa.string()),  # as it stands in the source
        ("answers", pa.list_(pa.string())),  # gold answers, main one first; empty: unlabelled
        ("passages", pa.list_(PASSAGE)),  # in retrieval order
        ("gold_titles", pa.list_(pa.string())),  # titles that hold the evidence, where known
        ("kind", pa.string()),  # question type of the source, or ""
    ]
)

ROUND = pa.struct(
    [
        ("round", pa.int16()),  # 1, 2, ...
        ("prompt_tokens", pa.int32()),  # length of the prompt, start token included
        ("new_tokens", pa.int32()),  # tokens generated
        ("finish_reason", pa.string()),  # "stop" or "length" (cut off at the limit)
        ("text", pa.string()),  # raw output
        ("summary", pa.string()),  # the summary in it
        ("evaluation", pa.string()),  # the evaluation's reason without its tag
        ("verdict", pa.string()),  # "complete", "incomplete" or "missing" (counts as incomplete)
        ("passages_dropped", pa.int16()),  # whole passages left out to fit the model
        ("tokens_removed", pa.int32()),  # tokens of passage text left out, dropped passages included
        ("logprob_sum", pa.float64()),  # the compressor's own log-probability of the output, nats
    ]
)

CANDIDATES = pa.schema(
    [
        ("question_id", pa.string()),
        ("candidate", pa.int16()),  # 0: the initial (greedy) summary; 1..K: sampled
        ("summary", pa.string()),  # of the last round; "" is a blank candidate
        ("rounds", pa.list_(ROUND)),  # every round, in order
        ("compressor_tokens", pa.int64()),  # prompt and new tokens of all rounds: what this trajectory costs by itself
    ]
)

OPTION = pa.struct(
    [
        ("kind", pa.string()),  # "greedy", "sampled" or "beam"
        ("new_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
        ("summary", pa.string()),
        ("evaluation", pa.string()),
        ("verdict", pa.string()),
        ("logprob_sum", pa.float64()),
        ("sps", pa.float64()),  # of the summary, by the method's variant; null for a blank one
        ("tokens", pa.int32()),  # summary tokens under the reader
        ("shared", pa.bool_()),  # taken from the pool, whose prompt and decoding were the same
    ]
)

STEP = pa.struct(
    [
        ("round", pa.int16()),
        ("prompt_tokens", pa.int32()),
        ("passages_dropped", pa.int16()),
        ("tokens_removed", pa.int32()),
        ("ratio", pa.float64()),  # concentration ratio of the greedy output's summary; null for a blank one
        ("skipped", pa.bool_()),  # the gate kept the greedy output, nothing was sampled
        ("chosen", pa.int16()),  # index into options
        ("options", pa.list_(OPTION)),  # the greedy output first
    ]
)

STEPWISE = pa.schema(
    [
        ("question_id", pa.string()),
        ("summary", pa.string()),  # chosen in the last round
        ("steps", pa.list_(STEP)),
        ("compressor_tokens", pa.int64()),  # prompt and new tokens of every option of every round
        ("scored_tokens", pa.int64()),  # summary tokens that were scored to choose
        ("gate_pool", pa.list_(pa.float64())),  # the rolling gate's ratios after this question
    ]
)

SCORES = pa.schema(
    [
        ("question_id", pa.string()),
        ("candidate", pa.int16()),
        ("status", pa.string()),  # "ok", or why there is no score ("blank")
        ("tokens", pa.int32()),  # summary tokens under the reader, no start token
        ("nll", pa.float64()),  # mean negative log-likelihood a token, nats; null if no token is scored
        ("scored_tokens", pa.int32()),  # tokens in that mean
        ("token_logprobs", pa.list_(pa.float32())),  # of each summary token, nats; null for one without predecessor
        ("first_token", pa.int32()),  # id of the summary's first token
        ("ratio", pa.list_(pa.float32())),  # concentration ratio, axes as in axes.json: start token x first token pooled
        ("sps", pa.list_(pa.float32())),  # SPS flattened, axes as in axes.json
    ]
)

RIVALS = pa.schema(
    [
        ("question_id", pa.string()),
        ("candidate", pa.int16()),
        ("long_logprobs", pa.list_(pa.float32())),  # of each summary token after passages and question, nats
        ("question_logprob_sum", pa.float64()),  # log p(question | summary), nats
        ("question_tokens", pa.int32()),  # tokens in that sum
        ("context_tokens", pa.int32()),  # length of passages and question
        ("context_tokens_removed", pa.int32()),  # passage tokens left out to fit the reader
        ("longppl_forward_tokens", pa.int32()),  # tokens through the reader for LongPPL, context counted for each candidate
        ("question_forward_tokens", pa.int32()),  # the same for the question likelihood
    ]
)

ANSWERS = pa.schema(
    [
        ("question_id", pa.string()),
        ("source", pa.string()),  # "candidate", "raw_passages", "closed_book" or "stepwise"
        ("candidate", pa.int16()),  # null unless source is "candidate"
        ("prediction", pa.string()),  # the reader's answer: first line, ends stripped
        ("prompt_tokens", pa.int32()),
        ("new_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("passages_dropped", pa.int16()),
        ("tokens_removed", pa.int32()),
        ("logprob_sum", pa.float64()),  # the reader's log-probability of its own answer, nats
    ]
)


def to_row(question: Question) -> dict[str, object]:
    """A question as a row of :data:`QUESTIONS`."""
    return {
        "id": question.id,
        "question": question.question,
        "answers": list(question.answers),
        "passages": [{"title": p.title, "text": p.text} for p in question.passages],
        "gold_titles": list(question.gold_titles),
        "kind": question.kind,
    }


def from_row(row: dict[str, Any]) -> Question:
    """The question of a row of :data:`QUESTIONS`."""
    return Question(
        id=row["id"],
        question=row["question"],
        answers=tuple(row["answers"]),
        passages=tuple(Passage(p["title"], p["text"]) for p in row["passages"]),
        gold_titles=tuple(row["gold_titles"]),
        kind=row["kind"],
    )
