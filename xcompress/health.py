"""What a set of questions is like, counted while it streams by: everything odd, missing, repeated or left out.

The counts are stored beside the questions and shown by the data doctor (:mod:`xcompress.doctor`). Memory does not grow with the
number of questions but for 8 bytes each (to find repeated ones) and the list of rows that cannot be used.
"""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b
from typing import Any

from xcompress.answers import containment, f1, normalize, self_check
from xcompress.formats import Problem
from xcompress.schema import Question

VERSION = 2  # of the report; an older stored one is made anew from the stored questions
DEPTHS = (1, 5, 10, 20, 30, 50, 100)  # k of "found among the first k passages"
_EXAMPLES = 5
_YES_NO = frozenset({"yes", "no"})
_HTML = re.compile(
    r"</?(?:a|b|br|div|em|h[1-6]|i|li|ol|p|ref|span|strong|sub|sup|table|td|th|tr|ul)(?:\s[^<>]*)?/?>"
    r"|&(?:amp|apos|gt|lt|nbsp|quot|#\d{1,6}|#x[0-9a-f]{1,5});",
    re.IGNORECASE,
)


class Health:
    """Counts over the questions of one split.

    Args:
        wanted_passages: how many passages a question were asked for.
    """

    def __init__(self, wanted_passages: int) -> None:
        self.wanted = wanted_passages
        self.problems: list[dict[str, Any]] = []
        self._count: Counter[str] = Counter()
        self._answers: Counter[int] = Counter()
        self._passages: Counter[int] = Counter()
        self._kinds: Counter[str] = Counter()
        self._title_rank: dict[int, float] = {}  # rank from 1: share of a question's gold titles that stand there first
        self._answer_rank: Counter[int] = Counter()
        self._seen: set[int] = set()
        self._examples: dict[str, list[str]] = {}

    def problem(self, problem: Problem) -> None:
        """A row that cannot be used."""
        line = {} if problem.line in (None, problem.position) else {"line": problem.line}
        self.problems.append({"position": problem.position, **line, "reason": problem.reason})

    def add(self, question: Question, left_out: int = 0) -> None:
        """A question in its final form; ``left_out`` of its passages were beyond the number asked for."""
        count, passages = self._count, question.passages
        count["questions"] += 1
        self._passages[len(passages)] += 1
        self._answers[len(question.answers)] += 1
        self._kinds[question.kind] += 1
        self._note("passages_left_out", question, left_out)
        count["questions_with_passages_left_out"] += bool(left_out)
        self._note("empty_passages", question, sum(not p.text.strip() for p in passages))
        self._note("passages_without_title", question, sum(not p.title.strip() for p in passages))
        self._note("repeated_passages", question, len(passages) - len(set(passages)))
        self._note("passages_with_html", question, sum(bool(_HTML.search(p.text) or _HTML.search(p.title)) for p in passages))
        self._note("passages_with_replacement_characters", question, sum("\ufffd" in p.text for p in passages))
        words = [len(p.text.split()) for p in passages]
        count["words"] += sum(words)
        count["longest_passage_words"] = max([count["longest_passage_words"], *words])
        key = int.from_bytes(question_key(question.question), "big")
        self._note("repeated_questions", question, int(key in self._seen))
        self._seen.add(key)
        self._evidence(question)

    def _evidence(self, question: Question) -> None:
        count, passages = self._count, question.passages
        if question.gold_titles:
            count["with_gold_titles"] += 1
            titles = [p.title for p in passages]
            ranks = [titles.index(title) + 1 for title in question.gold_titles if title in titles]
            for rank in ranks:
                self._title_rank[rank] = self._title_rank.get(rank, 0.0) + 1 / len(question.gold_titles)
            count["all_gold_titles_retrieved"] += len(ranks) == len(question.gold_titles)
            self._note("without_any_gold_title", question, int(not ranks))
        if not question.answers:
            self._note("unlabelled", question, 1)
            return
        count["labelled"] += 1
        yes_no = question.answers[0].strip().lower() in _YES_NO
        count["yes_no"] += yes_no
        self._note("golds_not_matching_themselves", question, len(self_check(question.answers, metric=f1)))
        golds = [gold for gold in question.answers if normalize(gold)]
        place = (at for at, p in enumerate(passages, start=1) if golds and containment(f"{p.title} {p.text}", golds))
        if (found := next(place, 0)) > 0:
            self._answer_rank[found] += 1
            count["answer_string_in_passages"] += 1
            count["answer_string_in_passages_yes_no"] += yes_no
        elif not yes_no:
            self._note("without_answer_string", question, 1)

    def _note(self, what: str, question: Question, number: int) -> None:
        self._count[what] += number
        if number:
            examples = self._examples.setdefault(what, [])
            if len(examples) < _EXAMPLES:
                examples.append(question.id)

    def report(self) -> dict[str, Any]:
        """The counts as JSON-able values; every count says by its neighbours what it is out of."""
        count = self._count
        fewer = sum(times for number, times in self._passages.items() if number < self.wanted)
        passages = sum(number * times for number, times in self._passages.items())
        most = max(self._passages, default=0)
        depths = [depth for depth in DEPTHS if depth < most] + ([most] if most else [])
        at_k = {
            str(k): {
                "gold_titles": _share(sum(v for r, v in self._title_rank.items() if r <= k), count["with_gold_titles"]),
                "answer_string": _share(sum(n for r, n in self._answer_rank.items() if r <= k), count["labelled"]),
            }
            for k in depths
        }
        return {
            "version": VERSION,
            "questions": count["questions"],
            "unusable_rows": self.problems,
            "golds_not_matching_themselves": count["golds_not_matching_themselves"],
            "unlabelled": count["unlabelled"],
            "labelled": count["labelled"],
            "yes_no": count["yes_no"],
            "answers_per_question": _histogram(self._answers),
            "kinds": {kind: self._kinds[kind] for kind in sorted(self._kinds) if kind},
            "repeated_questions": count["repeated_questions"],
            "passages": passages,
            "passages_per_question": _histogram(self._passages),
            "passages_asked_for": self.wanted,
            "fewer_passages_than_asked": fewer,
            "passages_left_out": count["passages_left_out"],
            "questions_with_passages_left_out": count["questions_with_passages_left_out"],
            "words_per_passage": {"mean": _share(count["words"], passages), "longest": count["longest_passage_words"]},
            "empty_passages": count["empty_passages"],
            "passages_without_title": count["passages_without_title"],
            "repeated_passages": count["repeated_passages"],
            "passages_with_html": count["passages_with_html"],
            "passages_with_replacement_characters": count["passages_with_replacement_characters"],
            "with_gold_titles": count["with_gold_titles"],
            "all_gold_titles_retrieved": count["all_gold_titles_retrieved"],
            "without_any_gold_title": count["without_any_gold_title"],
            "answer_string_in_passages": count["answer_string_in_passages"],
            "answer_string_in_passages_yes_no": count["answer_string_in_passages_yes_no"],
            "at_k": at_k,
            "examples": self._examples,
        }


def question_key(text: str) -> bytes:
    """8 bytes that two questions share if they differ in letter case and white space at most."""
    return blake2b(" ".join(text.lower().split()).encode(), digest_size=8).digest()


def _histogram(counts: Counter[int]) -> dict[str, int]:
    return {str(number): counts[number] for number in sorted(counts)}


def _share(part: float, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
