"""Data sets in the hub's layout, from a local folder and from the hub's cache, without any network attempt."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from test_fetch import guarded

from xcompress.config import compose, to_settings
from xcompress.formats import load_questions, read_questions
from xcompress.hub import HubRows
from xcompress.schema import Passage, Question, UsageError
from xcompress.settings import HubSettings, SourceSettings
from xcompress.stages.prepare import identity

REVISION = "1908d6afbbead072334abe2965f91bd2709910ab"
CARD = """---
configs:
- config_name: distractor
  data_files:
  - split: train
    path: distractor/train-*
  - split: validation
    path: distractor/validation-*
- config_name: fullwiki
  data_files:
  - split: validation
    path: fullwiki/validation-*
---
# A card
"""


def hotpot(number: int) -> dict[str, Any]:
    """A row as the hub's HotpotQA has it: lists of objects as objects of lists."""
    return {
        "id": f"h{number}",
        "question": f"Is mole {number} shy?",
        "answer": "yes",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": {"title": ["Mole", "Bat"], "sent_id": [0, 1]},
        "context": {"title": ["Mole", "Owl"], "sentences": [["A mole digs.", " It is shy."], ["An owl flies. \u2028"]]},
    }


def question(number: int) -> Question:
    passages = (Passage("Mole", "A mole digs. It is shy."), Passage("Owl", "An owl flies."))
    return Question(f"h{number}", f"Is mole {number} shy?", ("yes",), passages, ("Mole", "Bat"), "bridge")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository: two configurations, the first with two splits, one of them in two parts."""
    root = tmp_path / "repository"
    write(root / "distractor" / "validation-00000-of-00002.parquet", [hotpot(1), hotpot(2)])
    write(root / "distractor" / "validation-00001-of-00002.parquet", [hotpot(3)])
    write(root / "distractor" / "train-00000-of-00001.parquet", [hotpot(9)])
    write(root / "fullwiki" / "validation-00000-of-00001.parquet", [hotpot(4)])
    (root / "README.md").write_text(CARD, encoding="utf-8")
    return root


@pytest.fixture
def cache(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache holding the repository at REVISION as its client lays it out; returns HF_HOME."""
    home = tmp_path / "hf"
    entry = home / "hub" / "datasets--hotpotqa--hotpot_qa"
    shutil.copytree(folder, entry / "snapshots" / REVISION)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    return home


def hub(where: Path | str, **changes: Any) -> HubSettings:
    return HubSettings(**{"id": str(where), "config": "distractor", "split": "validation", **changes})


def test_a_local_folder(folder: Path) -> None:
    loaded = read_questions(HubRows(hub(folder)))
    assert loaded.questions == [question(1), question(2), question(3)]
    assert (loaded.format, loaded.problems) == ("hotpotqa", [])
    assert read_questions(HubRows(hub(folder, split="train"))).questions == [question(9)]
    assert read_questions(HubRows(hub(folder, config="fullwiki")), limit=5).questions == [question(4)]
    assert read_questions(HubRows(hub(folder)), limit=2).questions == [question(1), question(2)]


@pytest.mark.parametrize(
    "data_files",
    ["v.parquet", ["v.parquet"], [{"split": "train", "path": "v.*"}], [{"split": "train", "path": ["v.parquet"]}]],
)
def test_every_form_in_which_a_card_names_files(tmp_path: Path, data_files: Any) -> None:
    write(tmp_path / "v.parquet", [hotpot(1)])
    card = yaml.safe_dump({"configs": [{"config_name": "main", "data_files": data_files}]})
    (tmp_path / "README.md").write_text(f"---\n{card}---\n", encoding="utf-8")
    for config in ("main", None):
        assert read_questions(HubRows(hub(tmp_path, config=config, split="train"))).questions == [question(1)]


@pytest.mark.parametrize("name", ["validation.jsonl", "data/validation-00000-of-00001.parquet", "validation.json"])
def test_folders_without_a_card(tmp_path: Path, name: str) -> None:
    path = tmp_path / "plain" / name
    path.parent.mkdir(parents=True)
    if name.endswith("parquet"):
        write(path, [hotpot(1)])
    else:
        path.write_text(json.dumps(hotpot(1)) + "\n", encoding="utf-8")
    assert read_questions(HubRows(hub(tmp_path / "plain", config=None))).questions == [question(1)]


