"""The data doctor: what stages=[prepare] prints and stores, with the models there and without them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tokenizer

from xcompress import doctor
from xcompress.config import compose, run_config, to_settings
from xcompress.pipeline import Run
from xcompress.schema import UsageError

TOWN = {"title": "Town", "text": "The mill stands by the river."}
HILL = {"title": "Hill", "text": "A hill &amp; a bridge."}


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {"_id": f"q{number}", "question": f"What is {number}?", "answers": ["mill"], "ctxs": [TOWN, HILL], **changes}


ROWS = [
    row(1, supporting_titles=["Town"]),
    row(2, answers=["yes"], ctxs=[HILL, HILL, TOWN, TOWN], supporting_titles=["Moor"]),
    row(3, question=" "),
    row(4, answers=[]),
    row(5, answers=["The"], question="what is  1?"),
]


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows), encoding="utf-8")
    return path


def look(tmp_path: Path, *overrides: str, rows: list[dict[str, Any]] = ROWS) -> dict[str, Any]:
    """Run stages=[prepare] over ``rows``; returns the stored report of the test split."""
    path = save(tmp_path / "test.jsonl", rows)
    config = ["dataset=nq", f"dataset.path={path}", f"run_root={tmp_path / 'runs'}", "dataset.passages=3", *overrides]
    assert run_config(compose([*config, "stages=[prepare]"])) is None
    (folder,) = (tmp_path / "runs" / "questions").glob("nq-test-*")
    report: dict[str, Any] = json.loads((folder / "doctor.json").read_text(encoding="utf-8"))
    return report


def cells(screen: str) -> dict[str, list[str]]:
    """The table on the screen: label to the words of its row."""
    rows = [re.split(r"\s{2,}", line.removeprefix("!").strip(), maxsplit=1) for line in screen.splitlines()]
    return {label: rest[0].split() for label, *rest in rows if rest}


def test_without_any_model_the_report_says_what_it_could_not_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the reader's nor the compressor's folder exists; everything else is reported, nothing is looked for online."""
    report = look(tmp_path, "reader.model=nobody/nowhere-1b", "compressor.model=/no/such/folder")
    screen = capsys.readouterr().out
    assert report["questions"] == 4 and report["split"] == "test"
    assert report["tokens"]["not_measured"].startswith("the tokenizer of nobody/nowhere-1b is not on this machine (hf download")
    assert "* test: tokens are not measured: the tokenizer of nobody/nowhere-1b is not on this machine" in screen
    assert "tokens a passage" not in screen
    assert [(entry["position"], entry["reason"]) for entry in report["unusable_rows"]] == [
        (3, "no question text (the row's keys are _id, question, answers, ctxs)")
    ]
    assert "test row 3 cannot be used: no question text (the row's keys are _id, question, answers, ctxs)" in screen
    found = cells(screen)
    assert found["questions"] == ["4"] and found["rows that cannot be used"] == ["1"]
    assert found["answers a question"] == ["0:", "1,", "1:", "3"]
    assert found["without gold answer"] == ["1", "(read,", "not", "scored)"]
    assert found["yes/no answers"] == ["1", "of", "3", "(33.3", "%)"]
    assert found["golds no answer can match"] == ["1"]
    assert found["repeated questions"] == ["1"]
    assert found["passages a question"] == ["2:", "3,", "3:", "1"]
    assert found["fewer than asked for"] == ["3", "(fewer", "than", "3)"]
    assert found["passages left out"] == ["1", "of", "1", "questions"]
    assert found["repeated in a question"] == ["1"]
    assert found["with HTML left-overs"] == ["5"]
    assert found["all gold titles found"] == ["1", "of", "2", "(50.0", "%)"]
    assert found["answer string found"] == ["1", "of", "3", "(33.3", "%)"]
    assert "golds not matching themselves: ids q5" in screen
    marked = {line[1:].strip().partition("  ")[0] for line in screen.splitlines() if line.startswith("!")}
    assert {"rows that cannot be used", "answer string found", "passages left out"} <= marked
    assert not {"questions", "empty passages", "all gold titles found"} & marked
    assert str(tmp_path / "runs") in screen.replace("\n", "")


