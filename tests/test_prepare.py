"""Questions from files: what is counted, what is refused, and what names the folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from xcompress.formats import Problem
from xcompress.schema import UsageError
from xcompress.settings import SourceSettings
from xcompress.stages.prepare import file_digest, health, identity, load

A, B = {"title": "Ada", "text": "Ada Lovelace was born in London."}, {"title": "Bob", "text": "Bob sold boats."}
EMPTY = {"title": "Nil", "text": " "}
GOLD = ["Bob", "Ada"]
ROWS: list[dict[str, Any]] = [
    {"id": "1", "question": "Where was Ada born?", "answers": ["London"], "ctxs": [A, B, A], "supporting_titles": ["Ada"]},
    {"id": "2", "question": "Did Bob sell?", "answers": ["Yes"], "ctxs": [B, EMPTY], "supporting_titles": ["Bob", "Cid"]},
    {"id": "3", "question": "Who was Cid?", "answers": [], "ctxs": [B]},
    {"id": "4", "question": "", "answers": ["x"], "ctxs": [A]},
    {"id": "5", "question": "What did Bob sell?", "answers": ["no", "boats"], "ctxs": [B, A, EMPTY], "supporting_titles": GOLD},
    {"id": "6", "question": "Is Bob rich?", "answers": ["Lisbon"], "ctxs": [A, B, B]},
]  # fmt: skip


def save(path: Path, rows: list[Any] = ROWS) -> SourceSettings:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return SourceSettings(str(path))


# ---- health


def test_health_of_a_hand_made_file(tmp_path: Path) -> None:
    questions, problems = load(save(tmp_path / "a.jsonl"), passages=3)
    assert [question.id for question in questions] == ["1", "2", "3", "5", "6"]
    found = health(questions, problems, wanted_passages=3)
    assert found.pop("unusable_rows") == [{"position": 4, "reason": problems[0].reason}]
    assert "no question text" in problems[0].reason
    assert found == {
        "questions": 5,
        "golds_not_matching_themselves": 0,
        "unlabelled": 1,  # 3
        "labelled": 4,
        "yes_no": 2,  # 2 and 5 (by the main answer)
        "passages_per_question": {"1": 1, "2": 1, "3": 3},
        "fewer_passages_than_asked": 2,  # 2 and 3
        "empty_passages": 2,  # one in 2, one in 5
        "repeated_passages": 2,  # one in 1, one in 6
        "with_gold_titles": 3,  # 1, 2 and 5
        "all_gold_titles_retrieved": 2,  # not 2: Cid is absent
        "answer_string_in_passages": 2,  # 1 and, by its alias, 5
    }


def test_health_after_passages_are_cut(tmp_path: Path) -> None:
    questions, problems = load(save(tmp_path / "a.jsonl"), passages=1)
    assert [len(question.passages) for question in questions] == [1] * 5
    found = health(questions, problems, wanted_passages=1)
    assert (found["fewer_passages_than_asked"], found["repeated_passages"], found["empty_passages"]) == (0, 0, 0)
    assert found["all_gold_titles_retrieved"] == 1


def test_health_of_nothing_labelled(tmp_path: Path) -> None:
    questions, _ = load(save(tmp_path / "a.jsonl", [ROWS[2]]), passages=3)
    found = health(questions, [Problem(9, "why")], wanted_passages=3)
    assert (found["questions"], found["labelled"], found["unlabelled"], found["yes_no"]) == (1, 0, 1, 0)
    assert found["unusable_rows"] == [{"position": 9, "reason": "why"}]
    json.dumps(found, allow_nan=False)


# ---- load


def test_no_usable_question(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a.jsonl gives no questions \(all 2 rows are unusable; the first: no question text"):
        load(save(tmp_path / "a.jsonl", [ROWS[3], {**ROWS[3], "id": "7"}]), passages=3)


def test_everything_held_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a.jsonl gives no questions after the first 5, which are held out for calibration$"):
        load(save(tmp_path / "a.jsonl"), passages=3, skip=5)


def test_no_passages_and_no_corpus(tmp_path: Path) -> None:
    rows = [ROWS[0], {"id": "b", "question": "Who?", "answers": ["x"], "ctxs": []}]
    with pytest.raises(UsageError, match=r"1 of 2 questions have no passages \(the first: id 'b'\); set dataset.corpus"):
        load(save(tmp_path / "a.jsonl", rows), passages=3)


def test_passages_from_a_corpus(tmp_path: Path) -> None:
    rows = [ROWS[0], {"id": "b", "question": "Who sold boats?", "answers": ["Bob"], "ctxs": []}]
    corpus = save(tmp_path / "corpus.jsonl", [A, B])
    source = SourceSettings(save(tmp_path / "a.jsonl", rows).path, corpus=corpus.path)
    (first, second), problems = load(source, passages=2)
    assert [p.title for p in first.passages] == ["Ada", "Bob"]
    assert [p.title for p in second.passages] == ["Bob", "Ada"]
    assert problems == []


@pytest.mark.parametrize(
    ("skip", "limit", "ids"),
    [
        (0, None, "12356"),
        (0, 2, "12"),
        (2, 2, "35"),
        (2, None, "356"),
        (3, 100, "56"),
        (4, 1, "6"),
    ],
)
def test_skip_and_limit_count_usable_questions(tmp_path: Path, skip: int, limit: int | None, ids: str) -> None:
    questions, _ = load(save(tmp_path / "a.jsonl"), 3, skip, limit)
    assert "".join(question.id for question in questions) == ids


def test_held_out_rows_and_the_rest_share_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "a.jsonl")
    held, rest = load(source, 3, 0, 2)[0], load(source, 3, 2)[0]
    assert [question.id for question in held + rest] == [question.id for question in load(source, 3)[0]]


# ---- identity


def test_identity_follows_content_not_name_or_time(tmp_path: Path) -> None:
    source = save(tmp_path / "a.jsonl")
    copied = tmp_path / "other" / "b.jsonl"
    copied.parent.mkdir()
    shutil.copy(source.path, copied)
    os.utime(copied, (1, 1))
    before = identity(source, 3)
    assert identity(SourceSettings(str(copied)), 3) == before
    json.dumps(before)
    copied.write_bytes(copied.read_bytes().replace(b"boats", b"goats"))
    assert identity(SourceSettings(str(copied)), 3) != before


def test_identity_follows_every_setting(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl").path
    corpus, other = save(tmp_path / "c.jsonl", [A]).path, save(tmp_path / "d.jsonl", [B]).path
    shutil.copy(path, tmp_path / "a.csv")  # the ending says how a file is read
    sources = [
        SourceSettings(path),
        SourceSettings(path, "ctxs"),
        SourceSettings(path, "table", {"question": "q"}),
        SourceSettings(path, "table", {"question": "r"}),
        SourceSettings(path, corpus=corpus),
        SourceSettings(path, corpus=other),
        SourceSettings(str(tmp_path / "a.csv")),
    ]
    found = [json.dumps(identity(source, passages)) for source in sources for passages in (3, 4)]
    assert len(set(found)) == len(found)


def _beir(root: Path) -> Path:
    (root / "qrels").mkdir(parents=True)
    (root / "queries.jsonl").write_text('{"_id": "q", "text": "Who?"}\n', encoding="utf-8")
    (root / "corpus.jsonl").write_text('{"_id": "d", "title": "T", "text": "x"}\n', encoding="utf-8")
    (root / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n", encoding="utf-8")
    return root


@pytest.mark.parametrize("part", ["", "qrels/test.tsv"])
@pytest.mark.parametrize("changed", ["queries.jsonl", "corpus.jsonl", "qrels/test.tsv"])
def test_identity_of_a_beir_folder(tmp_path: Path, part: str, changed: str) -> None:
    one, two = _beir(tmp_path / "one"), _beir(tmp_path / "two")
    sources = [SourceSettings(str(root / part), "beir") for root in (one, two)]
    assert identity(sources[0], 3) == identity(sources[1], 3)
    with (two / changed).open("a", encoding="utf-8") as file:
        file.write("\n")
    assert identity(sources[0], 3) != identity(sources[1], 3)


def test_digest_of_a_folder_tells_its_files_apart(tmp_path: Path) -> None:
    for root, names in (("one", ("ab", "c")), ("two", ("a", "bc"))):
        for name, content in zip(("x", "y"), names, strict=True):
            (tmp_path / root).mkdir(exist_ok=True)
            (tmp_path / root / name).write_text(content, encoding="utf-8")
    assert file_digest(tmp_path / "one") != file_digest(tmp_path / "two")
