"""Reading records from files: JSON lines, JSON, CSV, TSV and Parquet become one stream of :class:`Record`.

Text is UTF-8, with or without a byte-order mark, with LF or CRLF line ends. Lines end at "\\n" and nowhere else:
U+2028, U+0085 and their kin are ordinary characters inside a passage. Nothing is held in memory whole but a ``.json``
file that is one object (TriviaQA's release): JSON lines come line by line, a JSON list element by element, Parquet by
batches.
"""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from xcompress.schema import UsageError

JSON_SUFFIXES = (".json", ".jsonl", ".jsonlines", ".ndjson")
SUFFIXES = (*JSON_SUFFIXES, *(f"{suffix}.gz" for suffix in JSON_SUFFIXES), ".csv", ".tsv", ".parquet")

_JSON_SPACE = " \t\r\n"
_BLOCK = 1 << 20  # characters read at a time from a JSON list
_ROWS_PER_BATCH = 256  # a row with 30 passages is about 20 kB
_CELL_LIMIT = 2**31 - 1  # the csv module's own limit of 128 KiB is less than 30 passages in one cell


@dataclass(frozen=True)
class Record:
    """One row of a file.

    Attributes:
        position: its number among the file's rows, from 1 (blank lines are no rows).
        line: the line it stands on (ends on, for CSV), from 1; None where rows are not lines.
        value: what was read, normally a dict; nested values are str, int, float, bool, None, list, dict.
    """

    position: int
    line: int | None
    value: Any

    @property
    def where(self) -> str:
        """'row 3', or 'row 3 (line 4)' where the two differ."""
        return f"row {self.position}" + (f" (line {self.line})" if self.line not in (None, self.position) else "")