def test_token_lengths_are_the_readers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a tokenizer and no weights is enough; a byte-level tokenizer makes lengths easy to know."""
    folder = tmp_path / "reader"
    make_tokenizer(start=True).save_pretrained(folder)
    report = look(tmp_path, f"reader.model={folder}", "dataset.segment_size=2")
    tokens = report["tokens"]
    town, hill = len("Town: The mill stands by the river."), len("Hill: A hill &amp; a bridge.")
    assert tokens["questions"] == 4 and tokens["window"] is None
    assert (tokens["passage"]["longest"], tokens["passage"]["median"]) == (town, hill)
    assert tokens["segment"] == {"median": town + hill, "p95": town + hill, "longest": town + hill}
    assert tokens["question"]["longest"] == 2 * hill + town
    screen = capsys.readouterr().out
    assert cells(screen)["tokens a passage *"] == [str(hill), "/", str(town), "/", str(town)]


def test_what_exceeds_the_window_is_counted(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """The tiny model takes 512 tokens."""
    long = row(9, ctxs=[{"title": "Long", "text": "word " * 120}])
    report = look(tmp_path, f"reader.model={model_folder('llama')}", rows=[ROWS[0], long])
    assert (report["tokens"]["window"], report["tokens"]["longer_than_window"]) == (512, 1)


def test_questions_that_also_calibrate_the_gate_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = save(tmp_path / "train.jsonl", [row(7), row(8), row(11, question="WHAT IS 4?")])
    report = look(tmp_path, "reader.model=nobody/nowhere-1b", f"dataset.calibration_path={train}")
    assert report["questions_in_both_splits"] == 1
    screen = capsys.readouterr().out
    assert cells(screen)["questions"] == ["4", "3"] and cells(screen)["in both splits"] == ["1", "1"]
    assert look(tmp_path, "reader.model=nobody/nowhere-1b")["questions_in_both_splits"] == 1, "found beside the test file"


def test_many_unusable_rows_take_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = look(tmp_path, "reader.model=nobody/nowhere-1b", rows=[ROWS[0], *(row(n, question="") for n in range(20, 60))])
    assert len(report["unusable_rows"]) == 40
    screen = capsys.readouterr().out
    assert screen.count("cannot be used: no question text") == 5
    assert "and 35 more of test (40 x no question text)" in screen
    assert len(screen.splitlines()) < 45


def test_markup_in_ids_and_reasons_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROWS[0], row(3, _id="[bold]x[/bold] {0}", answers=["The"]), row(4, question="")]
    rows[2]["[red]key"] = 1
    look(tmp_path, "reader.model=nobody/nowhere-1b", rows=rows)
    screen = capsys.readouterr().out
    assert "ids [bold]x[/bold] {0}" in screen and "[red]key" in screen


def test_the_sample_is_spread_over_the_split(tmp_path: Path) -> None:
    path = save(tmp_path / "many.jsonl", [row(n) for n in range(100)])
    config = ["dataset=nq", f"dataset.path={path}", f"run_root={tmp_path / 'runs'}", "stages=[prepare]", "shard_size=4"]
    (split,) = Run(to_settings(compose(config))).prepare()
    ids = [int(question.id[1:]) for question in doctor.sample(split.questions, 20)]
    assert len(ids) == 20 and ids == sorted(set(ids)) and ids[0] == 0 and ids[-1] >= 80
    assert len(list(doctor.sample(split.questions, 1000))) == 100
    assert len(list(doctor.sample(split.questions, 2))) == 2


def test_other_stages_still_need_the_models(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", ROWS)
    config = ["dataset=nq", f"dataset.path={path}", f"run_root={tmp_path / 'runs'}", "compressor.model=/no/such/folder"]
    with pytest.raises(UsageError, match="model"):
        Run(to_settings(compose([*config, "stages=[prepare,generate]"])))
