"""Every source format from rows written here, real samples where the shared data is present, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompress.formats import (
    FORMATS,
    LoadedQuestions,
    Problem,
    QuestionFile,
    detect_format,
    gold_answers,
    load_questions,
    read_questions,
)
from xcompress.schema import Passage, Question, UsageError

SHARED = Path(__file__).parents[2] / "shared" / "data"
RAW = SHARED / "raw_samples"
needs_shared_data = pytest.mark.skipif(not RAW.exists(), reason="the shared data is not here")

MOLE = (Passage("Mole", "A mole digs. It is shy."), Passage("Owl", "An owl flies."))
CTXS = [{"title": "Mole", "text": "A mole digs. It is shy."}, {"title": "Owl", "text": "An owl flies."}]


def save(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def load(tmp_path: Path, *rows: Any, name: str = "a.jsonl", **how: Any) -> LoadedQuestions:
    return read_questions(save(tmp_path / name, list(rows)), **how)


def only(tmp_path: Path, row: Any, format: str) -> Question:
    """The one question of a row, read as ``format`` and, detected, as ``auto`` alike."""
    named = load(tmp_path, row, format=format)
    assert named.problems == []
    assert load(tmp_path, row) == named, "auto reads it alike and says which format it took"
    return named.questions[0]


# ---- the formats

HOTPOT: dict[str, Any] = {
    "_id": "h1",
    "question": "Is a mole shy?",
    "answer": "yes",
    "type": "bridge",
    "level": "easy",
    "supporting_facts": [["Mole", 1], ["Mole", 0], ["Bat", 2]],
    "context": [["Mole", ["A mole digs.", " It is shy."]], ["Owl", ["An owl flies. "]]],
}
HOTPOT_HUB: dict[str, Any] = {
    **{key: HOTPOT[key] for key in ("question", "answer", "type", "level")},
    "id": "h1",
    "supporting_facts": {"title": ["Mole", "Mole", "Bat"], "sent_id": [1, 0, 2]},
    "context": {"title": ["Mole", "Owl"], "sentences": [["A mole digs.", " It is shy."], ["An owl flies. "]]},
}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_hotpotqa_in_both_shapes(tmp_path: Path, name: str) -> None:
    expected = Question("h1", "Is a mole shy?", ("yes",), MOLE, ("Mole", "Bat"), "bridge")
    for row in (HOTPOT, HOTPOT_HUB) if name != "a.parquet" else (HOTPOT_HUB,):
        loaded = load(tmp_path, row, name=name)
        assert loaded == LoadedQuestions([expected], [], "hotpotqa")
    # fullwiki: no gold title among the passages is no error; the test split has no answers and no facts
    row = {"_id": "h2", "question": "q?", "context": [["Owl", ["An owl flies."]]]}
    assert only(tmp_path, row, "hotpotqa") == Question("h2", "q?", (), (MOLE[1],))


def test_hotpotqa_words_never_run_together(tmp_path: Path) -> None:
    row = {**HOTPOT, "context": [["Mole", ["A mole digs.", "It is shy."]], ["Owl", "An owl flies."]]}
    assert only(tmp_path, row, "hotpotqa").passages == MOLE
    # but where the row has the spaces, sentences are joined as they are, even the odd one without
    row["context"] = [["Mole", ["A mole digs.", " It is shy."]], ["Quote", ['He said: "', 'Dig."']]]
    assert only(tmp_path, row, "hotpotqa").passages == (MOLE[0], Passage("Quote", 'He said: "Dig."'))


def test_2wikimqa(tmp_path: Path) -> None:
    context = [["Mole", ["A mole digs.", "It is shy."]], ["Owl", ["An owl flies."]]]
    facts = [["Owl", 0], ["Mole", 1]]
    row = {
        "_id": "w1", "type": "comparison", "question": "Which digs?", "context": context, "supporting_facts": facts,
        "evidences": [["mole", "does", "dig"]], "answer": "the mole",
    }  # fmt: skip
    expected = Question("w1", "Which digs?", ("the mole",), MOLE, ("Owl", "Mole"), "comparison")
    assert only(tmp_path, row, "2wikimqa") == expected
    strings = {**row, **{key: json.dumps(row[key]) for key in ("context", "supporting_facts", "evidences")}}
    assert only(tmp_path, strings, "2wikimqa") == expected
    assert load(tmp_path, strings, name="a.parquet").questions == [expected]
    with pytest.raises(UsageError, match=r"'w1'.*JSON list"):
        load(tmp_path, {**row, "context": "[oops"}, format="2wikimqa")


def test_musique(tmp_path: Path) -> None:
    row = {
        "id": "2hop__1_2",
        "question": "Who digs?",
        "paragraphs": [{"idx": 0, "title": p.title, "paragraph_text": p.text, "is_supporting": p.title == "Owl"} for p in MOLE],
        "question_decomposition": [{"id": 1, "question": "x", "answer": "y", "paragraph_support_idx": 0}],
        "answer": "moles",
        "answer_aliases": ["a mole", "moles"],
        "answerable": True,
    }
    expected = Question("2hop__1_2", "Who digs?", ("moles", "a mole"), MOLE, ("Owl",), "2hop")
    assert only(tmp_path, row, "musique") == expected
    # MuSiQue-Full: the twin has the same id
    loaded = load(tmp_path, row, {**row, "answerable": False})
    assert loaded.questions == [expected]
    (problem,) = loaded.problems
    assert (problem.position, problem.line) == (2, 2) and "not answerable" in problem.reason


def test_nq_open(tmp_path: Path) -> None:
    row = {"question": "who digs", "answer": ["moles", "a mole"]}
    assert only(tmp_path, row, "nq_open") == Question("row-1", "who digs", ("moles", "a mole"))


def test_triviaqa(tmp_path: Path) -> None:
    expected = Question("tc_1", "Who digs?", ("Mole", "The Mole", "Moles"))
    row = {
        "Question": "Who digs?", "QuestionId": "tc_1", "EntityPages": [{"Title": "Mole", "Filename": "Mole.txt"}],
        "Answer": {"Value": "Mole", "Aliases": ["The Mole", "Moles"], "NormalizedAliases": ["mole"], "Type": "x"},
        "SearchResults": [{"Title": "moles", "Filename": "1/2.txt", "Description": "..."}],
    }  # fmt: skip
    path = tmp_path / "release.json"
    path.write_text(json.dumps({"Data": [row], "Domain": "Web", "Version": 1.0}, indent=4))
    assert read_questions(path) == LoadedQuestions([expected], [], "triviaqa")
    hub = {
        "question": "Who digs?", "question_id": "tc_1", "question_source": "x",
        "entity_pages": {"title": ["Mole"], "filename": ["Mole.txt"], "wiki_context": ["A mole digs. It is shy."]},
        "search_results": {"title": ["Owl"], "rank": [0], "search_context": ["An owl flies."]},
        "answer": {"value": "Mole", "aliases": ["The Mole", "Moles"], "normalized_value": "mole"},
    }  # fmt: skip
    with_pages = Question("tc_1", "Who digs?", expected.answers, MOLE)
    assert only(tmp_path, hub, "triviaqa") == with_pages
    assert load(tmp_path, hub, name="a.parquet").questions == [with_pages]
    hidden = {**hub, "entity_pages": {"title": []}, "search_results": [], "answer": {"value": "<unk>", "aliases": []}}
    assert only(tmp_path, hidden, "triviaqa") == Question("tc_1", "Who digs?")


@pytest.mark.parametrize("id_key", ["_id", "id", "question_id", "qid"])
@pytest.mark.parametrize("answer_key", ["answers", "answer", "target", "golden_answers", "ground_truth"])
def test_ctxs_keys(tmp_path: Path, id_key: str, answer_key: str) -> None:
    row = {id_key: 7, "question": "Who digs?", answer_key: ["mole"], "ctxs": CTXS}
    assert only(tmp_path, row, "ctxs") == Question("7", "Who digs?", ("mole",), MOLE)


@pytest.mark.parametrize(
    "passages",
    [
        CTXS,
        [{"id": "1", "score": "0.5", **entry} for entry in CTXS],
        [{"id": "1", "contents": f"{entry['title']}\n{entry['text']}"} for entry in CTXS],
        [{"id": "1", "contents": f'"{entry["title"]}"\n{entry["text"]}'} for entry in CTXS],
        [{"title": entry["title"], "contents": f"{entry['title']}\n{entry['text']}"} for entry in CTXS],
        [{"title": entry["title"], "contents": entry["text"]} for entry in CTXS],
        [{"text": None, "contents": f"{entry['title']}\n{entry['text']}"} for entry in CTXS],
        [f"{entry['title']}\n{entry['text']}" for entry in CTXS],
        {"title": [entry["title"] for entry in CTXS], "text": [entry["text"] for entry in CTXS]},
    ],
)
def test_known_passage_layouts_are_the_same_passages(tmp_path: Path, passages: Any) -> None:
    assert only(tmp_path, {"id": "1", "question": "q", "answers": ["a"], "ctxs": passages}, "ctxs").passages == MOLE


def test_contents_without_a_title(tmp_path: Path) -> None:
    row = {"id": "1", "question": "q", "ctxs": ["one line", {"contents": 'a "b"\nc'}, {"contents": '"a ""b"""\n1\n2'}]}
    expected = (Passage("", "one line"), Passage('a "b"', "c"), Passage('a "b"', "1\n2"))
    assert only(tmp_path, row, "ctxs").passages == expected


