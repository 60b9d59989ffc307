"""Passages for questions that come without: BM25 or dense retrieval over a corpus, with an index that is built once.

BM25 is Robertson's in Lucene's form (bm25s; k1 1.5, b 0.75). Dense retrieval is exact search by cosine similarity over the
embeddings of a sentence-transformers model. An index lies below the run root in a folder named by the corpus' content and by
what it was built with; it is mapped into memory, so a large one costs no reading.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import pyarrow as pa

from xcompress.checkpoint import fingerprint, locate
from xcompress.files import read_records, text_of
from xcompress.schema import Passage, Question, UsageError
from xcompress.settings import RetrieverSettings
from xcompress.store import digest, file_digest, write_json

log = logging.getLogger(__name__)
_BLOCK = 1 << 16  # passages compared with the questions at a time
_SCHEMA = pa.schema([("title", pa.string()), ("text", pa.string())])


class Index(Protocol):
    """Something that finds passages."""

    def search(self, queries: Sequence[str], count: int) -> list[list[Passage]]:
        """The ``count`` best passages of each query, best first (all of a smaller corpus)."""
        ...


def read_corpus(path: Path) -> Iterator[Passage]:
    """Passages of a corpus file: rows with ``text`` (or ``contents``) and, where there is one, ``title``.

    Raises:
        UsageError: the file is missing, empty, or a row has no text.
    """
    for record in read_records(path):
        row = record.value
        if not isinstance(row, dict) or not (row.get("text") or row.get("contents")):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise UsageError(f"{path}, {record.where}: a corpus row needs a text; it has {keys}")
        try:
            yield Passage(text_of(row.get("title")), text_of(row.get("text") or row["contents"]))
        except UsageError as error:
            raise UsageError(f"{path}, {record.where}: {error}") from None


class StoredPassages(Sequence[Passage]):
    """Passages in an Arrow file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as file:
            self._table = pa.ipc.open_file(file).read_all()

    @staticmethod
    def write(path: Path, passages: Iterator[Passage]) -> None:
        """Store passages as they come."""
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
            rows: list[dict[str, str]] = []
            for passage in passages:
                rows.append({"title": passage.title, "text": passage.text})
                if len(rows) == _BLOCK:
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
                    rows.clear()
            if rows:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Passage]:
        for batch in self._table.to_batches(max_chunksize=_BLOCK):
            for row in batch.to_pylist():
                yield Passage(row["title"], row["text"])

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            part = self._table.slice(start, max(0, stop - start)).to_pylist()[::step]
            return [Passage(row["title"], row["text"]) for row in part]
        row = self._table.slice(index, 1).to_pylist()[0]
        return Passage(row["title"], row["text"])


class BM25:
    """An index over ``passages`` (title and text)."""

    def __init__(self, passages: Sequence[Passage], folder: Path | None = None) -> None:
        import bm25s

        self.passages = passages
        if folder is not None and (folder / "bm25").is_dir():
            self._index = bm25s.BM25.load(str(folder / "bm25"), mmap=True)
            return
        self._index = bm25s.BM25()
        self._index.index(self._tokens([f"{p.title} {p.text}" for p in passages], blank=""), show_progress=False)
        if folder is not None:
            self._index.save(str(folder / "bm25"), show_progress=False)

    def search(self, queries: Sequence[str], count: int) -> list[list[Passage]]:
        """See :class:`Index`."""
        count = min(count, len(self.passages))
        found, _ = self._index.retrieve(self._tokens(queries, blank=" "), k=count, show_progress=False)
        return [[self.passages[int(index)] for index in row] for row in found]

    @staticmethod
    def _tokens(texts: Sequence[str], blank: str) -> list[list[str]]:
        import bm25s

        tokens: list[list[str]] = bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)
        # A text of stop words alone has no tokens; ``blank`` keeps its place. In a query it is no token of any passage: bm25s
        # ignores unknown ones, but fails on "" (it gives it a number beyond its own table where no passage is blank).
        return [words or [blank] for words in tokens]


