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

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

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
from xcompress.hub import HubRows
from xcompress.layouts import (
    ANSWER_KEYS,
    ID_KEYS,
    PASSAGE_KEYS,
    QUESTION_KEYS,
    Row,
    UnusableRow,
    answers_of,
    check_encodable,
    check_name,
    fact_titles,
    first_text,
    gold_answers,
    has_sentences,
    kind_of_row,
    multi_hop,
    paragraphs_of,
    passages_of,
    question_text,
    refuse_passages,
    required,
    unique,
    with_support,
)
from xcompress.schema import Passage, Question, UsageError

log = logging.getLogger(__name__)

Reader = Callable[[Row, str], Question | None]  # (row, id) -> question, or None for a row that was not asked for

# What `columns` may name for format "table", and the names tried where it does not.
TABLE_COLUMNS = {
    "id": ID_KEYS,
    "question": QUESTION_KEYS,
    "answers": ANSWER_KEYS,
    "passages": PASSAGE_KEYS,
    "gold_titles": ("supporting_titles", "gold_titles"),
    "kind": ("type", "kind"),
}
# Keys that one format alone has.
_TELLING_KEYS = {"paragraphs": "musique", "positive_ctxs": "dpr_biencoder", "ctxs": "ctxs", "iterations": "compact"}


@dataclass(frozen=True)
class Problem:
    """A row that cannot be used: its position (from 1), why, and its line where rows are lines."""

    position: int
    reason: str
    line: int | None = None


@dataclass(frozen=True)
class QuestionFile:
    """A file of questions whose layout is known. Each iteration reads it anew, streaming, as questions and problems."""

    path: Path | HubRows
    format: str
    columns: Mapping[str, str] | None = None
    limit: int | None = None

    def __iter__(self) -> Iterator[Question | Problem]:
        file: Path | HubRows = self.path
        reader: Reader = self._reader
        if self.format == "beir" and isinstance(file, Path):
            file, reader = _beir(file)
        id_column = (self.columns or {}).get("id")
        seen: dict[str, int] = {}
        left = self.limit
        for record in _records(file) if left != 0 else ():
            try:
                found = _question(record, reader, id_column, seen)
            except UnusableRow as error:
                found = Problem(record.position, str(error), record.line)
            except UsageError as error:
                raise UsageError(f"{file}, {record.where}: {error}") from error
            if found is not None:
                yield found
            if left is not None and isinstance(found, Question):
                left -= 1
                if left == 0:
                    return

    def _reader(self, row: Row, row_id: str) -> Question | None:
        if self.format == "table":
            return table(row, row_id, self.columns or {})
        return FORMATS[self.format](row, row_id)


@dataclass(frozen=True)
class LoadedQuestions:
    """A whole file in memory: its questions, the rows that could not be used, and the format it was read as."""

    questions: list[Question]
    problems: list[Problem]
    format: str


# ---- entry points


def load_questions(
    path: Path | str | HubRows, format: str = "auto", columns: Mapping[str, str] | None = None, limit: int | None = None
) -> QuestionFile:
    """Open a file of questions (for ``beir``: its folder, or one of its ``qrels/*.tsv``: the questions judged there).

    Args:
        path: a file, or the rows of a data set in the hub's layout.
        format: a name in :data:`FORMATS`, "table", "beir", or "auto" (by the keys of the first row). The result's
            ``format`` says which was taken.
        columns: for "table" (and then "auto" means "table"): which column holds id, question, answers, passages,
            gold_titles or kind; "" says that the file has no such column. What is not named is sought under usual names.
        limit: stop after this many questions (problems do not count).

    Returns:
        An iterable of Question and Problem, in file order; ids are unique, ``row-<position>`` where a row has none.

    Raises:
        UsageError: at once for a missing, empty or unreadable file, an unknown format or column; while iterating for an
            unknown layout, a duplicate id, or a syntax error further on.
    """
    path = Path(path) if isinstance(path, str) else path
    if format != "auto":
        check_name("format", format, (*FORMATS, "table", "beir"))
    if limit is not None and limit < 0:
        raise UsageError(f"limit is {limit}; it is a number of questions")
    if columns is not None:
        for role in columns:
            check_name("column role", role, TABLE_COLUMNS)
        if format not in ("auto", "table"):
            raise UsageError(f"columns belong to format 'table', not to '{format}'")
        format = "table"
    rows: Path | HubRows = path
    if isinstance(path, HubRows):
        if format == "beir":
            raise UsageError(f"{path}: format beir is a folder of files (dataset.path), not rows of a split")
    elif format in ("auto", "beir") and (path / "queries.jsonl").exists():
        format, rows = "beir", path / "queries.jsonl"
    elif format == "beir":
        if not (path.is_file() and path.parent.name == "qrels"):
            raise UsageError(f"{path} is no BEIR folder (corpus.jsonl, queries.jsonl, qrels/*.tsv) and no file in its qrels")
        rows = _beir_files(path)[0]
    elif path.is_dir():
        raise UsageError(
            f"{path} is a folder, and a file is needed; a folder in the hub's layout is read with dataset.origin=hub"
            f" dataset.hub.id={path} dataset.hub.config=null"
        )
    # Read up to the first object even if the format is given: a missing or empty file fails now, not in a later stage.
    records = _records(rows)
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
    path: Path | str | HubRows, format: str = "auto", columns: Mapping[str, str] | None = None, limit: int | None = None
) -> LoadedQuestions:
    """:func:`load_questions`, collected: for files that fit in memory. Arguments and errors are the same."""
    file = load_questions(path, format, columns, limit)
    found = list(file)
    questions = [item for item in found if isinstance(item, Question)]
    return LoadedQuestions(questions, [item for item in found if isinstance(item, Problem)], file.format)


