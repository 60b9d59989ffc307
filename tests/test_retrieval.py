"""BM25 over a corpus: what it finds, who keeps their own passages, and rows that are no passages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xcompress.formats import read_questions
from xcompress.retrieval import BM25, Retriever, read_corpus
from xcompress.schema import Passage, Question, UsageError

MINI = Path(__file__).parents[1] / "xcompress" / "mini"
MOLE = Passage("Mole", "A mole digs deep tunnels under the garden.")
OWL = Passage("Owl", "An owl hunts at night and sleeps by day.")
BAT = Passage("Bat", "A bat hangs upside down from the roof.")
ANIMALS = [MOLE, OWL, BAT]


def save(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return save(tmp_path / "corpus.jsonl", [{"title": p.title, "text": p.text} for p in ANIMALS])


def question(number: int, text: str, passages: tuple[Passage, ...] = ()) -> Question:
    return Question(f"q{number}", text, ("a",), passages)


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("Who digs tunnels?", MOLE),
        ("what hunts in the night", OWL),
        ("ROOF", BAT),
        ("the owl", OWL),  # by its title
        ("zzz unknown words but a bat", BAT),
    ],
)
def test_the_right_passage_comes_first(query: str, best: Passage) -> None:
    found = BM25(ANIMALS).search([query], 2)
    assert len(found) == 1 and len(found[0]) == 2
    assert found[0][0] == best


def test_rarer_and_repeated_words_weigh_more() -> None:
    texts = ["cat dog", "cat dog dog bird", "cat cat cat", "cat fish bird"]
    index = BM25([Passage("", text) for text in texts])
    assert [p.text for p in index.search(["dog"], 2)[0]] == ["cat dog dog bird", "cat dog"]
    assert index.search(["cat fish"], 1)[0][0].text == "cat fish bird"


@pytest.mark.parametrize("blank", ["the of and", "", "?!", "a", "zzz unknown"])
def test_queries_that_find_nothing_shift_no_others(blank: str) -> None:
    index = BM25(ANIMALS)
    found = index.search([blank, "owl", blank, "bat", blank], 1)
    assert [found[1][0], found[3][0]] == [OWL, BAT]
    assert len(found) == 5 and found[0] == found[2] == found[4]
    assert len(index.search([blank], 3)[0]) == 3


def test_a_blank_passage_is_not_what_a_blank_query_asks_for() -> None:
    passages = [Passage("", ""), Passage("The", "of the"), *ANIMALS]
    index = BM25(passages)
    assert index.search(["mole", "the of"], 1)[0] == [MOLE]
    unknown, blank = index.search(["zzz", "the of"], 5)
    assert blank == unknown, "neither has a match"
    assert BM25([Passage("", "the")]).search(["the", "mole"], 2) == [[Passage("", "the")]] * 2


def test_fewer_passages_than_asked() -> None:
    found = BM25(ANIMALS).search(["owl", "the"], 10)
    assert [len(passages) for passages in found] == [3, 3]
    assert all(set(passages) == set(ANIMALS) for passages in found)
    assert BM25([MOLE]).search(["owl"], 10) == [[MOLE]]


def test_questions_keep_their_own_passages(corpus: Path) -> None:
    own = (Passage("Own", "My own text."),)
    questions = [question(1, "Who hunts?"), question(2, "Who digs?", own), question(3, "of the"), question(4, "Who digs?")]
    found = Retriever(corpus).fill(questions, 2)
    assert [q.id for q in found] == ["q1", "q2", "q3", "q4"]
    assert found[1] == questions[1]
    assert (found[0].passages[0], found[3].passages[0]) == (OWL, MOLE)
    assert [len(q.passages) for q in found] == [2, 1, 2, 2]
    assert found[0].answers == ("a",) and not questions[0].passages


def test_a_corpus_that_nobody_needs_is_not_read(tmp_path: Path) -> None:
    questions = [question(1, "Who?", (MOLE,))]
    assert Retriever(tmp_path / "none.jsonl").fill(questions, 2) == questions


def test_read_corpus(tmp_path: Path) -> None:
    odd = "S = {x}\u2028 {{0}} \u0085"
    rows = [
        {"title": "T", "text": odd},
        {"id": 3, "contents": "alone"},
        {"title": None, "text": "x"},
        {"title": 1984, "text": 7},
    ]
    expected = [Passage("T", odd), Passage("", "alone"), Passage("", "x"), Passage("1984", "7")]
    assert read_corpus(save(tmp_path / "c.jsonl", rows)) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "T", "body": "x"}, r"row 2: a corpus row needs a text; it has title, body"),
        ({"title": "T", "text": ""}, r"row 2: a corpus row needs a text; it has title, text"),
        ("a string", r"row 2: a corpus row needs a text; it has str"),
        ({"text": ["a", "b"]}, r"row 2: a list stands where a text was expected"),
        ({"title": {"en": "T"}, "text": "x"}, r"row 2: a dict stands where a text was expected"),
    ],
)
def test_rows_that_are_no_passages_are_named(tmp_path: Path, row: Any, message: str) -> None:
    path = save(tmp_path / "corpus.jsonl", [{"text": "good"}, row])
    with pytest.raises(UsageError, match=f"corpus.jsonl, {message}"):
        read_corpus(path)


def test_missing_and_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name in ("none.jsonl", "empty.jsonl"):
        with pytest.raises(UsageError, match=name):
            read_corpus(tmp_path / name)


@pytest.mark.parametrize("split", ["test", "train"])
def test_the_mini_data_set_retrieves_ten_passages(split: str) -> None:
    questions = Retriever(MINI / "corpus.jsonl").fill(read_questions(MINI / f"{split}.jsonl").questions, 10)
    assert {len(set(q.passages)) for q in questions} == {10}
    found = [len(set(q.gold_titles) & {p.title for p in q.passages}) / len(q.gold_titles) for q in questions]
    assert sum(found) / len(found) > 0.8, "most of the evidence is retrieved"