def test_ctxs_gold_titles(tmp_path: Path) -> None:
    row = {"id": "1", "question": "q", "ctxs": [{**CTXS[0], "isgold": False}, {**CTXS[1], "isgold": True}]}
    assert only(tmp_path, row, "ctxs").gold_titles == ("Owl",)
    assert only(tmp_path, {**row, "supporting_titles": ["Bat", "Bat", "Mole"]}, "ctxs").gold_titles == ("Bat", "Mole")


def test_dpr_biencoder(tmp_path: Path) -> None:
    row = {
        "question": "q", "answers": ["a"], "positive_ctxs": [CTXS[1]], "negative_ctxs": [],
        "hard_negative_ctxs": [{**CTXS[0], "passage_id": "9"}],
    }  # fmt: skip
    assert only(tmp_path, row, "dpr_biencoder") == Question("row-1", "q", ("a",), MOLE[::-1], ("Owl",))


def test_flashrag(tmp_path: Path) -> None:
    row = {"id": "test_0", "question": "q", "golden_answers": ["a", "b"]}
    assert only(tmp_path, row, "flashrag") == Question("test_0", "q", ("a", "b"))
    metadata = {"type": "bridge", "supporting_facts": {"title": ["Owl"], "sent_id": [0]}, "context": {"title": ["x"]}}
    contents = [{"id": "1", "contents": f'"{entry["title"]}"\n{entry["text"]}'} for entry in CTXS]
    expected = Question("test_0", "q", ("a", "b"), MOLE, ("Owl",), "bridge")
    for extra in ({"retrieval_result": contents}, {"output": {"retrieval_result": contents, "pred": "x"}}):
        assert only(tmp_path, {**row, "metadata": metadata, **extra}, "flashrag") == expected


