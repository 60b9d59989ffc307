"""Folders and shards: whole or absent, found by name, and damage is seen."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompress.schema import ANSWERS, CANDIDATES, QUESTIONS, SCORES, Passage, Question, from_row, to_row
from xcompress.store import Shard, StageFolder, content_digest, digest, write_atomically, write_json

ODD = "a\u2028b\u0085c\0d\U0001f9ea {lone {{braces}} } \r\n\t é \x1c\ufeff"
SHARD = Shard(3, "abcdef012345")
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])
ROWS: list[dict[str, Any]] = [{"id": f"q{n}", "n": n} for n in range(50)]


def folder(root: Path, schema: pa.Schema = SCHEMA, **identity: Any) -> StageFolder:
    return StageFolder(root, "questions", "mini", {"version": 1, **identity}, schema)


# ---- atomic files


@pytest.mark.parametrize("old", [b"old", None])
def test_a_failing_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes | None) -> None:
    path = tmp_path / "deep" / "a.bin"
    if old is not None:
        write_atomically(path, old)

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert (path.read_bytes() if path.exists() else None) == old
    assert list(path.parent.iterdir()) == ([path] if old is not None else [])


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"long content")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_json_is_strict(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1.5, None, ODD]})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"x": [1.5, None, ODD]}
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            write_json(tmp_path / "a.json", {"x": value})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["x"][0] == 1.5, "the old file stays"


# ---- digests

TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, JSON, max_size=5))
def test_digest_does_not_depend_on_the_order_of_keys(value: dict[str, Any]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))


def test_digest_depends_on_everything_else() -> None:
    values: list[Any] = [
        {},
        [],
        [1, 2],
        [2, 1],
        [[1], 2],
        {"a": 1},
        {"a": 2},
        {"b": 1},
        {"a": "1"},
        {"a": None},
        {"a": [1]},
        "é",
        "e\u0301",
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": {"c": 1, "b": 2}}) == digest({"a": {"b": 2, "c": 1}})
    with pytest.raises(ValueError, match="JSON"):
        digest(float("nan"))


# ---- shards


def test_a_shard_is_found_by_name(tmp_path: Path) -> None:
    path = folder(tmp_path).write(SHARD, ROWS)
    assert path.name == f"00003-abcdef012345-{content_digest(path.read_bytes())}.parquet"
    again = folder(tmp_path)
    assert again.find(SHARD) == path
    assert again.read(SHARD) == ROWS
    assert again.find(Shard(3, "abcdef012346")) is None and again.find(Shard(2, SHARD.input)) is None
    with pytest.raises(FileNotFoundError, match="00004-abcdef012345"):
        again.read(Shard(4, SHARD.input))
    assert json.loads((again.path / "identity.json").read_text(encoding="utf-8")) == {"version": 1}


def test_folders_are_named_by_their_identity(tmp_path: Path) -> None:
    names = {folder(tmp_path, seed=seed).path.name for seed in (0, 1, 0)}
    assert len(names) == 2 and all(name.startswith("mini-") for name in names)


def test_a_shard_is_found_after_it_was_sought(tmp_path: Path) -> None:
    shards = folder(tmp_path)
    assert shards.find(SHARD) is None
    path = shards.write(SHARD, ROWS)
    assert shards.find(SHARD) == path
    assert shards.read(SHARD) == ROWS


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(at: int) -> Any:
    def flip(data: bytes) -> bytes:
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return flip


@pytest.mark.parametrize(
    "damage", [_cut, _flip(40), _flip(-20), _flip(-1), lambda _: b"", lambda data: data + b"x"],
    ids=["cut", "middle", "footer", "last byte", "empty", "longer"],
)  # fmt: skip
def test_damage_is_named_set_aside_and_missing(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    shards = folder(tmp_path)
    path = shards.write(SHARD, ROWS)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    with caplog.at_level(logging.WARNING):
        assert folder(tmp_path).find(SHARD) is None
    assert str(path) in caplog.text and "damaged" in caplog.text
    assert not path.exists() and path.with_suffix(".damaged").read_bytes() == damage(good)
    caplog.clear()
    assert folder(tmp_path).find(SHARD) is None
    assert not caplog.records, "said once"
    assert folder(tmp_path).write(SHARD, ROWS).read_bytes() == good, "computed again, it is what it was"
    assert folder(tmp_path).read(SHARD) == ROWS


def test_damage_after_the_listing_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = folder(tmp_path)
    path = shards.write(SHARD, ROWS)
    assert shards.find(SHARD) == path
    path.write_bytes(path.read_bytes()[:-3])
    assert shards.find(SHARD) is None
    with pytest.raises(FileNotFoundError):
        shards.read(SHARD)
    assert caplog.text.count("is damaged") == 1


def test_two_contents_of_one_shard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = folder(tmp_path).write(SHARD, ROWS), folder(tmp_path).write(SHARD, ROWS[:3])
    one, other = sorted([first, second])
    assert folder(tmp_path).find(SHARD) == one, "always the same one"
    one.write_bytes(b"broken")
    assert folder(tmp_path).find(SHARD) == other, "a damaged one does not hide a good one"
    assert caplog.text.count("is damaged") == 1


def test_half_written_files_of_a_killed_process_are_no_shards(tmp_path: Path) -> None:
    shards = folder(tmp_path)
    path = shards.write(SHARD, ROWS)
    path.rename(path.with_name(f".{path.name}.123.part"))
    assert folder(tmp_path).find(SHARD) is None


# ---- notes of work


def test_notes_survive_a_cut_last_line(tmp_path: Path) -> None:
    shards = [Shard(n, SHARD.input) for n in range(4)]
    stage = folder(tmp_path)
    for n, shard in enumerate(shards[:3]):
        stage.write(shard, ROWS, {"seconds": n, "what": ODD})
    log = stage.path / "work.jsonl"
    log.write_bytes(log.read_bytes()[:-9])  # a kill while the third was written
    assert [note["seconds"] for note in folder(tmp_path).work(shards)] == [0, 1]
    folder(tmp_path).write(shards[3], ROWS, {"seconds": 3})
    assert [note["seconds"] for note in folder(tmp_path).work(shards)] == [0, 1, 3], "the cut line costs no other"
    folder(tmp_path).write(shards[2], ROWS, {"seconds": 2})
    assert [note["seconds"] for note in folder(tmp_path).work(reversed(shards))] == [3, 2, 1, 0]


def test_the_last_note_of_a_shard_counts(tmp_path: Path) -> None:
    stage = folder(tmp_path)
    assert stage.work([SHARD]) == []
    stage.write(SHARD, ROWS, {"seconds": 1})
    stage.write(SHARD, ROWS, {"seconds": 2})
    stage.write(Shard(4, SHARD.input), ROWS)
    assert [note["seconds"] for note in stage.work([Shard(4, SHARD.input), SHARD])] == [2]


# ---- rows


def _question(text: str) -> dict[str, Any]:
    question = Question(text + "1", text, (text, ""), (Passage(text, text), Passage("", "")), (text,), text)
    row = to_row(question)
    assert from_row(row) == question
    return row


def _candidate(text: str) -> dict[str, Any]:
    round_ = {
        "round": 1, "prompt_tokens": 5, "new_tokens": 2, "finish_reason": "stop", "text": text, "summary": text,
        "evaluation": text, "verdict": "missing", "passages_dropped": 0, "tokens_removed": 0, "logprob_sum": -1.5,
    }  # fmt: skip
    return {"question_id": text, "candidate": 0, "summary": text, "rounds": [round_, round_], "compressor_tokens": 14}


def _score(text: str) -> dict[str, Any]:
    return {
        "question_id": text, "candidate": 1, "status": text, "tokens": 3, "nll": 0.25, "scored_tokens": 2,
        "token_logprobs": [None, -0.5, -1.0], "first_token": 7,
        "ratio": [0.5, 1.0], "sps": [1.5, None, 2.0],
    }  # fmt: skip


def _answer(text: str) -> dict[str, Any]:
    return {
        "question_id": text, "source": "candidate", "candidate": None, "prediction": text, "prompt_tokens": 9, "new_tokens": 1,
        "finish_reason": "length", "passages_dropped": 0, "tokens_removed": 0, "logprob_sum": -0.5,
    }  # fmt: skip


KINDS = [(QUESTIONS, _question), (CANDIDATES, _candidate), (SCORES, _score), (ANSWERS, _answer)]


@pytest.mark.parametrize(("schema", "row"), KINDS, ids=["questions", "candidates", "scores", "answers"])
def test_odd_texts_survive(tmp_path: Path, schema: pa.Schema, row: Any) -> None:
    assert set(row("")) == set(schema.names), "a row with every column"
    rows = [row(text) for text in (ODD, "", "\0", "\u2028", "\u0085", "{", "}}", " \n", "\U0010ffff")]
    folder(tmp_path, schema).write(SHARD, rows)
    found = folder(tmp_path, schema).read(SHARD)
    for name in schema.names:  # lists without gaps come back as arrays
        got = [list(row[name]) if isinstance(row[name], np.ndarray) else row[name] for row in found]
        assert got == [row[name] for row in rows], name


@settings(max_examples=25, deadline=None)
@given(text=TEXT)
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    root = tmp_path_factory.mktemp("store")
    folder(root, QUESTIONS).write(SHARD, [_question(text)])
    assert folder(root, QUESTIONS).read(SHARD) == [_question(text)]
