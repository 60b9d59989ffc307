"""Checks on the mini data set in ``xcompress/mini``."""

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest

MINI = Path(__file__).parents[1] / "xcompress" / "mini"
DATA_FILES = ("corpus.jsonl", "test.jsonl", "train.jsonl")
FILES = (*DATA_FILES, "README.md", "LICENSE")
SPLITS = ("test", "train")
KINDS = {"bridge", "comparison", "single"}


def read_rows(name: str) -> list[dict[str, Any]]:
    """Read one JSON object per line."""
    with (MINI / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def normalize(text: str) -> str:
    """Lower-case, drop punctuation and articles, squeeze spaces."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def contains(text: str, answer: str) -> bool:
    """Whether the normalized answer stands in the normalized text as whole words."""
    return f" {normalize(answer)} " in f" {normalize(text)} "


CORPUS = read_rows("corpus.jsonl")
QUESTIONS = {split: read_rows(f"{split}.jsonl") for split in SPLITS}
ALL_QUESTIONS = [row for split in SPLITS for row in QUESTIONS[split]]
PASSAGES = {row["title"]: row["text"] for row in CORPUS}


@pytest.mark.parametrize("name", FILES)
def test_encoding(name: str) -> None:
    """Files are UTF-8 without a BOM, with LF endings and a final newline."""
    raw = (MINI / name).read_bytes()
    raw.decode("utf-8")
    assert not raw.startswith(b"\xef\xbb\xbf")
    assert b"\r" not in raw
    assert raw.endswith(b"\n")


def test_fields() -> None:
    """Every row has exactly the documented fields, with no empty value."""
    for row in CORPUS:
        assert set(row) == {"id", "title", "text"}
        assert all(isinstance(value, str) and value == value.strip() != "" for value in row.values()), row["id"]
    for row in ALL_QUESTIONS:
        assert set(row) == {"id", "question", "answers", "type", "gold_titles"}
        assert row["question"].endswith("?")
        assert row["answers"] and all(answer.strip() for answer in row["answers"]), row["id"]


def test_minimum_counts() -> None:
    """The set stays large enough to be useful."""
    assert len(CORPUS) >= 120
    assert len(QUESTIONS["test"]) >= 40
    assert len(QUESTIONS["train"]) >= 16


def test_ids_unique() -> None:
    """No id occurs twice in the corpus and both splits together."""
    ids = [row["id"] for row in CORPUS + ALL_QUESTIONS]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("split", SPLITS)
def test_question_ids_name_their_split(split: str) -> None:
    """Question ids carry the name of their split."""
    assert all(re.fullmatch(rf"mini-{split}-\d{{3}}", row["id"]) for row in QUESTIONS[split])


def test_titles_unique() -> None:
    """Titles can be used as keys."""
    assert len(PASSAGES) == len(CORPUS)


def test_passage_length() -> None:
    """Every passage has 40 to 80 words."""
    lengths = {row["id"]: len(row["text"].split()) for row in CORPUS}
    assert {key: length for key, length in lengths.items() if not 40 <= length <= 80} == {}


def test_gold_titles() -> None:
    """Gold titles exist in the corpus; one for single-hop questions, two for the others."""
    for row in ALL_QUESTIONS:
        assert set(row["gold_titles"]) <= set(PASSAGES), row["id"]
        expected = 1 if row["type"] == "single" else 2
        assert len(row["gold_titles"]) == len(set(row["gold_titles"])) == expected, row["id"]


@pytest.mark.parametrize("split", SPLITS)
def test_kinds(split: str) -> None:
    """All kinds of question are present, and so are both yes and no."""
    rows = QUESTIONS[split]
    assert {row["type"] for row in rows} == KINDS
    assert {"yes", "no"} <= {row["answers"][0] for row in rows if row["type"] == "comparison"}


def test_yes_no_only_in_comparisons() -> None:
    """Yes/no answers have no alias and belong to comparison questions."""
    for row in ALL_QUESTIONS:
        if {"yes", "no"} & set(row["answers"]):
            assert row["type"] == "comparison" and len(row["answers"]) == 1, row["id"]


def test_main_answer_in_gold_passage() -> None:
    """Every main answer other than yes and no stands in a gold passage."""
    for row in ALL_QUESTIONS:
        answer = row["answers"][0]
        if answer not in {"yes", "no"}:
            assert 1 <= len(answer.split()) <= 5, row["id"]
            assert any(contains(f"{title}\n{PASSAGES[title]}", answer) for title in row["gold_titles"]), row["id"]


def test_bridge_entity_not_named() -> None:
    """Bridge questions do not name the title of their second passage."""
    for row in ALL_QUESTIONS:
        if row["type"] == "bridge":
            assert not contains(row["question"], row["gold_titles"][1]), row["id"]


def test_bridge_passages_linked() -> None:
    """The first gold passage of a bridge question names the second, or the other way round."""
    for row in ALL_QUESTIONS:
        if row["type"] == "bridge":
            first, second = row["gold_titles"]
            assert contains(PASSAGES[first], second) or contains(PASSAGES[second], first), row["id"]


def test_no_question_twice() -> None:
    """No question occurs twice within or across the splits."""
    questions = [normalize(row["question"]) for row in ALL_QUESTIONS]
    assert len(questions) == len(set(questions))
