"""Source formats -> questions: one small function per format, from one row (a mapping) to one :class:`Question`.

:func:`load_questions` streams a file as questions and problems; :func:`read_questions` collects both. Three rules hold
for all formats:

- Nothing is dropped silently. A row that cannot be used is a :class:`Problem` with its position and reason.
- No empty context by default. Passages under a key or in a layout that is not known are an error naming the row and the
  keys it has; only an explicit empty list, or a format without passages, gives a question without them.
- Gold answers are one flat tuple, main answer first (:func:`gold_answers`); () means unlabelled, not wrong.

Text is taken as it stands (HTML left-overs included), except that sentences are joined and ``contents`` is split into
title and text.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from xcompress.files import (
    Record,
    cell_values,
    decode_json,
    holds_json,
    kind_of,
    list_of,
    names_of,
    read_records,
    text_of,
)
from xcompress.schema import Passage, Question, UsageError

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
Reader = Callable[[Row, str], Question | None]  # (row, id) -> question, or None for a row that was not asked for

ID_KEYS = ("_id", "id", "question_id", "qid", "QuestionId")
QUESTION_KEYS = ("question", "question_text", "query", "Question")
ANSWER_KEYS = ("answer", "target", "answers", "golden_answers", "ground_truth", "answer_aliases")  # main answer first
PASSAGE_KEYS = ("ctxs", "passages", "contexts", "context", "documents", "docs", "paragraphs", "retrieval_result")
TEXT_KEYS = ("text", "contents", "paragraph_text")
# What `columns` may name for format "table", and the names tried where it does not.
TABLE_COLUMNS = {
    "id": ID_KEYS,
    "question": QUESTION_KEYS,
    "answers": ANSWER_KEYS,
    "passages": PASSAGE_KEYS,
    "gold_titles": ("supporting_titles", "gold_titles"),
    "kind": ("type", "kind"),
}
# Keys that hold lists or objects in known question-only files and are no passages.
_NO_PASSAGES_IN = frozenset({"metadata", "output", "choices", "supporting_facts", "question_decomposition", "entities"})
# Keys that one format alone has.
_TELLING_KEYS = {"paragraphs": "musique", "positive_ctxs": "dpr_biencoder", "ctxs": "ctxs", "iterations": "compact"}
_PASSAGE_LIKE = re.compile(r"(^|_)(ctx|context|passage|paragraph|document|doc|evidence|chunk|snippet|article)s?$", re.I)


@dataclass(frozen=True)
class Problem:
    """A row that cannot be used: its position (from 1), why, and its line where rows are lines."""

    position: int
    reason: str
    line: int | None = None


@dataclass(frozen=True)
class QuestionFile:
    """A file of questions whose layout is known. Each iteration reads it anew, streaming, as questions and problems."""

    path: Path
    format: str
    columns: Mapping[str, str] | None = None
    limit: int | None = None

    def __iter__(self) -> Iterator[Question | Problem]:
        file, reader = _beir(self.path) if self.format == "beir" else (self.path, self._reader())
        id_column = (self.columns or {}).get("id")
        seen: dict[str, int] = {}
        left = self.limit
        for record in read_records(file) if left != 0 else ():
            try:
                found = _question(record, reader, id_column, seen)
            except _UnusableRow as error:
                found = Problem(record.position, str(error), record.line)
            except UsageError as error:
                raise UsageError(f"{file}, {record.where}: {error}") from error
            if found is not None:
                yield found
            if left is not None and isinstance(found, Question):
                left -= 1
                if left == 0:
                    return

    def _reader(self) -> Reader:
        if self.format == "table":
            columns = self.columns or {}
            return lambda row, row_id: table(row, row_id, columns)
        return FORMATS[self.format]


@dataclass(frozen=True)
class LoadedQuestions:
    """A whole file in memory: its questions, the rows that could not be used, and the format it was read as."""

    questions: list[Question]
    problems: list[Problem]
    format: str


class _UnusableRow(Exception):
    """This row cannot be used, others can: it becomes a Problem."""


# ---- entry points


def load_questions(
    path: Path | str, format: str = "auto", columns: Mapping[str, str] | None = None, limit: int | None = None
) -> QuestionFile:
    """Open a file of questions (for ``beir``: its folder, or one of its ``qrels/*.tsv``: the questions judged there).

    Args:
        format: a name in :data:`FORMATS`, "table", "beir", or "auto" (by the keys of the first row). The result's
            ``format`` says which was taken.
        columns: for "table" (and then "auto" means "table"): which column holds id, question, answers, passages,
            gold_titles or kind; "" says that the file has no such column. What is not named is sought under usual
        names. limit: stop after this many questions (problems do not count).

    Returns:
        An iterable of Question and Problem, in file order; ids are unique, ``row-<position>`` where a row has none.

    Raises:
        UsageError: at once for a missing, empty or unreadable file, an unknown format or column; while iterating for an
            unknown layout, a duplicate id, or a syntax error further on.
    """
    path = Path(path)
    if format != "auto":
        _check_name("format", format, (*FORMATS, "table", "beir"))
    if limit is not None and limit < 0:
        raise UsageError(f"limit is {limit}; it is a number of questions")
    if columns is not None:
        for role in columns:
            _check_name("column role", role, TABLE_COLUMNS)
        if format not in ("auto", "table"):
            raise UsageError(f"columns belong to format 'table', not to '{format}'")
        format = "table"
    if format in ("auto", "beir") and (path / "queries.jsonl").exists():
        format = "beir"
    elif format == "beir" and not (path.is_file() and path.parent.name == "qrels"):
        raise UsageError(f"{path} is no BEIR folder (corpus.jsonl, queries.jsonl, qrels/*.tsv) and no file in its qrels")
    # Read up to the first object even if the format is given: a missing or empty file fails now, not in a later stage.
    records = read_records(_beir_files(path)[0] if format == "beir" else path)
    first = next((record for record in records if isinstance(record.value, Mapping)), None)
    if first is None:
        raise UsageError(f"{path} holds no row that is an object with keys")
    if format == "auto":
        try:
            format = detect_format(first.value)
        except UsageError as error:
            raise UsageError(f"{path}, {first.where}: {error}") from error
        log.info("%s: read as format '%s'", path, format)
    return QuestionFile(path, format, columns, limit)


def read_questions(
    path: Path | str, format: str = "auto", columns: Mapping[str, str] | None = None, limit: int | None = None
) -> LoadedQuestions:
    """:func:`load_questions`, collected: for files that fit in memory. Arguments and errors are the same."""
    file = load_questions(path, format, columns, limit)
    found = list(file)
    questions = [item for item in found if isinstance(item, Question)]
    return LoadedQuestions(questions, [item for item in found if isinstance(item, Problem)], file.format)


def detect_format(row: Row) -> str:
    """The format a row has, by its keys. HotpotQA and 2WikiMultihopQA differ only in side keys; see the order below.

    Raises:
        UsageError: no format has these keys; it names them and the known formats.
    """
    keys, answer, context = set(row), row.get("answer"), row.get("context")
    if "QuestionId" in keys or (isinstance(answer, Mapping) and "value" in answer):
        return "triviaqa"
    if "question_text" in keys and keys & {"answers_objects", "contexts"}:
        return "ircot"
    for key, name in _TELLING_KEYS.items():
        if key in keys:
            return name
    if context is not None and "ground_truth" in keys:
        return "retrievalqa"
    if keys & {"evidences", "evidences_id", "entity_ids", "answer_id"} or holds_json(context):
        return "2wikimqa"
    if context is not None and ("supporting_facts" in keys or _has_sentences(context)):
        return "hotpotqa"
    if "golden_answers" in keys:
        return "flashrag"
    if keys == {"question", "answer"} and isinstance(answer, list):
        return "nq_open"
    if keys & set(QUESTION_KEYS):
        return "table"
    raise UsageError(
        f"the layout is not known; the keys are {names_of(row)}; the formats are {', '.join(FORMATS)}, beir, and table"
        " for any other, with columns={question: ..., answers: ..., passages: ...}"
    )


def _question(record: Record, reader: Reader, id_column: str | None, seen: dict[str, int]) -> Question | Problem | None:
    """One record read; ``seen`` maps the ids so far to positions, because resuming and joining go by id."""
    row = record.value
    if not isinstance(row, Mapping):
        raise _UnusableRow(f"not an object with keys but {kind_of(row)}")
    row_id = _first_text(row, ID_KEYS if id_column is None else (id_column,)) or f"row-{record.position}"
    try:
        question = reader(row, row_id)
        if question is not None:
            _check_encodable(question)
    except UsageError as error:
        raise UsageError(f"id {row_id!r}: {error}; the row's keys are {names_of(row)}") from error
    if question is not None and seen.setdefault(row_id, record.position) != record.position:
        raise UsageError(f"the id {row_id!r} is also that of row {seen[row_id]}; ids must be unique as text")
    return question


# ---- the formats


def hotpotqa(row: Row, row_id: str) -> Question:
    """HotpotQA, distractor and fullwiki: ``context`` and ``supporting_facts`` as pairs or as the hub's parallel lists.

    Sentences carry their own leading space, so they are joined as they are and the ends stripped. In a copy that lost
    these spaces (no two sentences of the row have white space between them) they are joined with one space: words never
    run together.
    """
    paragraphs = _paragraphs(row)
    bounds = [bound for _, sentences in paragraphs for bound in pairwise(sentences)]
    spaced = any(before[-1:].isspace() or after[:1].isspace() for before, after in bounds)
    return _multi_hop(row, row_id, paragraphs, "" if spaced else " ", strip=True)


def wiki_multi_hop(row: Row, row_id: str) -> Question:
    """2WikiMultihopQA: sentences joined with one space; in its hub copy ``context`` and others are JSON in a string."""
    return _multi_hop(row, row_id, _paragraphs(row), " ", strip=False)


def musique(row: Row, row_id: str) -> Question:
    """MuSiQue: ``paragraphs`` with ``is_supporting``; the kind is the number of hops in the id ("2hop", "3hop1", ...).

    In MuSiQue-Full each question has a twin of the same id with ``answerable`` false, whose answer its paragraphs do
    not support: these twins are problems, as there is nothing to score.
    """
    if row.get("answerable") is False:
        raise _UnusableRow("marked as not answerable from its paragraphs (MuSiQue-Full)")
    hops = re.match(r"\dhop\d?(?=__)", row_id)
    answers = gold_answers(row.get("answer"), row.get("answer_aliases"))
    return _with_support(row, row_id, "paragraphs", answers, hops.group() if hops else "")


def ircot(row: Row, row_id: str) -> Question:
    """IRCoT's processed files: ``question_text``, ``answers_objects`` (spans, number or date), ``contexts``."""
    return _with_support(row, row_id, "contexts", gold_answers(row.get("answers_objects")), _kind(row))


def nq_open(row: Row, row_id: str) -> Question:
    """NQ-open: ``question`` and a list ``answer``; no passages."""
    _refuse_passages(row, {*QUESTION_KEYS, *ANSWER_KEYS})
    return Question(row_id, _question_text(row), gold_answers(row.get("answer")))


def triviaqa(row: Row, row_id: str) -> Question:
    """TriviaQA: the release's rows (``Question``, ``Answer``) and the hub's (``question``, ``answer``, page texts).

    The release holds only the file names of its evidence, so its questions have no passages; the hub's have whole
    pages: entity pages, then search results. "<unk>" is the hub's mark for a hidden answer.
    """
    pages = ("entity_pages", "search_results")
    _refuse_passages(row, {*QUESTION_KEYS, "Answer", "answer", "EntityPages", "SearchResults", *pages})
    answers = tuple(gold for gold in gold_answers(row.get("Answer"), row.get("answer")) if gold != "<unk>")
    passages: list[Passage] = []
    for key, text_key in zip(pages, ("wiki_context", "search_context"), strict=True):
        for page in list_of(row.get(key) or [], key):
            if not isinstance(page, Mapping) or text_key not in page:
                raise UsageError(f"'{key}' has no '{text_key}'; it has {names_of(page)}")
            passages.append(Passage(text_of(page.get("title")), text_of(page[text_key])))
    return Question(row_id, _question_text(row), answers, tuple(passages))


def ctxs(row: Row, row_id: str) -> Question:
    """CompAct's retrieval files, DPR's reader files, FiD, Contriever and our own slices: passages in ``ctxs``.

    ``supporting_titles``, or passages marked ``isgold``, give the gold titles.
    """
    marked = [entry for entry in row.get("ctxs") or [] if isinstance(entry, Mapping) and entry.get("isgold") is True]
    titles = list_of(row.get("supporting_titles") or [], "supporting_titles") or [entry.get("title") for entry in marked]
    return Question(row_id, _question_text(row), _answers(row), _passages(row, "ctxs"), _unique(titles), _kind(row))


def retrievalqa(row: Row, row_id: str) -> Question:
    """RetrievalQA: passages in ``context``, answers in ``ground_truth``."""
    return Question(row_id, _question_text(row), _answers(row), _passages(row, "context"))


def compact(row: Row, row_id: str) -> Question:
    """CompAct's own output: the passages of its iterations, each a string "title text" that cannot be taken apart."""
    passages: list[Passage] = []
    for step in list_of(_required(row, "iterations"), "iterations"):
        if not isinstance(step, Mapping) or not isinstance(step.get("documents_list"), list):
            raise UsageError(f"an iteration has no list 'documents_list'; it has {names_of(step)}")
        passages += [Passage("", text_of(document)) for document in step["documents_list"]]
    return Question(row_id, _question_text(row), _answers(row), tuple(passages))


def dpr_biencoder(row: Row, row_id: str) -> Question:
    """DPR's training files: positive, then hard-negative, then negative passages. This is no retrieval order."""
    positive = _passages(row, "positive_ctxs")
    others = [key for key in ("hard_negative_ctxs", "negative_ctxs") if row.get(key) is not None]
    passages = sum((_passages(row, key) for key in others), positive)
    gold = _unique(passage.title for passage in positive)
    return Question(row_id, _question_text(row), _answers(row), passages, gold)


def flashrag(row: Row, row_id: str) -> Question:
    """FlashRAG: ``golden_answers``; passages where a pipeline stored a ``retrieval_result`` (also in ``output``)."""
    output, metadata = row.get("output"), row.get("metadata")
    source = output if isinstance(output, Mapping) and "retrieval_result" in output else row
    passages: tuple[Passage, ...] = ()
    if "retrieval_result" in source:
        passages = _passages(source, "retrieval_result")
    else:
        _refuse_passages(row, {*QUESTION_KEYS, *ANSWER_KEYS})
    inner = metadata if isinstance(metadata, Mapping) else {}
    return Question(row_id, _question_text(row), _answers(row), passages, _fact_titles(inner), _kind(inner))


def table(row: Row, row_id: str, columns: Mapping[str, str]) -> Question:
    """Any rows with a column map (CSV, TSV, Parquet, JSON).

    A text that is a JSON (or Python) list of strings is a list of answers; one that is a JSON list of passages is
    read as such; any other text is one answer, or one passage.
    """

    def columns_for(role: str) -> tuple[str, ...]:
        name = columns.get(role)
        if name and name not in row:
            raise UsageError(f"there is no column '{name}' (named for {role})")
        return TABLE_COLUMNS[role] if name is None else (name,)

    cells = {role: [row[name] for name in columns_for(role) if row.get(name) is not None] for role in TABLE_COLUMNS}
    empty = [name for name in columns_for("passages") if name in row]
    if empty and not cells["passages"]:
        raise _UnusableRow(f"no passages: '{empty[0]}' is empty")
    passages: tuple[Passage, ...] = ()
    if cells["passages"]:
        value = cells["passages"][0]
        value = decode_json(value) if holds_json(value) else value
        passages = _passages({"passages": [value] if isinstance(value, str) else value}, "passages")
    elif columns.get("passages") is None:
        _refuse_passages(row, {*columns.values(), *(name for usual in TABLE_COLUMNS.values() for name in usual)})
    kind = next((text_of(cell) for cell in cells["kind"]), "")
    titles = _unique(title for cell in cells["gold_titles"][:1] for title in cell_values(cell))
    answers = gold_answers([cell_values(cell) for cell in cells["answers"]])
    return Question(row_id, _question_text(row, columns_for("question")), answers, passages, titles, kind)


FORMATS: Mapping[str, Reader] = {
    "hotpotqa": hotpotqa,
    "2wikimqa": wiki_multi_hop,
    "musique": musique,
    "nq_open": nq_open,
    "triviaqa": triviaqa,
    "ctxs": ctxs,
    "dpr_biencoder": dpr_biencoder,
    "flashrag": flashrag,
    "ircot": ircot,
    "retrievalqa": retrievalqa,
    "compact": compact,
}


def _beir_files(path: Path) -> tuple[Path, Path, list[Path]]:
    folder = path if path.is_dir() else path.parent.parent
    qrels = [path] if path.is_file() else sorted((folder / "qrels").glob("*.tsv"))
    return folder / "queries.jsonl", folder / "corpus.jsonl", qrels


def _beir(path: Path) -> tuple[Path, Reader]:
    """BEIR: its queries file, and a reader that gives the titles of each query's relevant documents."""
    queries, corpus, qrels = _beir_files(path)
    judged: dict[str, list[str]] = {}
    for file in qrels:
        for record in read_records(file):
            try:
                query, document, score = (record.value[key] for key in ("query-id", "corpus-id", "score"))
                relevant = float(score) > 0
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{file}, {record.where}: not a line of query-id, corpus-id and score") from error
            judged.setdefault(query, []).extend([document] if relevant else [])
    # Only the judged documents' titles are kept: a corpus may hold millions.
    wanted = {document for documents in judged.values() for document in documents}
    titles: dict[str, str] = {}
    for record in read_records(corpus):
        if not isinstance(record.value, Mapping):
            raise UsageError(f"{corpus}, {record.where}: not an object with keys")
        document = _first_text(record.value, ("_id",))
        if document in wanted:
            titles[document] = text_of(record.value.get("title"))
    if len(titles) < len(wanted):
        log.warning("%s: %d judged documents are not in the corpus", path, len(wanted) - len(titles))

    def reader(row: Row, row_id: str) -> Question | None:
        if path.is_file() and row_id not in judged:
            return None  # of another split
        metadata = row.get("metadata")
        answers = gold_answers(metadata.get("answer")) if isinstance(metadata, Mapping) else ()  # HotpotQA has it there
        gold = _unique(titles.get(document) for document in judged.get(row_id, []))
        return Question(row_id, _question_text(row, ("text",)), answers, (), gold)

    return queries, reader


# ---- what the formats are made of


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


def _answers(row: Row) -> tuple[str, ...]:
    return gold_answers(*(row.get(key) for key in ANSWER_KEYS))


def _passages(row: Row, key: str) -> tuple[Passage, ...]:
    entries = list_of(_required(row, key), key)
    return tuple(_passage(entry, f"passage {number} of '{key}'") for number, entry in enumerate(entries, start=1))


def _passage(entry: Any, where: str) -> Passage:
    if isinstance(entry, str):
        return _split_contents(entry)
    if not isinstance(entry, Mapping) or not any(key in entry for key in TEXT_KEYS):
        what = f"its keys are {names_of(entry)}" if isinstance(entry, Mapping) else f"it is {kind_of(entry)}"
        raise UsageError(f"{where} is in an unknown layout: {what}; known are texts and objects with {', '.join(TEXT_KEYS)}")
    key = next((key for key in TEXT_KEYS if entry.get(key) is not None), "")
    if not key:
        raise _UnusableRow(f"{where} has no text (null)")
    title, text = text_of(entry.get("title")), text_of(entry[key])
    if key == "contents":
        split = _split_contents(text)
        return split if not title else Passage(title, split.text if split.title == title else text)
    return Passage(title, text)


def _split_contents(contents: str) -> Passage:
    """FlashRAG's ``contents``, title and text on lines of their own, taken apart; one line is text without a title.

    The titles of its Wikipedia corpus are quoted as in CSV; that is undone.
    """
    title, line_break, text = contents.partition("\n")
    if not line_break:
        return Passage("", contents)
    if re.fullmatch(r'"(?:[^"]|"")+"', title):
        title = title[1:-1].replace('""', '"')
    return Passage(title, text)


def _paragraphs(row: Row) -> list[tuple[str, list[str]]]:
    """The (title, sentences) pairs of HotpotQA's ``context`` in any of its shapes."""
    paragraphs = []
    for number, entry in enumerate(list_of(decode_json(_required(row, "context")), "context"), start=1):
        pair = entry
        if isinstance(entry, Mapping):  # "content" is FlashRAG's word for it
            pair = [entry.get("title"), entry.get("sentences", entry.get("content"))]
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], list | str):
            what = f"an object with {names_of(entry)}" if isinstance(entry, Mapping) else kind_of(entry)
            raise UsageError(f"paragraph {number} of 'context' is {what}; [title, [sentence, ...]] was expected")
        sentences = [pair[1]] if isinstance(pair[1], str) else pair[1]
        paragraphs.append((text_of(pair[0]), [text_of(sentence) for sentence in sentences]))
    return paragraphs


def _multi_hop(row: Row, row_id: str, paragraphs: list[tuple[str, list[str]]], space: str, *, strip: bool) -> Question:
    joined = [(title, space.join(sentences)) for title, sentences in paragraphs]
    passages = tuple(Passage(title, text.strip() if strip else text) for title, text in joined)
    answers = gold_answers(row.get("answer"))
    return Question(row_id, _question_text(row), answers, passages, _fact_titles(row), _kind(row))


def _fact_titles(row: Row) -> tuple[str, ...]:
    facts = list_of(decode_json(row.get("supporting_facts") or []), "supporting_facts")
    titles = (fact.get("title") if isinstance(fact, Mapping) else fact for fact in facts if fact)
    return _unique(title[0] if isinstance(title, list) else title for title in titles)


def _with_support(row: Row, row_id: str, key: str, answers: tuple[str, ...], kind: str) -> Question:
    passages = _passages(row, key)
    marks = [isinstance(entry, Mapping) and entry.get("is_supporting") for entry in list_of(row[key], key)]
    gold = [passage.title for passage, mark in zip(passages, marks, strict=True) if mark]
    return Question(row_id, _question_text(row), answers, passages, _unique(gold), kind)


def _refuse_passages(row: Row, known: set[str]) -> None:
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


def _required(row: Row, key: str) -> Any:
    if key not in row:
        raise UsageError(f"there is no '{key}'")
    if row[key] is None:
        raise _UnusableRow(f"'{key}' is null")
    return row[key]


def _question_text(row: Row, keys: Iterable[str] = QUESTION_KEYS) -> str:
    question = _first_text(row, keys)
    if not question:
        raise _UnusableRow(f"no question text (the row's keys are {names_of(row)})")
    return question


def _first_text(row: Row, keys: Iterable[str]) -> str:
    return next((text for text in (text_of(row.get(key)) for key in keys) if text.strip()), "")


def _has_sentences(context: Any) -> bool:
    if isinstance(context, Mapping):
        return "sentences" in context
    return isinstance(context, list) and bool(context) and isinstance(context[0], list)


def _check_encodable(question: Question) -> None:
    passages = [text for passage in question.passages for text in (passage.title, passage.text)]
    try:
        "".join((question.id, question.question, *question.answers, *passages, *question.gold_titles)).encode()
    except UnicodeEncodeError as error:
        raise _UnusableRow("a text with half of a surrogate pair, which no UTF-8 file can hold") from error


def _unique(titles: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(title for title in map(text_of, titles) if title))


def _kind(row: Row) -> str:
    kind = row.get("type")
    return kind if isinstance(kind, str) else ""


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        hint = "".join(f"did you mean '{match}'? " for match in difflib.get_close_matches(name, list(known), n=1))
        raise UsageError(f"there is no {what} '{name}'; {hint}known are {', '.join(known)}")
