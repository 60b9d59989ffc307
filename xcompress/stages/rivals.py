"""rivals: what else could choose a summary, from one more pass each (part of the scoring stage).

* LongPPL (Fang et al., arXiv 2410.23771): log-probabilities of the summary's tokens after a long context, here the passages
  and the question, against those of the summary alone. Token values are stored, so its thresholds are set in the analysis.
* Question likelihood: log p(question | summary) under the reader.

Contexts that candidates share (a question's passages) are computed once by the engine. Each row says how many tokens it took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xcompress.engines.base import Engine, Progress, naming
from xcompress.prompts import Template, encode, fit, format_passages
from xcompress.schema import Passage, Question

VERSION = 1  # raise when the rows of this stage change


class RivalScorer:
    """Scores of candidates that need the question or its passages, under the reader."""

    def __init__(self, engine: Engine, tokenizer: Any, template: Template) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template

    def score(
        self, questions: Sequence[Question], candidates: Sequence[dict[str, Any]], progress: Progress | None = None
    ) -> list[dict[str, Any]]:
        """Rows of :data:`xcompress.schema.RIVALS`, one for each candidate row, in order; equal texts are scored once."""
        by_id = {question.id: question for question in questions}
        distinct = list(dict.fromkeys((row["question_id"], row["summary"]) for row in candidates))
        summaries = {text: tuple(encode(self.tokenizer, text, start=False)) for _, text in distinct}
        usable = [(name, text) for name, text in distinct if text.strip() and summaries[text]]
        results = {pair: self._empty() for pair in distinct}
        if usable:
            for pair, found in zip(usable, self._all(by_id, usable, summaries, progress), strict=True):
                results[pair] = found
        return [
            {
                "question_id": row["question_id"],
                "candidate": row["candidate"],
                **results[row["question_id"], row["summary"]],
            }
            for row in candidates
        ]

    def _all(
        self,
        by_id: dict[str, Question],
        usable: Sequence[tuple[str, str]],
        summaries: dict[str, tuple[int, ...]],
        progress: Progress | None,
    ) -> list[dict[str, Any]]:
        pairs: list[tuple[Sequence[int], Sequence[int]]] = []
        longest = max(len(summaries[text]) for _, text in usable)
        long = {name: self._long(by_id[name], longest) for name in dict.fromkeys(name for name, _ in usable)}
        start = tuple(encode(self.tokenizer, ""))
        lead = tuple(encode(self.tokenizer, "\nQuestion:", start=False))
        for name, text in usable:
            question = tuple(encode(self.tokenizer, f" {by_id[name].question}", start=False))
            pairs += [(long[name][0], summaries[text]), ((*start, *summaries[text], *lead), question)]
        with naming([name for name, _ in usable for _ in range(2)]):
            logprobs = self.engine.token_logprobs(pairs)
        rows = []
        for at, (name, _) in enumerate(usable):
            given, asked = logprobs[2 * at], logprobs[2 * at + 1]
            if progress is not None:
                progress(len(given) + len(asked))
            rows.append(
                {
                    "long_logprobs": given,
                    "question_logprob_sum": math.fsum(asked),
                    "question_tokens": len(asked),
                    "context_tokens": len(long[name][0]),
                    "context_tokens_removed": long[name][1],
                    "longppl_forward_tokens": len(long[name][0]) + 2 * len(given),
                    "question_forward_tokens": len(pairs[2 * at + 1][0]) + len(asked),
                }
            )
        return rows

    def _long(self, question: Question, longest: int) -> tuple[tuple[int, ...], int]:
        """Token ids of passages and question, and how many tokens of passage text were left out to fit."""

        def build(passages: Sequence[Passage]) -> tuple[int, ...]:
            text = f"{format_passages(self.template, passages)}\n\nQuestion: {question.question}\n\n"
            return tuple(encode(self.tokenizer, text))

        fitted = fit(build, question.passages, self.engine.max_context - longest)
        return fitted.ids, fitted.tokens_removed

    @staticmethod
    def _empty() -> dict[str, Any]:
        return {
            "long_logprobs": None,
            "question_logprob_sum": None,
            "question_tokens": 0,
            "context_tokens": 0,
            "context_tokens_removed": 0,
            "longppl_forward_tokens": 0,
            "question_forward_tokens": 0,
        }
