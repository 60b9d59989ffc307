"""Questions from files: what is counted, what is refused, and what names the folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompress.config import ROOT
from xcompress.health import Health
from xcompress.schema import QUESTIONS, Passage, Question, UsageError
from xcompress.settings import SourceSettings
from xcompress.stages import prepare
from xcompress.stages.prepare import identity
from xcompress.store import Shard, StageFolder, file_digest, write_json

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


def load(source: SourceSettings, passages: int, skip: int = 0, limit: int | None = None) -> tuple[list[Question], Any]:
    """The questions of a source, and the report about them."""
    health = Health(passages)
    return list(prepare.stream(source, passages, health, Path(source.path).parent, skip, limit)), health.report()


# ---- health


def test_health_of_a_hand_made_file(tmp_path: Path) -> None:
    questions, found = load(save(tmp_path / "a.jsonl"), passages=3)
    assert [question.id for question in questions] == ["1", "2", "3", "5", "6"]
    (problem,) = found.pop("unusable_rows")
    assert problem["position"] == 4 and "no question text" in problem["reason"]
    assert found == {
        "version": 2,
        "questions": 5,
        "golds_not_matching_themselves": 0,
        "unlabelled": 1,  # 3
        "labelled": 4,
        "yes_no": 2,  # 2 and 5 (by the main answer)
        "answers_per_question": {"0": 1, "1": 3, "2": 1},
        "kinds": {},
        "repeated_questions": 0,
        "passages": 3 + 2 + 1 + 3 + 3,
        "passages_per_question": {"1": 1, "2": 1, "3": 3},
        "passages_asked_for": 3,
        "fewer_passages_than_asked": 2,  # 2 and 3
        "passages_left_out": 0,
        "questions_with_passages_left_out": 0,
        "words_per_passage": {"mean": round((15 + 3 + 3 + 9 + 12) / 12, 4), "longest": 6},
        "empty_passages": 2,  # one in 2, one in 5
        "passages_without_title": 0,
        "repeated_passages": 2,  # one in 1, one in 6
        "passages_with_html": 0,
        "passages_with_replacement_characters": 0,
        "with_gold_titles": 3,  # 1, 2 and 5
        "all_gold_titles_retrieved": 2,  # not 2: Cid is absent
        "without_any_gold_title": 0,
        "answer_string_in_passages": 2,  # 1 and, by its alias, 5
        "answer_string_in_passages_yes_no": 1,  # 5
        "at_k": {
            "1": {"gold_titles": 0.6667, "answer_string": 0.5},  # 1: 1 of 1, 2: 1 of 2, 5: 1 of 2
            "3": {"gold_titles": 0.8333, "answer_string": 0.5},
        },
        "examples": {
            "empty_passages": ["2", "5"],
            "repeated_passages": ["1", "6"],
            "unlabelled": ["3"],
            "without_answer_string": ["6"],
        },
    }
    json.dumps(found, allow_nan=False)


def test_health_after_passages_are_cut(tmp_path: Path) -> None:
    questions, found = load(save(tmp_path / "a.jsonl"), passages=1)
    assert [len(question.passages) for question in questions] == [1] * 5
    assert (found["fewer_passages_than_asked"], found["repeated_passages"], found["empty_passages"]) == (0, 0, 0)
    assert found["all_gold_titles_retrieved"] == 1
    assert (found["passages_left_out"], found["questions_with_passages_left_out"]) == (2 + 1 + 2 + 2, 4)


def test_health_of_nothing_labelled(tmp_path: Path) -> None:
    _, found = load(save(tmp_path / "a.jsonl", [ROWS[2], "no object"]), passages=3)
    assert (found["questions"], found["labelled"], found["unlabelled"], found["yes_no"]) == (1, 0, 1, 0)
    assert [row["position"] for row in found["unusable_rows"]] == [2]
    assert found["at_k"] == {"1": {"gold_titles": None, "answer_string": None}}


@pytest.mark.parametrize(
    ("texts", "html", "lost"),
    [
        (["a < b and c > d, AT&T &c; x<y>z", "<unk> <s>"], 0, 0),
        (["one<br>two", "R&amp;B", "<ref name='a'>x</ref>", "<BR />", "&#8217;", "&nbsp;", "a <i>b</i>"], 7, 0),
        (["caf\ufffd", "plain"], 0, 1),
    ],
)
def test_left_overs_are_counted_and_stay(texts: list[str], html: int, lost: int) -> None:
    health = Health(1)
    question = Question("q", "Who?", ("a",), tuple(Passage("T", text) for text in texts))
    health.add(question)
    found = health.report()
    assert (found["passages_with_html"], found["passages_with_replacement_characters"]) == (html, lost)


def test_repeated_questions_are_counted() -> None:
    health = Health(1)
    for number, text in enumerate(["Who dug it?", "who  dug it? ", "Who dug?", "WHO DUG IT?"]):
        health.add(Question(f"q{number}", text, ("a",), (Passage("T", "x"),)))
    assert health.report()["repeated_questions"] == 2
    assert health.report()["examples"]["repeated_questions"] == ["q1", "q3"]


def test_recall_at_k_counts_each_gold_title_once() -> None:
    health = Health(4)
    passages = tuple(Passage(title, text) for title, text in [("X", "-"), ("A", "gold"), ("A", "-"), ("B", "the Gold!")])
    health.add(Question("q", "?", ("gold",), passages, ("A", "B", "C")))
    health.add(Question("r", "?", ("none",), passages, ("X",)))
    assert health.report()["at_k"] == {
        "1": {"gold_titles": round((0 + 1) / 2, 4), "answer_string": 0.0},
        "4": {"gold_titles": round((2 / 3 + 1) / 2, 4), "answer_string": 0.5},
    }


# ---- load


def test_no_usable_question(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a.jsonl gives no questions \(all 2 rows are unusable; the first: no question text"):
        load(save(tmp_path / "a.jsonl", [ROWS[3], {**ROWS[3], "id": "7"}]), passages=3)


def test_everything_held_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a.jsonl gives no questions after the first 5, which are held out for calibration$"):
        load(save(tmp_path / "a.jsonl"), passages=3, skip=5)


def test_no_passages_and_no_corpus(tmp_path: Path) -> None:
    rows = [ROWS[0], {"id": "b", "question": "Who?", "answers": ["x"], "ctxs": []}]
    with pytest.raises(
        UsageError, match=r"1 of 2 questions have no passages \(the first: id 'b'\); set dataset.corpus to retrieve them"
    ):
        load(save(tmp_path / "a.jsonl", rows), passages=3)


def test_passages_from_a_corpus(tmp_path: Path) -> None:
    rows = [ROWS[0], {"id": "b", "question": "Who sold boats?", "answers": ["Bob"], "ctxs": []}]
    corpus = save(tmp_path / "corpus.jsonl", [A, B])
    source = SourceSettings(save(tmp_path / "a.jsonl", rows).path, corpus=corpus.path)
    (first, second), report = load(source, passages=2)
    assert [p.title for p in first.passages] == ["Ada", "Bob"]
    assert [p.title for p in second.passages] == ["Bob", "Ada"]
    assert report["unusable_rows"] == []


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


# ---- stored questions


def _folder(root: Path) -> StageFolder:
    return StageFolder(root, "questions", "x", {"any": 1}, QUESTIONS)


def test_stored_questions_are_read_shard_by_shard(tmp_path: Path) -> None:
    source = save(tmp_path / "a.jsonl")
    questions, report = load(source, 3)
    made = prepare.store(_folder(tmp_path), source, 3, 0, None, 2)
    for stored in (made, prepare.stored(_folder(tmp_path), 3)):
        assert stored is not None
        assert stored.sizes == (2, 2, 1) and len(stored) == 3
        assert [question for part in stored for question in part] == questions
        assert stored[2] == stored[-1] == questions[4:] and stored[1:] == [questions[2:4], questions[4:]]
        assert list(stored.column("id")) == [question.id for question in questions]
        assert stored.candidate_keys == tuple(prepare.candidate_key(part) for part in stored)
        assert stored.health == report


def test_a_missing_or_damaged_shard_is_not_taken_for_the_questions(tmp_path: Path) -> None:
    source = save(tmp_path / "a.jsonl")
    made = prepare.store(_folder(tmp_path), source, 3, 0, None, 2)
    path = made.folder.find(made.shards[1])
    assert path is not None
    path.write_bytes(path.read_bytes()[:-9])
    assert prepare.stored(_folder(tmp_path), 3) is None
    assert list(prepare.store(_folder(tmp_path), source, 3, 0, None, 2)) == list(load_parts(source))
    assert prepare.stored(_folder(tmp_path / "elsewhere"), 3) is None


def load_parts(source: SourceSettings) -> list[list[Question]]:
    questions, _ = load(source, 3)
    return [questions[:2], questions[2:4], questions[4:]]


def test_a_report_of_an_older_version_is_made_anew_and_the_questions_stay(tmp_path: Path) -> None:
    """Folders written before the report grew hold names and counts alone."""
    source = save(tmp_path / "a.jsonl")
    made = prepare.store(_folder(tmp_path), source, 3, 0, None, 2)
    files = {path: path.read_bytes() for path in made.folder.path.glob("*.parquet")}
    old = {"questions": 5, "unusable_rows": list(made.health["unusable_rows"])}
    write_json(made.folder.path / "manifest.json", {"shards": [shard.input for shard in made.shards], "health": old})
    for _ in range(2):
        again = prepare.stored(_folder(tmp_path), 3)
        assert again is not None
        unknown = {"passages_left_out": None, "questions_with_passages_left_out": None}
        assert dict(again.health) == {**made.health, **unknown}
        assert (again.sizes, again.candidate_keys, list(again)) == (made.sizes, made.candidate_keys, list(made))
    assert {path: path.read_bytes() for path in made.folder.path.glob("*.parquet")} == files
    assert [shard.stem for shard in again.shards] == [Shard(n, s.input).stem for n, s in enumerate(made.shards)]


def test_nothing_is_given_after_a_question_without_passages(tmp_path: Path) -> None:
    """The error counts all of them; half a data set is never stored as if it were the whole."""
    rows = [ROWS[0], {"id": "b", "question": "Who?", "ctxs": []}, ROWS[4], {"id": "c", "question": "Who?", "ctxs": []}]
    source = save(tmp_path / "a.jsonl", rows)
    given = []
    with pytest.raises(UsageError, match=r"2 of 4 questions have no passages \(the first: id 'b'\)"):
        given += [question.id for question in prepare.stream(source, 3, Health(3), tmp_path)]
    with pytest.raises(UsageError):
        prepare.store(_folder(tmp_path), source, 3, 0, None, 1)
    assert prepare.stored(_folder(tmp_path), 3) is None


filled = st.text(min_size=1, max_size=40).filter(lambda text: bool(text.strip()))
passage = st.builds(Passage, title=st.text(max_size=20), text=st.text(max_size=60))
questions_of_the_schema = st.lists(
    st.builds(
        Question,
        id=filled,
        question=filled,
        answers=st.lists(filled, unique=True, max_size=3).map(tuple),
        passages=st.lists(passage, min_size=1, max_size=4).map(tuple),
        gold_titles=st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=3).map(tuple),
        kind=st.text(max_size=10),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda question: question.id,
)


def as_row(question: Question) -> dict[str, Any]:
    """A question in the documented schema of a file."""
    return {
        "_id": question.id,
        "question": question.question,
        "answers": list(question.answers),
        "ctxs": [{"title": p.title, "text": p.text} for p in question.passages],
        "supporting_titles": list(question.gold_titles),
        "type": question.kind,
    }


@settings(max_examples=60, deadline=None)
@given(
    questions=questions_of_the_schema,
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
    shard_size=st.integers(1, 4),
)
def test_any_rows_survive_prepare_store_and_load(
    tmp_path_factory: pytest.TempPathFactory,
    questions: list[Question],
    ascii_only: bool,
    end: str,
    mark: str,
    shard_size: int,
) -> None:
    """U+2028, U+0085, byte-order mark, CRLF, braces, NUL, astral characters: what is read back is what was written."""
    folder = tmp_path_factory.mktemp("any")
    lines = "".join(json.dumps(as_row(question), ensure_ascii=ascii_only) + end for question in questions)
    (folder / "a.jsonl").write_bytes((mark + lines).encode())
    source = SourceSettings(str(folder / "a.jsonl"))
    made = prepare.store(_folder(folder), source, 4, 0, None, shard_size)
    again = prepare.stored(_folder(folder), 4)
    assert again is not None
    assert [question for part in made for question in part] == questions
    assert [question for part in again for question in part] == questions
    assert again.health["questions"] == len(questions) and again.health["unusable_rows"] == []
    assert again.health["unlabelled"] == sum(not question.answers for question in questions)


@pytest.mark.slow
def test_a_file_of_300_mb_prepares_in_little_memory(tmp_path: Path) -> None:
    """Peak memory of the whole command, libraries included, measured by the kernel: below 1.5 GB."""
    text = "old mill by the river and a bridge over it " * 14  # 30 passages of 600 characters: 20 kB a row
    ctxs = [{"title": f"Town {k}", "text": f"{text}{k}"} for k in range(30)]
    path = tmp_path / "big.jsonl"
    count = 0
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < 300_000_000:
            file.write(json.dumps({"_id": f"q{count}", "question": f"What is {count}?", "answers": ["x"], "ctxs": ctxs}) + "\n")
            count += 1
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), "stages=[prepare]", "dataset=nq", f"dataset.path={path}"]
    command += [f"run_root={tmp_path / 'runs'}", "reader.model=nobody/nothing"]
    # Through a small process of its own: a child starts with the peak of the process that made it, and pytest holds models.
    code = "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode;"
    code += "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True, check=False)
    screen, _, peak = done.stdout.rpartition("peak ")
    assert done.returncode == 0 and f"{count:,}" in screen
    assert 0 < int(peak) * 1024 < 1.5e9