def test_ircot(tmp_path: Path) -> None:
    date = {"day": "", "month": "May", "year": "1901"}
    row = {
        "question_id": "i1",
        "question_text": "q",
        "answers_objects": [
            {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": ["a", "b"]},
            {"number": "12", "date": {}, "spans": []},
            {"number": "", "date": date, "spans": []},
        ],
        "contexts": [{"id": "0", "title": p.title, "paragraph_text": p.text, "is_supporting": p.title == "Mole"} for p in MOLE],
    }
    assert only(tmp_path, row, "ircot") == Question("i1", "q", ("a", "b", "12", "May 1901"), MOLE, ("Mole",))


def test_retrievalqa(tmp_path: Path) -> None:
    row = {"data_source": "x", "question_id": "r1", "question": "q", "ground_truth": ["a"], "context": CTXS}
    assert only(tmp_path, row, "retrievalqa") == Question("r1", "q", ("a",), MOLE)


def test_compact_output(tmp_path: Path) -> None:
    row = {
        "question": "q",
        "answer": "a",
        "answers": ["a", "b"],
        "iterations": [{"documents_list": ["Mole digs\nx"]}] * 2,
    }
    assert only(tmp_path, row, "compact") == Question("row-1", "q", ("a", "b"), (Passage("", "Mole digs\nx"),) * 2)


def test_beir(tmp_path: Path) -> None:
    save(tmp_path / "corpus.jsonl", [{"_id": n, "title": f"T{n}", "text": "x", "metadata": {}} for n in "1234"])
    queries: list[Any] = [{"_id": "q1", "text": "one"}, {"_id": "q2", "text": " "}]
    save(tmp_path / "queries.jsonl", [*queries, {"_id": "q3", "text": "three", "metadata": {"answer": "yes"}}])
    (tmp_path / "qrels").mkdir()
    header = "query-id\tcorpus-id\tscore\n"
    (tmp_path / "qrels" / "test.tsv").write_text(f"{header}q1\t3\t1\nq1\t1\t2\nq1\t2\t0\n")
    (tmp_path / "qrels" / "dev.tsv").write_text(f"{header}q3\t4\t1\nq3\tgone\t1\n")
    one = Question("q1", "one", gold_titles=("T3", "T1"))
    three = Question("q3", "three", ("yes",), gold_titles=("T4",))
    for format in ("auto", "beir"):
        loaded = read_questions(tmp_path, format)
        assert loaded.questions == [one, three] and loaded.format == "beir"
        assert [problem.position for problem in loaded.problems] == [2]
    assert read_questions(tmp_path / "qrels" / "test.tsv", "beir").questions == [one]
    (tmp_path / "qrels" / "dev.tsv").write_text(f"{header}q3\t4\tmany\n")
    with pytest.raises(UsageError, match=r"dev\.tsv, row 1 \(line 2\)"):
        read_questions(tmp_path)
    with pytest.raises(UsageError, match="no BEIR folder"):
        load_questions(tmp_path / "qrels", "beir")
    with pytest.raises(UsageError, match="is a folder"):
        load_questions(tmp_path / "qrels")


def test_table(tmp_path: Path) -> None:
    columns = {"id": "n", "question": "frage", "answers": "gold", "passages": "texte"}
    answers = {"x": "Rome", "y": '["NYC", "New York"]', "z": "['a', \"b's\"]", "w": "[1, 2]", "v": ""}
    path = tmp_path / "a.csv"
    lines = ["n,frage,gold,texte"]
    for n, gold in answers.items():
        quoted = gold.replace('"', '""')
        lines.append(f'{n},What?,"{quoted}","[{{""title"": ""Mole"", ""text"": ""A mole digs. It is shy.""}}]"')
    path.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    loaded = read_questions(path, columns=columns)
    assert loaded.format == "table" and loaded.problems == []
    assert [q.id for q in loaded.questions] == list(answers)
    expected = [("Rome",), ("NYC", "New York"), ("a", "b's"), ("[1, 2]",), ()]
    assert [q.answers for q in loaded.questions] == expected
    assert {q.passages for q in loaded.questions} == {(MOLE[0],)}

    rows = [{"n": 1, "frage": "What?", "gold": 1974.0, "texte": "A mole digs. It is shy."}]
    for name in ("a.jsonl", "a.json", "a.parquet"):
        loaded = load(tmp_path, *rows, name=name, format="table", columns=columns)
        assert loaded.questions == [Question("1", "What?", ("1974",), (Passage("", "A mole digs. It is shy."),))]
    # what columns does not name is sought under the usual names
    row = {"frage": "What?", "id": 3, "answers": {"text": ["a"], "answer_start": [0]}, "context": "A mole digs."}
    loaded = load(tmp_path, row, columns={"question": "frage"})
    assert loaded.questions == [Question("3", "What?", ("a",), (Passage("", "A mole digs."),))]
    assert load(tmp_path, {"question": "q", "answers": ["a"]}).questions == [Question("row-1", "q", ("a",))]


def test_table_mistakes(tmp_path: Path) -> None:
    row = {"id": "7", "question": "q", "hits": [{"text": "x"}]}
    with pytest.raises(UsageError, match=r"'7'.*'hits' may hold passages.*id, question, hits"):
        load(tmp_path, row)
    assert load(tmp_path, row, columns={"passages": "hits"}).questions[0].passages == (Passage("", "x"),)
    assert load(tmp_path, row, columns={"passages": ""}).questions == [Question("7", "q")]
    with pytest.raises(UsageError, match=r"no column 'hit' .*keys are id, question, hits"):
        load(tmp_path, row, columns={"passages": "hit"})
    with pytest.raises(UsageError, match="no column role 'passage'; did you mean 'passages'"):
        load(tmp_path, row, columns={"passage": "hits"})
    with pytest.raises(UsageError, match="columns belong to format 'table'"):
        load(tmp_path, row, format="ctxs", columns={"passages": "hits"})
    (problem,) = load(tmp_path, {**row, "hits": None}, columns={"passages": "hits"}).problems
    assert "'hits' is empty" in problem.reason


# ---- what is refused, what counts


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("ctxs", {"question": "q", "ctxs": [{"title": "t", "passage": "x"}]}),
        ("ctxs", {"question": "q", "ctxs": [["t", "x"]]}),
        ("ctxs", {"question": "q", "ctxs": "x"}),
        ("ctxs", {"question": "q", "documents": CTXS}),
        ("ctxs", {"question": "q", "ctxs": {"title": ["a"], "text": []}}),
        ("ctxs", {"question": "q", "ctxs": [{"title": "t", "text": ["x"]}]}),
        ("hotpotqa", {"question": "q", "ctxs": CTXS}),
        ("hotpotqa", {"question": "q", "context": CTXS}),
        ("2wikimqa", {"question": "q", "context": [["t", ["x"], 1]]}),
        ("musique", {"question": "q", "paragraphs": [{"title": "t", "body": "x"}]}),
        ("nq_open", {"question": "q", "answer": ["a"], "ctxs": CTXS}),
        ("nq_open", {"question": "q", "answer": ["a"], "retrieved_docs": "x"}),
        ("flashrag", {"question": "q", "golden_answers": ["a"], "docs": CTXS}),
        ("triviaqa", {"question": "q", "answer": {"value": "a"}, "passages": CTXS}),
        ("triviaqa", {"question": "q", "answer": {"value": "a"}, "entity_pages": {"title": ["a"]}}),
        ("compact", {"question": "q", "iterations": [{"documents": ["x"]}]}),
        ("dpr_biencoder", {"question": "q", "ctxs": CTXS}),
        ("ircot", {"question_text": "q", "contexts": [3]}),
        ("ctxs", {"question": "q", "ctxs": CTXS, "answers": {"gold": "a"}}),
    ],
)
def test_unknown_layouts_name_the_row_and_its_keys(tmp_path: Path, format: str, row: dict[str, Any]) -> None:
    good: dict[str, Any] = {"id": "ok", "question": "q"}
    good |= {key: [] for key in ("ctxs", "context", "paragraphs", "positive_ctxs")}
    with pytest.raises(UsageError, match=rf"a\.jsonl, row 1: id 'bad7': .* keys are id, {', '.join(row)}$"):
        load(tmp_path, {"id": "bad7", **row}, good, format=format)


