"""Passages for one question: from a file, from standard input, or by BM25 from a folder of text files."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

from xcompress.files import SUFFIXES, read_records
from xcompress.layouts import UnusableRow, passage_of
from xcompress.retrieval import BM25
from xcompress.schema import Passage, UsageError

TEXT_SUFFIXES = (".txt", ".md", ".rst")


def read_passages(path: Path) -> list[Passage]:
    """The passages of a file, in its order.

    A table (JSON lines, JSON, CSV, TSV, Parquet) holds one passage a row: a text, or ``text`` or ``contents`` and perhaps
    ``title``. Any other file is text: paragraphs between empty lines are passages without a title.

    Raises:
        UsageError: the file is missing, empty, not UTF-8, or a row is no passage (which one, and what it has).
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; search it with --folder {path}")
    if path.name.lower().endswith(tuple(SUFFIXES)):
        passages = []
        for record in read_records(path):
            try:
                passages.append(passage_of(record.value, "the row"))
            except (UsageError, UnusableRow) as error:
                raise UsageError(f"{path}, {record.where}: {error}") from None
    else:
        passages = [Passage("", paragraph) for paragraph in paragraphs(_text(path))]
    return _some(passages, str(path))


def parse_passages(text: str) -> list[Passage]:
    """The passages of piped text: JSON lines if its first line is a JSON object, else paragraphs between empty lines.

    Raises:
        UsageError: there is no text, or a line is no passage.
    """
    first = text.lstrip("\ufeff").lstrip().split("\n", 1)[0].strip()
    if not first.startswith("{"):
        return _some([Passage("", paragraph) for paragraph in paragraphs(text)], "standard input")
    passages = []
    for number, line in enumerate(io.StringIO(text.lstrip("\ufeff"), newline="\n"), start=1):
        if not line.strip():
            continue
        try:
            passages.append(passage_of(json.loads(line), "the row"))
        except (ValueError, UsageError, UnusableRow) as error:
            raise UsageError(f"standard input, line {number}: {error}") from None
    return _some(passages, "standard input")


def search_folder(folder: Path, question: str, count: int) -> tuple[list[Passage], int]:
    """The ``count`` paragraphs of a folder's text files that fit the question best (BM25), and how many there are.

    Every paragraph is a passage; its title is the file's path in the folder, without its ending. Hidden files are left out.

    Raises:
        UsageError: there is no such folder, no text file in it, or one is not UTF-8.
    """
    if not folder.is_dir():
        raise UsageError(f"folder {folder} does not exist" if not folder.exists() else f"{folder} is not a folder")
    passages = [
        Passage(path.relative_to(folder).with_suffix("").as_posix(), paragraph)
        for path in _text_files(folder)
        for paragraph in paragraphs(_text(path))
    ]
    if not passages:
        raise UsageError(f"folder {folder} holds no text ({', '.join('*' + suffix for suffix in TEXT_SUFFIXES)})")
    return BM25(passages).search([question], count)[0], len(passages)


def paragraphs(text: str) -> list[str]:
    """Blocks of text between empty lines; line breaks inside a block become spaces."""
    blocks = re.split(r"\n[ \t\r]*\n", text.removeprefix("\ufeff"))
    return [" ".join(block.split()) for block in blocks if block.strip()]


def _text_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in TEXT_SUFFIXES and path.is_file() and not hidden:
            yield path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _some(passages: list[Passage], where: str) -> list[Passage]:
    if not any(passage.text.strip() for passage in passages):
        raise UsageError(f"{where} holds no passage")
    return passages
