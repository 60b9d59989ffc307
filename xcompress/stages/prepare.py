"""prepare: a data set's files -> questions in shards, with a report of everything that is odd about them.

Rows stream from the file into shards: what is in memory at a time is one batch of questions, however long the file is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

from tqdm import tqdm

from xcompress import retrieval
from xcompress.formats import Problem, load_questions
from xcompress.health import VERSION as HEALTH_VERSION
from xcompress.health import Health
from xcompress.hub import HubRows
from xcompress.schema import Question, UsageError, from_row, to_row
from xcompress.settings import SourceSettings
from xcompress.store import Shard, StageFolder, digest, file_digest, write_json

log = logging.getLogger(__name__)
VERSION = 1  # raise when the rows of this stage change
_BATCH = 256  # questions that are searched for together
T = TypeVar("T")


def identity(source: SourceSettings, passages: int) -> dict[str, Any]:
    """Everything that changes the questions: the files' content and the settings."""
    path = Path(source.path)
    files = [path]
    extra: dict[str, Any] = {}
    if source.hub is not None:
        files = HubRows(source.hub).files()
        extra["origin"] = "hub"
    elif source.format == "beir" and path.is_file():  # a file of judgements; its questions and titles lie in the folder above
        files += [file for name in ("queries.jsonl", "corpus.jsonl") if (file := path.parent.parent / name).exists()]
    if source.corpus and source.retriever.kind != "bm25":
        extra["retriever"] = retrieval.identity(source.retriever)
    return {
        "stage": "questions",
        "version": VERSION,
        "format": source.format,
        "columns": dict(source.columns) if source.columns else None,
        "passages": passages,
        "files": [file_digest(file) for file in files],
        "corpus": file_digest(Path(source.corpus)) if source.corpus else None,
        **extra,
    }


def stream(
    source: SourceSettings, passages: int, health: Health, root: Path, skip: int = 0, limit: int | None = None
) -> Iterator[Question]:
    """The questions of a source one by one (at most ``passages`` passages each), counted in ``health``.

    Args:
        root: the run root; the index of a corpus lies below it.

    Raises:
        UsageError: the file cannot be read, holds no usable question, or has questions without passages and no corpus (said at
            the end, with their number; no question is given after the first of them).
    """
    rows = Path(source.path) if source.hub is None else HubRows(source.hub)
    file = load_questions(rows, source.format, source.columns, None if limit is None else skip + limit)
    retriever = None
    if source.corpus:
        retriever = retrieval.Retriever(Path(source.corpus), source.retriever, root / "indexes")
    bare: list[str] = []
    given = 0
    for batch in _batches(islice(_usable(file, health), skip, None), _BATCH):
        cut = [replace(question, passages=question.passages[:passages]) for question in batch]
        if retriever is not None:
            cut = retriever.fill(cut, passages)
        for whole, question in zip(batch, cut, strict=True):
            given += 1
            if not question.passages:
                bare.append(question.id)
            if not bare:
                health.add(question, max(0, len(whole.passages) - passages))
                yield question
    if not given:
        problems = health.problems
        why = f" (all {len(problems)} rows are unusable; the first: {problems[0]['reason']})" if problems and not skip else ""
        after = f" after the first {skip}, which are held out for calibration" if skip else ""
        raise UsageError(f"{source.path} gives no questions{after}{why}")
    if bare:
        raise UsageError(
            f"{source.path}: {len(bare)} of {given} questions have no passages (the first: id {bare[0]!r});"
            " set dataset.corpus to retrieve them"
        )


def _usable(items: Iterable[Question | Problem], health: Health) -> Iterator[Question]:
    for item in items:
        if isinstance(item, Problem):
            health.problem(item)
        else:
            yield item


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


# ---- stored questions


@dataclass(frozen=True)
class StoredQuestions(Sequence[list[Question]]):
    """The questions of a split, shard by shard; each is read when it is asked for.

    Attributes:
        folder: where they lie.
        shards: their places and names.
        sizes: questions of each shard.
        candidate_keys: of each shard, what its candidates depend on.
        health: see :meth:`xcompress.health.Health.report`.
    """

    folder: StageFolder
    shards: tuple[Shard, ...]
    sizes: tuple[int, ...]
    candidate_keys: tuple[str, ...]
    health: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.shards)

    @overload
    def __getitem__(self, index: int) -> list[Question]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Question]]: ...
    def __getitem__(self, index: int | slice) -> list[Question] | list[list[Question]]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        return [from_row(row) for row in self.folder.read(self.shards[index])]

    def column(self, name: str) -> Iterator[Any]:
        """One column of all questions, read without the others."""
        for shard in self.shards:
            yield from self.folder.table(shard, [name])[name].to_pylist()


def store(
    folder: StageFolder, source: SourceSettings, passages: int, skip: int, limit: int | None, shard_size: int
) -> StoredQuestions:
    """Read a source and write its questions to ``folder``; raises as :func:`stream`."""
    log.info("prepare: reading %s", source.path)
    health = Health(passages)
    shards, sizes, candidates = [], [], []
    questions = stream(source, passages, health, folder.path.parents[1], skip, limit)
    bar = tqdm(questions, desc=" prepare", unit="q", total=limit, disable=None, delay=2, dynamic_ncols=True)
    for index, part in enumerate(_batches(bar, shard_size)):
        rows = [to_row(question) for question in part]
        shards.append(Shard(index, digest(rows)))
        sizes.append(len(part))
        candidates.append(candidate_key(part))
        folder.write(shards[-1], rows)
    stored = StoredQuestions(folder, tuple(shards), tuple(sizes), tuple(candidates), health.report())
    _write_manifest(stored)
    return stored


def stored(folder: StageFolder, passages: int) -> StoredQuestions | None:
    """What :func:`store` wrote, if all of it is there; a report of an older version is made anew."""
    path = folder.path / "manifest.json"
    if not path.exists():
        return None
    manifest = json.loads(path.read_text(encoding="utf-8"))
    shards = tuple(Shard(index, key) for index, key in enumerate(manifest["shards"]))
    if not shards or any(folder.find(shard) is None for shard in shards):
        return None
    if manifest["health"].get("version") == HEALTH_VERSION:
        return StoredQuestions(folder, shards, tuple(manifest["sizes"]), tuple(manifest["candidate_keys"]), manifest["health"])
    health = Health(passages)
    for row in manifest["health"]["unusable_rows"]:
        health.problem(Problem(row["position"], row["reason"], row.get("line")))
    sizes, candidates = [], []
    for part in StoredQuestions(folder, shards, (), (), {}):
        sizes.append(len(part))
        candidates.append(candidate_key(part))
        for question in part:
            health.add(question)
    # How many passages were left out when the file was read is not known any more.
    report = {**health.report(), "passages_left_out": None, "questions_with_passages_left_out": None}
    found = StoredQuestions(folder, shards, tuple(sizes), tuple(candidates), report)
    _write_manifest(found)
    return found


def _write_manifest(stored: StoredQuestions) -> None:
    write_json(
        stored.folder.path / "manifest.json",
        {
            "shards": [shard.input for shard in stored.shards],
            "sizes": list(stored.sizes),
            "candidate_keys": list(stored.candidate_keys),
            "health": dict(stored.health),
        },
    )


def candidate_key(questions: Sequence[Question]) -> str:
    """What candidates depend on: not the gold answers, so a corrected label recomputes nothing."""
    return digest([[q.id, q.question, [[p.title, p.text] for p in q.passages]] for q in questions])
