"""Passages for questions that come without: BM25 over a corpus (bm25s; Robertson's BM25 in Lucene's form, k1 1.5, b 0.75)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from xcompress.files import read_records, text_of
from xcompress.schema import Passage, Question, UsageError


def read_corpus(path: Path) -> list[Passage]:
    """Passages of a corpus file: rows with ``text`` (or ``contents``) and, where there is one, ``title``.

    Raises:
        UsageError: the file is missing, empty, or a row has no text.
    """
    passages = []
    for record in read_records(path):
        row = record.value
        if not isinstance(row, dict) or not (row.get("text") or row.get("contents")):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise UsageError(f"{path}, {record.where}: a corpus row needs a text; it has {keys}")
        try:
            passages.append(Passage(text_of(row.get("title")), text_of(row.get("text") or row["contents"])))
        except UsageError as error:
            raise UsageError(f"{path}, {record.where}: {error}") from None
    if not passages:
        raise UsageError(f"corpus {path} is empty")
    return passages


class BM25:
    """An index over ``passages`` (title and text)."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        import bm25s

        self.passages = list(passages)
        self._index = bm25s.BM25()
        self._index.index(self._tokens([f"{p.title} {p.text}" for p in passages], blank=""), show_progress=False)

    def search(self, queries: Sequence[str], count: int) -> list[list[Passage]]:
        """The ``count`` best passages of each query, best first."""
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


class Retriever:
    """Gives passages of a corpus to questions that have none; the corpus is read when the first such question comes."""

    def __init__(self, corpus: Path) -> None:
        self.corpus = corpus
        self._index: BM25 | None = None

    def fill(self, questions: Sequence[Question], count: int) -> list[Question]:
        """``questions`` with the ``count`` best passages of the corpus each; those that have passages keep them."""
        empty = [index for index, question in enumerate(questions) if not question.passages]
        result = list(questions)
        if not empty:
            return result
        if self._index is None:
            self._index = BM25(read_corpus(self.corpus))
        found = self._index.search([questions[index].question for index in empty], count)
        for index, passages in zip(empty, found, strict=True):
            result[index] = replace(questions[index], passages=tuple(passages))
        return result