def read_records(path: Path) -> Iterator[Record]:
    """The rows of a file in order, by its suffix (:data:`SUFFIXES`), streaming.

    Raises:
        UsageError: missing or empty file, unknown suffix, not UTF-8, damaged compression, a syntax error (with line).
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and a file is needed")
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    rows = _reader(path)
    position = 0
    try:
        for position, (line, value) in enumerate(rows, start=1):
            yield Record(position, line, value)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error.reason}, after row {position})") from error
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise UsageError(f"{path} cannot be read after row {position}: {_one_line(error)}") from error
    if position == 0:
        raise UsageError(f"{path} is empty: it holds no rows")


def _reader(path: Path) -> Iterator[tuple[int | None, Any]]:
    name = path.name.lower().removesuffix(".gz")
    if path.name.lower().endswith(SUFFIXES):
        if name.endswith(JSON_SUFFIXES):
            return _json_rows(path, lines=not name.endswith(".json"))
        if name.endswith(".parquet"):
            return _parquet_rows(path)
        return _csv_rows(path, "\t" if name.endswith(".tsv") else ",")
    raise UsageError(f"{path} has none of the known file name endings: {', '.join(SUFFIXES)}")


def _open_text(path: Path) -> TextIO:
    # newline="\n": no translation, and a lone "\r" ends no line. utf-8-sig drops a byte-order mark if there is one.
    if path.name.lower().endswith(".gz"):
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="\n")
    return path.open(encoding="utf-8-sig", newline="\n")


def _json_rows(path: Path, *, lines: bool) -> Iterator[tuple[int | None, Any]]:
    """JSON of any shape: the content decides, as files named .json often hold lines, and now and then the reverse."""
    with _open_text(path) as file:
        character = file.read(1)
        while character and character in _JSON_SPACE:
            character = file.read(1)
    if character == "[":  # found without reading a line, as a list of half a gigabyte may be one line
        yield from _json_list(path)
    elif character and (lines or _holds_lines(path)):
        yield from _json_lines(path)
    elif character:
        yield from _json_object(path)


def _holds_lines(path: Path) -> bool:
    """Whether the first line is a JSON object of its own and others follow it."""
    with _open_text(path) as file:
        filled = (line for line in file if line.strip(_JSON_SPACE))
        first, second = next(filled, ""), next(filled, "")
    return bool(second) and _is_object(first)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(path: Path) -> Iterator[tuple[int | None, Any]]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            # str.strip() without an argument would take a line of U+2028 for a blank one
            if line.strip(_JSON_SPACE):
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _syntax_error(path, number, error) from error
                yield number, value


def _json_object(path: Path) -> Iterator[tuple[int | None, Any]]:
    with _open_text(path) as file:
        try:
            value = json.load(file)
        except json.JSONDecodeError as error:
            raise _syntax_error(path, error.lineno, error) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
            raise _syntax_error(path, 1, error) from error
    rows = [value]
    if isinstance(value, dict):
        rows = next((value[key] for key in ("data", "Data") if isinstance(value.get(key), list)), rows)
    for row in rows:
        yield None, row


def _json_list(path: Path) -> Iterator[tuple[int | None, Any]]:
    """The elements of a JSON list one by one (HotpotQA's training file is a list of half a gigabyte)."""
    with _open_text(path) as file:
        text = _JsonText(file, path)
        text.peek()
        text.at += 1  # past the "["
        mark = text.peek()
        while mark != "]":
            yield None, text.value()
            mark = text.peek()
            if mark not in (",", "]"):
                raise text.error(f"',' or ']' expected, not {mark!r}" if mark else "the file ends inside the list", text.at)
            if mark == ",":
                text.at += 1
                text.peek()
        text.at += 1
        if text.peek():
            raise text.error("more text after the end of the list", text.at)


class _JsonText:
    """A window on a JSON text: ``buffer[at:]`` is read and not used yet; ``lines`` lines lie before the buffer."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self.file, self.path = file, path
        self.buffer, self.at, self.lines = "", 0, 0
        self.decode = json.JSONDecoder().raw_decode

    def fill(self) -> bool:
        """Forget what is used, read at least as much as is left (so trying again stays linear); False at the end."""
        self.lines += self.buffer.count("\n", 0, self.at)
        block = self.file.read(max(_BLOCK, len(self.buffer) - self.at))
        self.buffer, self.at = self.buffer[self.at :] + block, 0
        return bool(block)

    def peek(self) -> str:
        """The next character that is not white space, without using it; "" at the file's end."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in _JSON_SPACE:
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.fill():
                return ""

    def value(self) -> Any:
        """The JSON value that begins at ``at``; one that the buffer cuts off is tried again with more text."""
        while True:
            try:
                value, end = self.decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                if _may_be_cut(error, len(self.buffer)) and self.fill():
                    continue
                raise self.error(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self.error(error, self.at) from error
            if end == len(self.buffer) and self.fill():  # a number may go on
                continue
            self.at = end
            return value

    def error(self, message: Exception | str, at: int) -> UsageError:
        return _syntax_error(self.path, self.lines + self.buffer.count("\n", 0, at) + 1, message)


def _may_be_cut(error: json.JSONDecodeError, length: int) -> bool:
    """Whether the text may merely end too early. A cut string's error points to its start, others to the end."""
    return error.msg.startswith("Unterminated string") or error.pos >= length - 16


def _parquet_rows(path: Path) -> Iterator[tuple[int | None, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
            for row in batch.to_pylist():
                yield None, row


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int | None, Any]]:
    csv.field_size_limit(_CELL_LIMIT)
    with _open_text(path) as file:
        # strict: a stray quote is an error, where the lenient mode would silently delete it
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(rows, [])
            if len(set(header)) < len(header):
                raise UsageError(f"{path}: two columns of the header line have the same name ({', '.join(header)})")
            for cells in rows:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise _syntax_error(path, rows.line_num, f"{len(cells)} cells under a header of {len(header)}")
                yield rows.line_num, {name: cell or None for name, cell in zip(header, cells, strict=True)}
        except csv.Error as error:
            raise _syntax_error(path, rows.line_num, error) from error


def _syntax_error(path: Path, line: int, error: Exception | str) -> UsageError:
    if isinstance(error, RecursionError):
        error = "nested too deeply"
    elif isinstance(error, json.JSONDecodeError):
        error = f"{error.msg}, column {error.colno}"
    kind = "CSV" if path.suffix.lower() in (".csv", ".tsv") else "JSON"
    return UsageError(f"{path}, line {line}: not valid {kind} ({_one_line(error)})")


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split()).rstrip(".")


# ---- how files write a value


def list_of(value: Any, key: str) -> list[Any]:
    """A list as it is; an object of parallel lists (how the hub stores lists of objects) as a list of objects."""
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        if len({len(column) for column in value.values()}) > 1:
            raise UsageError(f"the parallel lists of '{key}' ({names_of(value)}) differ in length")
        return [dict(zip(value, entry, strict=True)) for entry in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        what = f"an object with {names_of(value)}" if isinstance(value, Mapping) else kind_of(value)
        raise UsageError(f"'{key}' is {what} where a list was expected")
    return value


def text_of(value: Any) -> str:
    """A text as it is, a number as text (1974.0 as "1974"), None and NaN as ""; UsageError for lists and objects."""
    if isinstance(value, list | tuple | Mapping | bytes):
        raise UsageError(f"{kind_of(value)} stands where a text was expected")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # a column of whole numbers with gaps is stored as floats
    return "" if value is None or value != value else str(value)


def decode_json(value: Any) -> Any:
    """What a string of JSON holds (the hub's 2WikiMultihopQA); any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"a text that should hold a JSON list does not: {value[:60]!r}") from error


def holds_json(value: Any) -> bool:
    """Whether a value is a text that is a JSON list or object."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return False
    try:
        return isinstance(decode_json(value), list | dict)
    except UsageError:
        return False


def cell_values(cell: Any) -> list[Any]:
    """The strings in a text that is a list of strings (JSON or Python); a list as it is; any other value alone."""
    if not isinstance(cell, str) or not re.fullmatch(r"\s*\[.*\]\s*", cell, re.DOTALL):
        return cell if isinstance(cell, list) else [cell]
    for parse in (json.loads, ast.literal_eval):  # neither executes anything
        try:
            values = parse(cell.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return values
    return [cell]


def names_of(row: Any) -> str:
    """The keys of an object, for a message."""
    return ", ".join(map(str, row)) if isinstance(row, Mapping) and row else "(none)"


def kind_of(value: Any) -> str:
    """What a value is, for a message: 'null', 'a list'."""
    return "null" if value is None else f"a {type(value).__name__}"