@pytest.mark.parametrize("revision", [REVISION, None])
def test_the_hubs_cache(cache: Path, revision: str | None) -> None:
    loaded = read_questions(HubRows(hub("hotpotqa/hotpot_qa", revision=revision)))
    assert loaded.questions == [question(1), question(2), question(3)]


def test_a_cache_that_holds_one_split_only(cache: Path) -> None:
    """As fetch_data.py leaves it: the card names more than was downloaded."""
    snapshot = cache / "hub" / "datasets--hotpotqa--hotpot_qa" / "snapshots" / REVISION
    (snapshot / "distractor" / "train-00000-of-00001.parquet").unlink()
    shutil.rmtree(snapshot / "fullwiki")
    assert len(read_questions(HubRows(hub("hotpotqa/hotpot_qa", revision=REVISION))).questions) == 3
    for changes in ({"split": "train"}, {"config": "fullwiki"}):
        with pytest.raises(UsageError, match=r"its files are not in .*; get them with `hf download hotpotqa/hotpot_qa"):
            HubRows(hub("hotpotqa/hotpot_qa", revision=REVISION, **changes)).files()


def test_half_of_a_split_is_not_taken_for_the_whole(folder: Path) -> None:
    (folder / "distractor" / "validation-00001-of-00002.parquet").unlink()
    with pytest.raises(UsageError, match=r"only 1 of the 2 parts of validation are on this machine; get all with `hf download"):
        read_questions(HubRows(hub(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "nobody/nothing"}, r"data set nobody/nothing is not on this machine; get it with `hf download nobody/nothing"),
        (
            {"id": "hotpotqa/hotpot_qa", "revision": "f" * 40},
            r"at revision ffff.* is not on this machine; get it with .*--revision fff",
        ),
        ({"id": "no-owner"}, "data set folder no-owner does not exist"),
        ({"id": "/no/such/folder"}, "data set folder /no/such/folder does not exist"),
        ({"id": "a b/c d"}, "neither an existing folder nor a possible name"),
        (
            {"id": "hotpotqa/hotpot_qa", "config": "distracter"},
            r"has no configuration 'distracter'; set .* to one of distractor, fullwiki",
        ),
        (
            {"id": "hotpotqa/hotpot_qa", "config": None},
            r"has several configurations; set .* to one of distractor, full",
        ),
        ({"id": "hotpotqa/hotpot_qa", "split": "dev"}, r"has no split 'dev' in .*; it has train, validation"),
    ],
)
def test_what_is_missing_is_named_within_seconds(cache: Path, changes: dict[str, Any], message: str) -> None:
    HubRows(hub("hotpotqa/hotpot_qa")).files()  # the library is imported
    started = time.monotonic()
    with pytest.raises(UsageError, match=message) as caught:
        load_questions(HubRows(hub(**{"where": changes.pop("id"), **changes})))
    assert time.monotonic() - started < 5
    assert "\n" not in str(caught.value)


def test_a_damaged_file(folder: Path) -> None:
    path = folder / "distractor" / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot be read"):
        read_questions(HubRows(hub(folder, split="train")))


def test_code_of_a_data_set_is_not_run(folder: Path, tmp_path: Path) -> None:
    """A loading script beside the files stays what it is: a file."""
    mark = tmp_path / "ran"
    for name in ("repository.py", "hotpot_qa.py", f"{folder.name}.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w').write('x')\nraise SystemExit\n")
    try:
        read_questions(HubRows(hub(folder)))
    except UsageError as error:
        assert "script" in str(error)
    assert not mark.exists()


def test_identity_is_the_content_of_the_split(folder: Path, tmp_path: Path) -> None:
    def of(where: Path, **changes: Any) -> dict[str, Any]:
        return identity(SourceSettings("x", hub=hub(where, **changes)), 30)

    before = of(folder)
    json.dumps(before)
    shutil.copytree(folder, tmp_path / "copy")
    assert of(tmp_path / "copy") == before
    assert of(folder, split="train") != before
    write(tmp_path / "copy" / "distractor" / "train-00000-of-00001.parquet", [hotpot(8)])
    assert of(tmp_path / "copy") == before, "another split changed"
    write(tmp_path / "copy" / "distractor" / "validation-00001-of-00002.parquet", [hotpot(8)])
    assert of(tmp_path / "copy") != before


