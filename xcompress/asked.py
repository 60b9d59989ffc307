"""What the controller is asked: questions and passages in the forms that pipelines have them, as the stages' own types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xcompress.layouts import UnusableRow, passage_of
from xcompress.schema import Passage, Question, UsageError
from xcompress.store import digest

PassageLike = Passage | str | tuple[str, str] | Mapping[str, Any]
"""A passage: its text, (title, text), or a mapping with ``text`` or ``contents`` and perhaps ``title``."""
Asked = Question | tuple[str, Sequence[PassageLike]]
"""A question with its passages."""


def as_question(item: Asked) -> Question:
    """A question with its passages; one without an id gets it from its content, so that its summaries repeat.

    Raises:
        UsageError: a blank question, no passages, or a passage of no known kind.
    """
    if isinstance(item, Question):
        question = item
    else:
        text, passages = item
        if isinstance(passages, str | Passage | Mapping):
            raise UsageError("passages is a single one; give a list")
        found = tuple(_passage(passage, number) for number, passage in enumerate(passages, start=1))
        if not isinstance(text, str):
            raise UsageError(f"the question is a {type(text).__name__}, not a text")
        question = Question(digest([text, [[p.title, p.text] for p in found]]), text, passages=found)
    if not question.question.strip():
        raise UsageError("the question is blank")
    if not any(passage.text.strip() for passage in question.passages):
        what = "no passage has text" if question.passages else "there are no passages to compress"
        raise UsageError(f"question {question.question[:60]!r}: {what}")
    return question


def _passage(passage: PassageLike, number: int) -> Passage:
    if isinstance(passage, Passage):
        return passage
    if isinstance(passage, tuple | list):
        if len(passage) != 2 or not all(isinstance(part, str) for part in passage):
            raise UsageError(f"passage {number} is a {type(passage).__name__}; as such it must be (title, text)")
        return Passage(*passage)
    try:
        return passage_of(passage, f"passage {number}")
    except UnusableRow as error:
        raise UsageError(str(error)) from None


def distinct(questions: Iterable[Asked]) -> list[Question]:
    """Each question once (equal ones share their result); two different ones with one id cannot be told apart."""
    found: dict[str, Question] = {}
    for question in map(as_question, questions):
        if found.setdefault(question.id, question) != question:
            raise UsageError(f"two different questions have the id {question.id!r}")
    return list(found.values())