class Dense:
    """Exact search by cosine similarity over embeddings [passages, D] of a sentence-transformers model."""

    def __init__(self, passages: Sequence[Passage], settings: RetrieverSettings, folder: Path | None = None) -> None:
        self.passages = passages
        self.settings = settings
        self._model: Any = None
        stored = None if folder is None else folder / "embeddings.npy"
        if stored is not None and stored.exists():
            self._embeddings = np.load(stored, mmap_mode="r")
            return
        texts = [f"{settings.passage_prefix}{p.title} {p.text}".strip() for p in passages]
        self._embeddings = self._encode(texts, bar=True)
        if stored is not None:
            np.save(stored, self._embeddings)

    def search(self, queries: Sequence[str], count: int) -> list[list[Passage]]:
        """See :class:`Index`. Equal scores keep the corpus' order."""
        wanted = self._encode([f"{self.settings.query_prefix}{query}" for query in queries])
        count = min(count, len(self.passages))
        scores = np.empty((len(queries), 0), np.float32)
        places = np.empty((len(queries), 0), np.int64)
        for start in range(0, len(self._embeddings), _BLOCK):
            block = wanted @ np.asarray(self._embeddings[start : start + _BLOCK]).T
            scores = np.concatenate([scores, block], axis=1)
            places = np.concatenate([places, np.tile(np.arange(start, start + block.shape[1]), (len(queries), 1))], axis=1)
            best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            scores, places = np.take_along_axis(scores, best, axis=1), np.take_along_axis(places, best, axis=1)
        return [[self.passages[int(index)] for index in row] for row in places]

    def _encode(self, texts: list[str], bar: bool = False) -> np.ndarray:
        if self._model is None:
            self._model = _sentence_model(self.settings)
        vectors = self._model.encode(texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=bar)
        return np.asarray(vectors, np.float32)


def _sentence_model(settings: RetrieverSettings) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise UsageError(
            "dense retrieval needs the package sentence-transformers: pip install -e '.[dense]', or dataset.retriever.kind=bm25"
        ) from None
    return SentenceTransformer(str(_model_folder(settings)), local_files_only=True, trust_remote_code=False)


def _model_folder(settings: RetrieverSettings) -> Path:
    from hydra.utils import instantiate

    model = settings.model if isinstance(settings.model, str) else instantiate(dict(settings.model))
    return locate(str(model), settings.revision)


def identity(settings: RetrieverSettings) -> dict[str, Any]:
    """What decides which passages are found in a corpus, apart from the corpus."""
    if settings.kind == "bm25":
        return {"kind": "bm25"}
    folder = _model_folder(settings)
    nested = {path.relative_to(folder).as_posix(): file_digest(path) for path in sorted(folder.glob("*/config.json"))}
    return {
        "kind": settings.kind,
        "model": fingerprint(folder),
        "modules": nested,
        "query_prefix": settings.query_prefix,
        "passage_prefix": settings.passage_prefix,
    }


def open_index(corpus: Path, settings: RetrieverSettings, root: Path) -> Index:
    """The index of a corpus below ``root``, built if it is not there. It appears whole or not at all.

    Raises:
        UsageError: the corpus cannot be read, or the retriever's model or package is missing.
    """
    builder = {"bm25s": metadata.version("bm25s")} if settings.kind == "bm25" else {}
    made_with = {key: value for key, value in identity(settings).items() if key != "query_prefix"}
    key = digest({"corpus": file_digest(corpus), **made_with, **builder})
    folder = root / f"{settings.kind}-{corpus.stem}-{key}"
    make: Callable[[Sequence[Passage], Path], Index] = (
        BM25 if settings.kind == "bm25" else lambda passages, at: Dense(passages, settings, at)
    )
    if not (folder / "index.json").exists():
        log.info("building a %s index of %s in %s", settings.kind, corpus, folder)
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=root, prefix=f".{folder.name}."))
        try:
            StoredPassages.write(temporary / "passages.arrow", read_corpus(corpus))
            passages = StoredPassages(temporary / "passages.arrow")
            make(passages, temporary)
            write_json(temporary / "index.json", {"corpus": corpus.name, "passages": len(passages), **made_with, **builder})
            if folder.exists() and not (folder / "index.json").exists():  # somebody deleted a part of it
                shutil.rmtree(folder)
            try:
                os.rename(temporary, folder)
            except OSError:
                if not (folder / "index.json").exists():  # else another process has just built the same
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return make(StoredPassages(folder / "passages.arrow"), folder)


class Retriever:
    """Gives passages of a corpus to questions that have none; the index is opened when the first such question comes."""

    def __init__(self, corpus: Path, settings: RetrieverSettings, root: Path) -> None:
        self.corpus, self.settings, self.root = corpus, settings, root
        self._index: Index | None = None

    def fill(self, questions: Sequence[Question], count: int) -> list[Question]:
        """``questions`` with the ``count`` best passages of the corpus each; those that have passages keep them."""
        empty = [index for index, question in enumerate(questions) if not question.passages]
        result = list(questions)
        if not empty:
            return result
        if self._index is None:
            self._index = open_index(self.corpus, self.settings, self.root)
        found = self._index.search([questions[index].question for index in empty], count)
        for index, passages in zip(empty, found, strict=True):
            result[index] = replace(questions[index], passages=tuple(passages))
        return result
