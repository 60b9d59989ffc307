"""What source formats are made of: gold answers, passages and titles in every shape they are found in.

Used by :mod:`xcompress.formats`; nothing here knows which format it serves. A row that cannot be used raises
:class:`UnusableRow`, a layout that is not known a :class:`xcompress.schema.UsageError` naming the keys the row has.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from xcompress.files import decode_json, kind_of, list_of, names_of, text_of
from xcompress.schema import Passage, Question, UsageError

Row = Mapping[str, Any]

ID_KEYS = ("_id", "id", "question_id", "qid", "QuestionId")
QUESTION_KEYS = ("question", "question_text", "query", "Question")
ANSWER_KEYS = ("answer", "target", "answers", "golden_answers", "ground_truth", "answer_aliases")  # main answer first
PASSAGE_KEYS = ("ctxs", "passages", "contexts", "context", "documents", "docs", "paragraphs", "retrieval_result")
TEXT_KEYS = ("text", "contents", "paragraph_text")
# Keys that hold lists or objects in known question-only files and are no passages.
_NO_PASSAGES_IN = frozenset({"metadata", "output", "choices", "supporting_facts", "question_decomposition", "entities"})
_PASSAGE_LIKE = re.compile(r"(^|_)(ctx|context|passage|paragraph|document|doc|evidence|chunk|snippet|article)s?$", re.I)


class UnusableRow(Exception):
    """This row cannot be used, others can: it becomes a Problem."""


def gold_answers(*values: Any) -> tuple[str, ...]:
    """Gold answers of any shape as one flat tuple of texts: in the order given, each once, blank ones left out.

    A value is a text, a number (1974.0 is "1974"), None, a list of values to any depth, or an object {value, aliases},
    {Value, Aliases}, {text} or {spans, number, date}.

    Raises:
        UsageError: an object with other keys.
    """
    found: dict[str, None] = {}
    for value in values:
        if isinstance(value, Mapping):
            texts = gold_answers(*_answer_parts(value))
        else:
            texts = gold_answers(*value) if isinstance(value, list | tuple) else (text_of(value),)
        found |= dict.fromkeys(text for text in texts if text.strip())
    return tuple(found)


def _answer_parts(value: Row) -> list[Any]:
    if "spans" in value:  # as in DROP: one of the three is filled
        date = value.get("date")
        parts = [text_of(date.get(key)) for key in ("day", "month", "year")] if isinstance(date, Mapping) else []
        return [value["spans"] or value.get("number") or " ".join(part for part in parts if part)]
    known = [value[key] for key in ("value", "Value", "aliases", "Aliases", "text") if key in value]
    if not known:
        raise UsageError(f"an answer is an object in an unknown layout; its keys are {names_of(value)}")
    return known


def answers_of(row: Row) -> tuple[str, ...]:
    return gold_answers(*(row.get(key) for key in ANSWER_KEYS))


def passages_of(row: Row, key: str) -> tuple[Passage, ...]:
    entries = list_of(required(row, key), key)
    return tuple(passage_of(entry, f"passage {number} of '{key}'") for number, entry in enumerate(entries, start=1))


def passage_of(entry: Any, where: str) -> Passage:
    if isinstance(entry, str):
        return split_contents(entry)
    if not isinstance(entry, Mapping) or not any(key in entry for key in TEXT_KEYS):
        what = f"its keys are {names_of(entry)}" if isinstance(entry, Mapping) else f"it is {kind_of(entry)}"
        raise UsageError(f"{where} is in an unknown layout: {what}; known are texts and objects with {', '.join(TEXT_KEYS)}")
    key = next((key for key in TEXT_KEYS if entry.get(key) is not None), "")
    if not key:
        raise UnusableRow(f"{where} has no text (null)")
    title, text = text_of(entry.get("title")), text_of(entry[key])
    if key == "contents":
        split = split_contents(text)
        return split if not title else Passage(title, split.text if split.title == title else text)
    return Passage(title, text)


def split_contents(contents: str) -> Passage:
    """FlashRAG's ``contents``, title and text on lines of their own, taken apart; one line is text without a title.

    The titles of its Wikipedia corpus are quoted as in CSV; that is undone.
    """
    title, line_break, text = contents.partition("\n")
    if not line_break:
        return Passage("", contents)
    if re.fullmatch(r'"(?:[^"]|"")+"', title):
        title = title[1:-1].replace('""', '"')
    return Passage(title, text)


def paragraphs_of(row: Row) -> list[tuple[str, list[str]]]:
    """The (title, sentences) pairs of HotpotQA's ``context`` in any of its shapes."""
    paragraphs = []
    for number, entry in enumerate(list_of(decode_json(required(row, "context")), "context"), start=1):
        pair = entry
        if isinstance(entry, Mapping):  # "content" is FlashRAG's word for it
            pair = [entry.get("title"), entry.get("sentences", entry.get("content"))]
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], list | str):
            what = f"an object with {names_of(entry)}" if isinstance(entry, Mapping) else kind_of(entry)
            raise UsageError(f"paragraph {number} of 'context' is {what}; [title, [sentence, ...]] was expected")
        sentences = [pair[1]] if isinstance(pair[1], str) else pair[1]
        paragraphs.append((text_of(pair[0]), [text_of(sentence) for sentence in sentences]))
    return paragraphs