def _records(rows: Path | HubRows) -> Iterator[Record]:
    return iter(rows) if isinstance(rows, HubRows) else read_records(rows)


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
    if context is not None and ("supporting_facts" in keys or has_sentences(context)):
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
        raise UnusableRow(f"not an object with keys but {kind_of(row)}")
    row_id = first_text(row, ID_KEYS if id_column is None else (id_column,)) or f"row-{record.position}"
    try:
        question = reader(row, row_id)
        if question is not None:
            check_encodable(question)
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
    paragraphs = paragraphs_of(row)
    bounds = [bound for _, sentences in paragraphs for bound in pairwise(sentences)]
    spaced = any(before[-1:].isspace() or after[:1].isspace() for before, after in bounds)
    return multi_hop(row, row_id, paragraphs, "" if spaced else " ", strip=True)


def wiki_multi_hop(row: Row, row_id: str) -> Question:
    """2WikiMultihopQA: sentences joined with one space; in its hub copy ``context`` and others are JSON in a string."""
    return multi_hop(row, row_id, paragraphs_of(row), " ", strip=False)


def musique(row: Row, row_id: str) -> Question:
    """MuSiQue: ``paragraphs`` with ``is_supporting``; the kind is the number of hops in the id ("2hop", "3hop1", ...).

    In MuSiQue-Full each question has a twin of the same id with ``answerable`` false, whose answer its paragraphs do
    not support: these twins are problems, as there is nothing to score.
    """
    if row.get("answerable") is False:
        raise UnusableRow("marked as not answerable from its paragraphs (MuSiQue-Full)")
    hops = re.match(r"\dhop\d?(?=__)", row_id)
    answers = gold_answers(row.get("answer"), row.get("answer_aliases"))
    return with_support(row, row_id, "paragraphs", answers, hops.group() if hops else "")


def ircot(row: Row, row_id: str) -> Question:
    """IRCoT's processed files: ``question_text``, ``answers_objects`` (spans, number or date), ``contexts``."""
    return with_support(row, row_id, "contexts", gold_answers(row.get("answers_objects")), kind_of_row(row))


def nq_open(row: Row, row_id: str) -> Question:
    """NQ-open: ``question`` and a list ``answer``; no passages."""
    refuse_passages(row, {*QUESTION_KEYS, *ANSWER_KEYS})
    return Question(row_id, question_text(row), gold_answers(row.get("answer")))


def triviaqa(row: Row, row_id: str) -> Question:
    """TriviaQA: the release's rows (``Question``, ``Answer``) and the hub's (``question``, ``answer``, page texts).

    The release holds only the file names of its evidence, so its questions have no passages; the hub's have whole
    pages: entity pages, then search results. "<unk>" is the hub's mark for a hidden answer.
    """
    pages = ("entity_pages", "search_results")
    refuse_passages(row, {*QUESTION_KEYS, "Answer", "answer", "EntityPages", "SearchResults", *pages})
    answers = tuple(gold for gold in gold_answers(row.get("Answer"), row.get("answer")) if gold != "<unk>")
    passages: list[Passage] = []
    for key, text_key in zip(pages, ("wiki_context", "search_context"), strict=True):
        for page in list_of(row.get(key) or [], key):
            if not isinstance(page, Mapping) or text_key not in page:
                raise UsageError(f"'{key}' has no '{text_key}'; it has {names_of(page)}")
            passages.append(Passage(text_of(page.get("title")), text_of(page[text_key])))
    return Question(row_id, question_text(row), answers, tuple(passages))


