"""read: the reader answers from every distinct candidate once, from the raw passages, and from nothing (closed book)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xcompress.engines.base import Draw, Engine, Progress, Request, naming
from xcompress.prompts import Fitted, Template, chat_ids, fill, fit, format_passages
from xcompress.schema import Passage, Question, UsageError
from xcompress.settings import ReaderSettings

VERSION = 1  # raise when the rows of this stage change


class QuestionReader:
    """A reader LM with its few-shot prompt. Greedy; the answer is the first line."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        template: Template,
        demos: Sequence[tuple[str, str]],
        settings: ReaderSettings,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.settings = settings
        self.demos = "\n\n".join(fill(template["demo"], question=question, answer=answer) for question, answer in demos)

    def prompt(self, question: Question, context: str | None) -> tuple[int, ...]:
        """Token ids of the reading prompt; ``context`` None is closed book."""
        part = "closed_book" if context is None else "with_context"
        user = fill(self.template[part], demos=self.demos, context=context or "", question=question.question)
        return chat_ids(self.tokenizer, self.template["system"], user, self.settings.chat)

    def fit_passages(self, question: Question) -> Fitted:
        """The prompt over the raw passages; whole passages are left out from the end where they do not fit."""
        budget = self.engine.max_context - self.settings.max_new_tokens

        def build(passages: Sequence[Passage]) -> tuple[int, ...]:
            return self.prompt(question, format_passages(self.template, passages))

        try:
            return fit(build, question.passages, budget)
        except UsageError as error:
            raise UsageError(f"question {question.id!r}: {error}") from None

    def fit_summary(self, question: Question, summary: str) -> Fitted:
        """The prompt over a summary; one too long for the reader loses words from its end, and is counted."""
        budget = self.engine.max_context - self.settings.max_new_tokens

        def build(passages: Sequence[Passage]) -> tuple[int, ...]:
            return self.prompt(question, passages[0].text)

        try:
            return fit(build, [Passage("", summary)], budget)
        except UsageError as error:
            raise UsageError(f"question {question.id!r}: {error}") from None

    def read(
        self, questions: Sequence[Question], candidates: Sequence[dict[str, Any]], progress: Progress | None = None
    ) -> list[dict[str, Any]]:
        """Rows of :data:`xcompress.schema.ANSWERS`: per question raw passages, closed book, then its candidates.

        Equal summaries of a question are read once and the answer is copied.
        """
        prompts: list[Fitted] = []
        places: list[tuple[str, str, int | None, int]] = []  # question id, source, candidate, index into prompts
        by_question: dict[str, list[dict[str, Any]]] = {}
        for row in candidates:
            by_question.setdefault(row["question_id"], []).append(row)
        for question in questions:
            prompts += [self.fit_passages(question), Fitted(self.prompt(question, None))]
            places.append((question.id, "raw_passages", None, len(prompts) - 2))
            places.append((question.id, "closed_book", None, len(prompts) - 1))
            known: dict[str, int] = {}
            for row in by_question.get(question.id, ()):
                if row["summary"] not in known:
                    known[row["summary"]] = len(prompts)
                    prompts.append(self.fit_summary(question, row["summary"]))
                places.append((question.id, "candidate", row["candidate"], known[row["summary"]]))
        owners = {at: question_id for question_id, _, _, at in places}
        with naming([owners[at] for at in range(len(prompts))]):
            answers = self.answer(prompts, progress)
        return [
            {"question_id": question_id, "source": source, "candidate": candidate, **answers[at]}
            for question_id, source, candidate, at in places
        ]

    def read_chosen(
        self,
        questions: Sequence[Question],
        chosen: Sequence[dict[str, Any]],
        candidates: Sequence[dict[str, Any]],
        answers: Sequence[dict[str, Any]],
        progress: Progress | None = None,
    ) -> list[dict[str, Any]]:
        """Rows of :data:`xcompress.schema.ANSWERS` for one more summary a question.

        Args:
            questions: with the summaries' questions among them.
            chosen: rows with ``question_id`` and ``summary``, in the order of the result.
            candidates: the pool; a summary that is in it is not read again, its answer is copied.
            answers: the answers to the pool.
            progress: called with the number of tokens just drawn.
        """
        by_place = {(a["question_id"], a["candidate"]): a for a in answers if a["source"] == "candidate"}
        known = {(c["question_id"], c["summary"]): by_place[c["question_id"], c["candidate"]] for c in reversed(candidates)}
        by_id = {question.id: question for question in questions}
        fresh = [row for row in chosen if (row["question_id"], row["summary"]) not in known]
        prompts = [self.fit_summary(by_id[row["question_id"]], row["summary"]) for row in fresh]
        with naming([row["question_id"] for row in fresh]):
            found = self.answer(prompts, progress)
        for row, answer in zip(fresh, found, strict=True):
            known[row["question_id"], row["summary"]] = answer
        own = {"source": "stepwise", "candidate": None}
        return [{**known[row["question_id"], row["summary"]], "question_id": row["question_id"], **own} for row in chosen]

    def answer(self, prompts: Sequence[Fitted], progress: Progress | None) -> list[dict[str, Any]]:
        """The columns of an answer for each prompt."""
        if not prompts:
            return []
        requests = [Request(prompt.ids, (Draw(),), self.settings.max_new_tokens, stop=("\n",)) for prompt in prompts]
        generations = [result[0] for result in self.engine.generate(requests, progress)]
        return [
            {
                "prediction": generation.text.strip(),
                "prompt_tokens": len(prompt.ids),
                "new_tokens": len(generation.tokens),
                "finish_reason": generation.finish_reason,
                "passages_dropped": prompt.passages_dropped,
                "tokens_removed": prompt.tokens_removed,
                "logprob_sum": generation.logprob_sum,
            }
            for prompt, generation in zip(prompts, generations, strict=True)
        ]
