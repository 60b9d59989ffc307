"""prepare: a data set's files -> questions in shards, with a report of everything that is odd about them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from xcompress.answers import containment, f1, self_check
from xcompress.formats import Problem, read_questions
from xcompress.retrieval import add_passages
from xcompress.schema import Question, UsageError
from xcompress.settings import SourceSettings

log = logging.getLogger(__name__)
VERSION = 1  # raise when the rows of this stage change


def identity(source: SourceSettings, passages: int) -> dict[str, Any]:
    """Everything that changes the questions: the files' content and the settings."""
    path = Path(source.path)
    files = [path]
    if source.format == "beir" and path.is_file():  # a file of judgements; its questions and titles lie in the folder above
        files += [file for name in ("queries.jsonl", "corpus.jsonl") if (file := path.parent.parent / name).exists()]
    return {
        "stage": "questions",
        "version": VERSION,
        "format": source.format,
        "columns": dict(source.columns) if source.columns else None,
        "passages": passages,
        "files": [file_digest(file) for file in files],
        "corpus": file_digest(Path(source.corpus)) if source.corpus else None,
    }


def file_digest(path: Path) -> str:
    """Digest of a file's bytes and ending, which says how they are read (of a folder: of its files' names and bytes)."""
    digest = blake2b(digest_size=16)
    for part in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        name = part.relative_to(path).as_posix() if path.is_dir() else part.suffix.lower()
        digest.update(f"{name}\0{part.stat().st_size}\0".encode())
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def load(
    source: SourceSettings, passages: int, skip: int = 0, limit: int | None = None
) -> tuple[list[Question], list[Problem]]:
    """The questions of a source (at most ``passages`` passages each) and the rows that cannot be used.

    Raises:
        UsageError: the file cannot be read, holds no usable question, or has questions without passages and no corpus.
    """
    found = read_questions(Path(source.path), source.format, source.columns, None if limit is None else skip + limit)
    problems = list(found.problems)
    questions = [replace(question, passages=question.passages[:passages]) for question in found.questions]
    questions = questions[skip:]
    if not questions:
        why = f" (all {len(problems)} rows are unusable; the first: {problems[0].reason})" if problems and not skip else ""
        after = f" after the first {skip}, which are held out for calibration" if skip else ""
        raise UsageError(f"{source.path} gives no questions{after}{why}")
    if source.corpus:
        questions = add_passages(questions, Path(source.corpus), passages)
    bare = [question.id for question in questions if not question.passages]
    if bare:
        raise UsageError(
            f"{source.path}: {len(bare)} of {len(questions)} questions have no passages (the first: id {bare[0]!r});"
            " set dataset.corpus to retrieve them with BM25"
        )
    return questions, problems


def health(questions: Sequence[Question], problems: Sequence[Problem], wanted_passages: int) -> dict[str, Any]:
    """Counts that show what the data is like; shown at the end of a run and stored beside it."""
    answers = [question for question in questions if question.answers]
    golds = [question for question in questions if question.gold_titles]
    found = sum(set(q.gold_titles) <= {p.title for p in q.passages} for q in golds)
    with_answer = sum(any(containment(f"{p.title} {p.text}", q.answers) for p in q.passages) for q in answers)
    yes_no = sum(q.answers[0].strip().lower() in {"yes", "no"} for q in answers)
    passages = Counter(len(question.passages) for question in questions)
    return {
        "questions": len(questions),
        "unusable_rows": [{"position": problem.position, "reason": problem.reason} for problem in problems],
        "golds_not_matching_themselves": sum(len(self_check(q.answers, metric=f1)) for q in answers),
        "unlabelled": len(questions) - len(answers),
        "yes_no": yes_no,
        "passages_per_question": {str(count): passages[count] for count in sorted(passages)},
        "fewer_passages_than_asked": sum(count for number, count in passages.items() if number < wanted_passages),
        "empty_passages": sum(not p.text.strip() for q in questions for p in q.passages),
        "repeated_passages": sum(len(q.passages) - len(set(q.passages)) for q in questions),
        "all_gold_titles_retrieved": found,
        "with_gold_titles": len(golds),
        "answer_string_in_passages": with_answer,
        "labelled": len(answers),
    }