def test_unknown_file_layout_names_keys_and_formats(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"keys are prompt, reply; the formats are hotpotqa, .*beir, and table"):
        load(tmp_path, {"prompt": "x", "reply": "y"})
    with pytest.raises(UsageError, match="no format 'hotpot'; did you mean 'hotpotqa'"):
        load(tmp_path, HOTPOT, format="hotpot")
    with pytest.raises(UsageError, match="no row that is an object"):
        load(tmp_path, 1, [2])
    with pytest.raises(UsageError, match="limit is -1"):
        load(tmp_path, HOTPOT, limit=-1)
    with pytest.raises(UsageError, match="there is no file"):
        load_questions(tmp_path / "nowhere.jsonl", "ctxs")


def test_rows_that_cannot_be_used_are_counted_with_their_reason(tmp_path: Path) -> None:
    good = {"id": "1", "question": "q", "ctxs": []}
    rows = [good, {"id": "2", "ctxs": []}, "text", {"id": "3", "question": " ", "ctxs": []}]
    rows += [{"id": "4", "question": "q", "ctxs": None}, {"id": "5", "question": "q", "ctxs": [{"text": None}]}]
    loaded = load(tmp_path, *rows, {**good, "id": "6"})
    assert [question.id for question in loaded.questions] == ["1", "6"]
    assert [(problem.position, problem.line) for problem in loaded.problems] == [(n, n) for n in range(2, 7)]
    reasons = ["no question text", "not an object", "no question text", "'ctxs' is null", "has no text"]
    assert all(reason in problem.reason for reason, problem in zip(reasons, loaded.problems, strict=True))
    half = tmp_path / "half.jsonl"
    half.write_text('{"id": "1", "question": "\\ud83e", "ctxs": []}\n')
    assert "surrogate" in read_questions(half).problems[0].reason


