"""Reading records: encodings, line ends, shapes of JSON, compression, CSV, Parquet, and what is wrong with a file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xcompress import files
from xcompress.files import cell_values, list_of, read_records, text_of
from xcompress.schema import UsageError

ODD = "line\u2028separator, next\u0085line, \x1c\x0b\x0c, \U0001f9ea {braces} é"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def values(path: Path) -> list[Any]:
    return [record.value for record in read_records(path)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_end_at_newline_only(tmp_path: Path, end: str, mark: str, last: bool) -> None:
    rows = [{"id": n, "text": ODD} for n in range(3)]
    text = end.join(json.dumps(row, ensure_ascii=False) for row in rows)
    path = write(tmp_path / "a.jsonl", mark + text + (end if last else ""))
    assert values(path) == rows
    assert [(record.position, record.line) for record in read_records(path)] == [(1, 1), (2, 2), (3, 3)]


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '\n{"a": 1}\n \t\r\n{"a": 2}\n\n')
    assert [(record.position, record.line) for record in read_records(path)] == [(1, 2), (2, 4)]
    assert [record.where for record in read_records(path)] == ["row 1 (line 2)", "row 2 (line 4)"]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl", "a.JSON"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_list(tmp_path: Path, name: str, indent: int | None) -> None:
    rows = [{"id": n, "text": ODD, "deep": [[1, -2.5e3], {"x": None}]} for n in range(4)]
    content = f"\n {json.dumps(rows, ensure_ascii=False, indent=indent)} \n".encode()
    assert values(write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)) == rows


@pytest.mark.parametrize("key", ["data", "Data"])
def test_json_object(tmp_path: Path, key: str) -> None:
    rows = [{"a": 1}, {"a": 2}]
    assert values(write(tmp_path / "a.json", json.dumps({"version": 1, key: rows}, indent=1))) == rows
    assert values(write(tmp_path / "b.json", json.dumps({"a": 1}))) == [{"a": 1}]
    assert values(write(tmp_path / "c.json", json.dumps({"a": {"b": 1}}, indent=1))) == [{"a": {"b": 1}}]


def test_json_lines_named_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"data": 1}\n\n{"data": 2}')
    assert [(record.value, record.line) for record in read_records(path)] == [({"data": 1}, 1), ({"data": 2}, 3)]
    packed = write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"data": 1}\n{"data": 2}\n'))
    assert values(packed) == [{"data": 1}, {"data": 2}]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_json_list_read_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    # A block may end anywhere: inside an escape, a number, a literal, a string, between elements.
    monkeypatch.setattr(files, "_BLOCK", block)
    rows: list[Any] = [12345, -1.5e10, True, None, 'a\n"\\\u2028 é\U0001f9ea', {"k": [False, {"x": "y" * 200}]}, [], 7]
    for ascii_only in (True, False):
        path = write(tmp_path / "a.json", json.dumps(rows, ensure_ascii=ascii_only, indent=1))
        assert values(path) == rows
    with pytest.raises(UsageError, match="line 3"):
        values(write(tmp_path / "b.json", '[{"a": 1},\n{"a": 2},\n{"a" 3},\n{"a": 4}' + " " * 50 + "]"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n{"a": 3}\n', "line 2: not valid JSON"),
        ("a.jsonl", '{"a": 1}\n{"a": 2', "line 2: not valid JSON"),
        ("a.json", '[{"a": 1},\n {"a": 2}\n', "line 3: not valid JSON .the file ends inside the list"),
        ("a.json", '[{"a": 1}\n {"a": 2}]', "line 2: not valid JSON .',' or ']' expected, not '{'"),
        ("a.json", '[{"a": 1}, ]', "line 1: not valid JSON"),
        ("a.json", '[{"a": 1}]\n[2]', "line 2: not valid JSON .more text"),
        ("a.json", '{"a": 1,\n"b" 2}', "line 2: not valid JSON"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", '{"a": ' + "[" * 100_000, "nested too deeply"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}", "line 1: not valid JSON"),
        ("a.jsonl", "", "empty"),
        ("a.jsonl", "\ufeff\n \n", "empty"),
        ("a.json", " \n", "empty"),
        ("a.json", "[]", "empty"),
        ("a.csv", "", "empty"),
        ("a.csv", "id,question\n", "empty"),
        ("a.csv", "id,question\n1,a,b\n", "line 2: not valid CSV .3 cells under a header of 2"),
        ("a.csv", 'id,question\n1,"Heroes" again\n', "line 2: not valid CSV"),
        ("a.csv", "id,id\n1,2\n", "same name"),
        ("a.txt", "x", "known file name endings"),
        ("a.json.gz", "[1]", "cannot be read"),
        ("a.parquet", "PAR1", "cannot be read"),
        ("a.jsonl", b'{"a": "\xe9"}\n', "not UTF-8"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        values(write(tmp_path / name, content))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": 1}\n' * 1000)
    with pytest.raises(UsageError, match="cannot be read"):
        values(write(tmp_path / "a.jsonl.gz", whole[:-20]))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*a\.jsonl"):
        values(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="is a folder"):
        values(tmp_path)


def test_csv_and_tsv(tmp_path: Path) -> None:
    content = '\ufeffid,question,note\r\n1,"He said ""hi"",\nthen left",\r\n\r\n2,plain\u2028text,x\r\n'
    rows = [
        {"id": "1", "question": 'He said "hi",\nthen left', "note": None},
        {"id": "2", "question": "plain\u2028text", "note": "x"},
    ]
    assert values(write(tmp_path / "a.csv", content)) == rows
    assert [record.line for record in read_records(tmp_path / "a.csv")] == [3, 5]
    long = "word " * 50_000
    assert values(write(tmp_path / "a.tsv", f"a\tb\n{long}\t1\n")) == [{"a": long, "b": "1"}]


def test_parquet(tmp_path: Path) -> None:
    rows = [{"id": n, "ctxs": [{"title": "t", "text": ODD}], "answers": [] if n else ["x"]} for n in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=100)
    assert values(tmp_path / "a.parquet") == rows
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match="empty"):
        values(tmp_path / "b.parquet")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_streaming_needs_little_memory(tmp_path: Path, name: str) -> None:
    row = json.dumps({"id": 1, "text": "x" * 20_000})
    rows = [row] * 1000  # 20 MB
    write(tmp_path / name, "\n".join(rows) if name == "a.jsonl" else "[" + ",".join(rows) + "]")
    tracemalloc.start()
    assert sum(1 for _ in read_records(tmp_path / name)) == 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


def test_values() -> None:
    assert [text_of(value) for value in ("a", 7, 7.0, 2.5, True, None, float("nan"), float("inf"))] == [
        "a", "7", "7", "2.5", "True", "", "", "inf",
    ]  # fmt: skip
    bad: Any
    for bad in ([], {}, b"x"):
        with pytest.raises(UsageError):
            text_of(bad)
    assert list_of({"a": [1, 2], "b": [3, 4]}, "k") == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert list_of({"a": [], "b": []}, "k") == [] == list_of({}, "k")
    for bad in ({"a": [1], "b": []}, {"a": 1}, "text", None):
        with pytest.raises(UsageError, match="'k'"):
            list_of(bad, "k")
    assert cell_values('["a", "b"]') == cell_values("['a', 'b']") == ["a", "b"]
    assert cell_values("[1, 2]") == ["[1, 2]"] and cell_values("[x]") == ["[x]"] and cell_values(3) == [3]
    assert cell_values("[]") == [] and cell_values('["a", 1]') == ['["a", 1]']