def test_a_folder_given_as_a_file_says_what_to_do(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder.*dataset.origin=hub dataset.hub.id=.*repository"):
        load_questions(folder)


WIKI = {
    "id": "w", "type": "comparison", "question": "Which?", "answer": "mole",
    "supporting_facts": {"title": ["Mole"], "sent_id": [0]}, "evidences": [["mole", "does", "dig"]],
    "context": {"title": ["Mole"], "sentences": [["A mole digs.", "It is shy."]]},
}  # fmt: skip
MUSIQUE = {
    "id": "2hop__1_2", "question": "Who?", "answer": "moles", "answer_aliases": ["mole"], "answerable": True,
    "question_decomposition": [{"id": 1, "question": "x", "answer": "y", "paragraph_support_idx": 0}],
    "paragraphs": [{"idx": 0, "title": "Mole", "paragraph_text": "A mole digs. It is shy.", "is_supporting": True}],
}  # fmt: skip
TRIVIA = {
    "question": "Who?", "question_id": "tc_1", "question_source": "x",
    "entity_pages": {"doc_source": ["w"], "title": ["Mole"], "filename": ["m"], "wiki_context": ["A mole digs. It is shy."]},
    "search_results": {"title": [], "rank": [], "search_context": []},
    "answer": {"value": "Mole", "aliases": ["The mole"], "normalized_value": "mole"},
}  # fmt: skip
MOLE = (Passage("Mole", "A mole digs. It is shy."),)
COPIES: dict[str, tuple[dict[str, Any], Question]] = {
    "2wikimqa": (WIKI, Question("w", "Which?", ("mole",), MOLE, ("Mole",), "comparison")),
    "musique": (MUSIQUE, Question("2hop__1_2", "Who?", ("moles", "mole"), MOLE, ("Mole",), "2hop")),
    "triviaqa": (TRIVIA, Question("tc_1", "Who?", ("Mole", "The mole"), MOLE)),
    "nq": ({"question": "who", "answer": ["a", "b"]}, Question("row-1", "who", ("a", "b"))),
}


@pytest.mark.parametrize("name", COPIES)
def test_the_shape_of_each_copy(tmp_path: Path, name: str) -> None:
    """One row in the columns of the hub's copy, read with the configuration that the data set's file names."""
    row, expected = COPIES[name]
    settings = to_settings(compose([f"dataset={name}"])).dataset.hub
    assert settings is not None and settings.revision is not None and len(settings.revision) == 40
    config, split = settings.config or "default", settings.split
    write(tmp_path / config / f"{split}-00000-of-00001.parquet", [row])
    files = f"  - split: {split}\n    path: {config}/{split}-*\n"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    rows = HubRows(HubSettings(str(tmp_path), None, settings.config, split))
    assert read_questions(rows).questions == [expected]


@pytest.mark.parametrize("switch", [{}, pytest.param({"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.slow)])
def test_a_run_from_the_cache_reaches_for_no_network(cache: Path, tmp_path: Path, switch: dict[str, str]) -> None:
    """stages=[prepare] in a process of its own, with the switch and without: zero attempts either way."""
    arguments = ["stages=[prepare]", "dataset=hotpotqa", "dataset.origin=hub", "reader=smollm2_135m", "reader.model=a/b"]
    arguments += ["dataset.hub.calibration_split=train", f"run_root={tmp_path / 'runs'}"]
    done = guarded(tmp_path, "run.py", *arguments, HF_HOME=str(cache), **switch)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "attempts").exists(), (tmp_path / "attempts").read_text()
    assert "hotpotqa/hotpot_qa (distractor/validation)" in done.stdout
    reports = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs" / "questions").glob("*/doctor.json"))]
    assert [(report["split"], report["questions"]) for report in reports] == [("calibration", 1), ("test", 3)]
    missing = guarded(tmp_path, "run.py", *arguments, "dataset.hub.id=nobody/nothing", HF_HOME=str(cache), **switch)
    assert missing.returncode == 2 and missing.stderr.startswith("error: data set nobody/nothing at revision")
    assert missing.stderr.count("\n") == 1 and not (tmp_path / "attempts").exists()