def test_ids(tmp_path: Path) -> None:
    rows: list[Any] = [{"id": 7, "question": "a", "ctxs": []}, {"question": "b", "ctxs": []}]
    rows += [{"id": None, "question": "c", "ctxs": []}, {"id": "", "question": "d", "ctxs": []}]
    assert [q.id for q in load(tmp_path, *rows).questions] == ["7", "row-2", "row-3", "row-4"]
    for twin in ("7", 7, 7.0):
        with pytest.raises(UsageError, match=r"row 5: the id '7' is also that of row 1"):
            load(tmp_path, *rows, {"id": twin, "question": "e", "ctxs": []})
    assert len(load(tmp_path, *rows, rows[0], limit=4).questions) == 4


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"answers": "Chad"}, ("Chad",)),
        ({"answers": ["NYC", "New York City"]}, ("NYC", "New York City")),
        ({"answer": "NYC", "answer_aliases": ["New York", "NYC"]}, ("NYC", "New York")),
        ({"answers": [["a"], ["b", ["c", "a"]]]}, ("a", "b", "c")),
        ({"answers": 1974}, ("1974",)),
        ({"answers": [2.5, 3.0]}, ("2.5", "3")),
        ({"target": "b", "answers": ["a", "b"]}, ("b", "a")),
        ({"answers": ["", " ", "a", None]}, ("a",)),
        ({"answers": None}, ()),
        ({"answers": []}, ()),
        ({"answers": [[]]}, ()),
        ({"answers": ""}, ()),
        ({}, ()),
    ],
)
def test_gold_answers_of_every_shape(tmp_path: Path, fields: dict[str, Any], answers: tuple[str, ...]) -> None:
    assert load(tmp_path, {"id": "1", "question": "q", "ctxs": [], **fields}).questions[0].answers == answers
    assert gold_answers(*(fields.get(key) for key in ("answer", "target", "answers", "answer_aliases"))) == answers