def ctxs(row: Row, row_id: str) -> Question:
    """CompAct's retrieval files, DPR's reader files, FiD, Contriever and our own slices: passages in ``ctxs``.

    ``supporting_titles``, or passages marked ``isgold``, give the gold titles.
    """
    marked = [entry for entry in row.get("ctxs") or [] if isinstance(entry, Mapping) and entry.get("isgold") is True]
    titles = list_of(row.get("supporting_titles") or [], "supporting_titles") or [entry.get("title") for entry in marked]
    return Question(row_id, question_text(row), answers_of(row), passages_of(row, "ctxs"), unique(titles), kind_of_row(row))


def retrievalqa(row: Row, row_id: str) -> Question:
    """RetrievalQA: passages in ``context``, answers in ``ground_truth``."""
    return Question(row_id, question_text(row), answers_of(row), passages_of(row, "context"))


def compact(row: Row, row_id: str) -> Question:
    """CompAct's own output: the passages of its iterations, each a string "title text" that cannot be taken apart."""
    passages: list[Passage] = []
    for step in list_of(required(row, "iterations"), "iterations"):
        if not isinstance(step, Mapping) or not isinstance(step.get("documents_list"), list):
            raise UsageError(f"an iteration has no list 'documents_list'; it has {names_of(step)}")
        passages += [Passage("", text_of(document)) for document in step["documents_list"]]
    return Question(row_id, question_text(row), answers_of(row), tuple(passages))


def dpr_biencoder(row: Row, row_id: str) -> Question:
    """DPR's training files: positive, then hard-negative, then negative passages. This is no retrieval order."""
    positive = passages_of(row, "positive_ctxs")
    others = [key for key in ("hard_negative_ctxs", "negative_ctxs") if row.get(key) is not None]
    passages = sum((passages_of(row, key) for key in others), positive)
    gold = unique(passage.title for passage in positive)
    return Question(row_id, question_text(row), answers_of(row), passages, gold)


def flashrag(row: Row, row_id: str) -> Question:
    """FlashRAG: ``golden_answers``; passages where a pipeline stored a ``retrieval_result`` (also in ``output``)."""
    output, metadata = row.get("output"), row.get("metadata")
    source = output if isinstance(output, Mapping) and "retrieval_result" in output else row
    passages: tuple[Passage, ...] = ()
    if "retrieval_result" in source:
        passages = passages_of(source, "retrieval_result")
    else:
        refuse_passages(row, {*QUESTION_KEYS, *ANSWER_KEYS})
    inner = metadata if isinstance(metadata, Mapping) else {}
    return Question(row_id, question_text(row), answers_of(row), passages, fact_titles(inner), kind_of_row(inner))


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
        raise UnusableRow(f"no passages: '{empty[0]}' is empty")
    passages: tuple[Passage, ...] = ()
    if cells["passages"]:
        value = cells["passages"][0]
        value = decode_json(value) if holds_json(value) else value
        passages = passages_of({"passages": [value] if isinstance(value, str) else value}, "passages")
    elif columns.get("passages") is None:
        refuse_passages(row, {*columns.values(), *(name for usual in TABLE_COLUMNS.values() for name in usual)})
    kind = next((text_of(cell) for cell in cells["kind"]), "")
    titles = unique(title for cell in cells["gold_titles"][:1] for title in cell_values(cell))
    answers = gold_answers([cell_values(cell) for cell in cells["answers"]])
    return Question(row_id, question_text(row, columns_for("question")), answers, passages, titles, kind)


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
        document = first_text(record.value, ("_id",))
        if document in wanted:
            titles[document] = text_of(record.value.get("title"))
    if len(titles) < len(wanted):
        log.warning("%s: %d judged documents are not in the corpus", path, len(wanted) - len(titles))

    def reader(row: Row, row_id: str) -> Question | None:
        if path.is_file() and row_id not in judged:
            return None  # of another split
        metadata = row.get("metadata")
        answers = gold_answers(metadata.get("answer")) if isinstance(metadata, Mapping) else ()  # HotpotQA has it there
        gold = unique(titles.get(document) for document in judged.get(row_id, []))
        return Question(row_id, question_text(row, ("text",)), answers, (), gold)

    return queries, reader