def multi_hop(row: Row, row_id: str, paragraphs: list[tuple[str, list[str]]], space: str, *, strip: bool) -> Question:
    joined = [(title, space.join(sentences)) for title, sentences in paragraphs]
    passages = tuple(Passage(title, text.strip() if strip else text) for title, text in joined)
    answers = gold_answers(row.get("answer"))
    return Question(row_id, question_text(row), answers, passages, fact_titles(row), kind_of_row(row))


def fact_titles(row: Row) -> tuple[str, ...]:
    facts = list_of(decode_json(row.get("supporting_facts") or []), "supporting_facts")
    titles = (fact.get("title") if isinstance(fact, Mapping) else fact for fact in facts if fact)
    return unique(title[0] if isinstance(title, list) else title for title in titles)


def with_support(row: Row, row_id: str, key: str, answers: tuple[str, ...], kind: str) -> Question:
    passages = passages_of(row, key)
    marks = [isinstance(entry, Mapping) and entry.get("is_supporting") for entry in list_of(row[key], key)]
    gold = [passage.title for passage, mark in zip(passages, marks, strict=True) if mark]
    return Question(row_id, question_text(row), answers, passages, unique(gold), kind)


def refuse_passages(row: Row, known: set[str]) -> None:
    """An error if some other key of a row that is read without passages looks as if it held them."""
    harmless = {*known, *_NO_PASSAGES_IN, *ID_KEYS}
    for key, value in row.items():
        if key in harmless or value in (None, "", [], {}):
            continue
        if isinstance(value, list | Mapping) or _PASSAGE_LIKE.search(key):
            raise UsageError(
                f"'{key}' may hold passages, but not under a known key; say columns={{passages: {key}}} to read it, or"
                " columns={passages: ''} to go without passages"
            )


def required(row: Row, key: str) -> Any:
    if key not in row:
        raise UsageError(f"there is no '{key}'")
    if row[key] is None:
        raise UnusableRow(f"'{key}' is null")
    return row[key]


def question_text(row: Row, keys: Iterable[str] = QUESTION_KEYS) -> str:
    question = first_text(row, keys)
    if not question:
        raise UnusableRow(f"no question text (the row's keys are {names_of(row)})")
    return question


def first_text(row: Row, keys: Iterable[str]) -> str:
    return next((text for text in (text_of(row.get(key)) for key in keys) if text.strip()), "")


def has_sentences(context: Any) -> bool:
    if isinstance(context, Mapping):
        return "sentences" in context
    return isinstance(context, list) and bool(context) and isinstance(context[0], list)


def check_encodable(question: Question) -> None:
    passages = [text for passage in question.passages for text in (passage.title, passage.text)]
    try:
        "".join((question.id, question.question, *question.answers, *passages, *question.gold_titles)).encode()
    except UnicodeEncodeError as error:
        raise UnusableRow("a text with half of a surrogate pair, which no UTF-8 file can hold") from error


def unique(titles: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(title for title in map(text_of, titles) if title))


def kind_of_row(row: Row) -> str:
    kind = row.get("type")
    return kind if isinstance(kind, str) else ""


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        hint = "".join(f"did you mean '{match}'? " for match in difflib.get_close_matches(name, list(known), n=1))
        raise UsageError(f"there is no {what} '{name}'; {hint}known are {', '.join(known)}")