def test_streaming_and_limit(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", [{"id": n, "question": "q", "ctxs": []} for n in range(5)])
    with path.open("a") as file:
        file.write("{not json\n")
    opened = load_questions(path, limit=3)
    assert isinstance(opened, QuestionFile) and opened.format == "ctxs"
    assert [getattr(q, "id", None) for q in opened] == ["0", "1", "2"] == [getattr(q, "id", None) for q in opened]
    assert list(load_questions(path, limit=0)) == []
    stream = iter(load_questions(path))
    assert [next(stream) for _ in range(5)]
    with pytest.raises(UsageError, match="line 6: not valid JSON"):
        next(stream)
    assert not any(isinstance(item, Problem) for item in opened)


def test_text_is_left_as_it_is(tmp_path: Path) -> None:
    text = " &amp; <b>x</b> {question} {{y}}\u2028\u0085\x00\x1c\U0001f9ea "
    row = {"id": text, "question": text, "answers": [text], "ctxs": [{"title": text, "text": text}]}
    for end, mark in (("\n", ""), ("\r\n", "\ufeff")):
        path = tmp_path / "a.jsonl"
        path.write_bytes((mark + json.dumps(row, ensure_ascii=False) + end).encode())
        assert read_questions(path).questions == [Question(text, text, (text,), (Passage(text, text),))]


filled = st.text(min_size=1).filter(lambda text: bool(text.strip()))
uniform_rows = st.lists(
    st.fixed_dictionaries(
        {
            "_id": filled,
            "question": filled,
            "answers": st.lists(filled, min_size=1, unique=True, max_size=4),
            "ctxs": st.lists(st.fixed_dictionaries({"title": st.text(), "text": st.text()}), max_size=4),
        },
        optional={
            "supporting_titles": st.lists(st.text(min_size=1), unique=True, max_size=3),
            "n_retrieved": st.integers(),
        },
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda row: row["_id"],
)


@settings(max_examples=150, deadline=None)
@given(rows=uniform_rows, ascii_only=st.booleans(), end=st.sampled_from(["\n", "\r\n"]))
def test_uniform_rows_survive_writing_and_loading(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ascii_only: bool, end: str
) -> None:
    path = tmp_path_factory.mktemp("uniform") / "a.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows).encode())
    loaded = read_questions(path)
    assert loaded.problems == [] and loaded.format == "ctxs"
    back = [
        {
            "_id": q.id,
            "question": q.question,
            "answers": list(q.answers),
            "ctxs": [{"title": p.title, "text": p.text} for p in q.passages],
            "supporting_titles": list(q.gold_titles),
        }
        for q in loaded.questions
    ]
    assert back == [{"supporting_titles": []} | {k: v for k, v in row.items() if k != "n_retrieved"} for row in rows]


# ---- the shared real data

# file: format, questions; passages and gold answers of the first question
SAMPLES: dict[str, tuple[str, int, int, int]] = {
    "2wikimultihopqa.json": ("2wikimqa", 3, 10, 1),
    "compact_example.json": ("compact", 1, 25, 1),
    "dpr_biencoder.json": ("dpr_biencoder", 2, 7, 1),
    "fid_ctxs_from_retrievalqa.jsonl": ("ctxs", 2, 10, 2),
    "flashrag_golden_answers_nq.jsonl": ("flashrag", 3, 0, 1),
    "flashrag_golden_answers_triviaqa.jsonl": ("flashrag", 3, 0, 22),
    "flashrag_quickstart_nq.jsonl": ("flashrag", 17, 0, 1),
    "hotpotqa_distractor.json": ("hotpotqa", 3, 10, 1),
    "ircot_processed_hotpotqa.jsonl": ("ircot", 2, 10, 1),
    "lost_in_the_middle_oracle.jsonl": ("ctxs", 3, 1, 1),
    "musique.jsonl": ("musique", 3, 20, 1),
    "nq_open.jsonl": ("nq_open", 3, 0, 2),
    "retrievalqa.jsonl": ("retrievalqa", 2, 5, 2),
    "triviaqa_official_sample.json": ("triviaqa", 1, 0, 5),
}


def test_every_format_has_a_sample() -> None:
    assert {sample[0] for sample in SAMPLES.values()} == set(FORMATS)


@needs_shared_data
def test_every_sample_is_covered() -> None:
    assert {path.name for path in RAW.iterdir()} <= set(SAMPLES)


@needs_shared_data
@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name: str) -> None:
    format, count, passages, golds = SAMPLES[name]
    loaded = read_questions(RAW / name)
    assert (loaded.format, loaded.problems) == (format, [])
    first = loaded.questions[0]
    assert (len(loaded.questions), len(first.passages), len(first.answers)) == (count, passages, golds)
    assert all(q.question and q.answers and all(p.text for p in q.passages) for q in loaded.questions)
    if passages and format != "compact":
        assert all(p.title for q in loaded.questions for p in q.passages)
    if format in ("hotpotqa", "2wikimqa", "musique", "ircot", "dpr_biencoder"):
        titles = {p.title for p in first.passages}
        assert first.gold_titles and set(first.gold_titles) <= titles


@needs_shared_data
@pytest.mark.parametrize(
    ("sample", "folder"),
    [
        ("hotpotqa_distractor.json", "hotpotqa"),
        ("2wikimultihopqa.json", "2wikimultihopqa"),
        ("musique.jsonl", "musique"),
    ],
)
def test_samples_equal_their_uniform_rows(sample: str, folder: str) -> None:
    """The uniform slices were made from the same sources by other code."""
    uniform = {q.id: q for q in read_questions(SHARED / folder / "dev.jsonl").questions}
    shared = [q for q in read_questions(RAW / sample).questions if q.id in uniform]
    assert shared
    for q in shared:
        other = uniform[q.id]
        assert (q.question, q.answers, q.passages, q.gold_titles) == (
            other.question, other.answers, other.passages, other.gold_titles,
        )  # fmt: skip


SLICES = sorted(path.relative_to(SHARED).as_posix() for path in SHARED.glob("*/*.jsonl") if path.parent != RAW)


@needs_shared_data
def test_there_are_uniform_slices() -> None:
    assert "hotpotqa/dev.jsonl" in SLICES


@pytest.mark.parametrize("name", SLICES)
def test_uniform_slices(name: str) -> None:
    path = SHARED / name
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    loaded = read_questions(path)
    assert (loaded.format, loaded.problems, len(loaded.questions)) == ("ctxs", [], len(lines))
    for line, q in zip(lines, loaded.questions, strict=True):
        row = json.loads(line)
        assert (q.id, q.question, list(q.answers)) == (row["_id"], row["question"], list(dict.fromkeys(row["answers"])))
        assert [{"title": p.title, "text": p.text} for p in q.passages] == row["ctxs"]
        assert list(q.gold_titles) == row.get("supporting_titles", [])


def test_detect_format_by_side_keys() -> None:
    assert detect_format({"_id": 1, "question": "q", "context": [], "supporting_facts": [], "evidences": []}) == "2wikimqa"
    assert detect_format({"_id": 1, "question": "q", "context": [], "supporting_facts": []}) == "hotpotqa"
    assert detect_format({"question": "q", "answer": "a"}) == "table"
