"""scripts/ask.py as a user runs it: passages from everywhere, what it prints, strict JSON, one sentence for wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from xcompress.config import ROOT
from xcompress.passages import paragraphs, parse_passages, read_passages, search_folder
from xcompress.schema import Passage, UsageError

TEXT = "The old mill stands\nby the river.\n\n\nA bridge of stone.\n \nNothing else.\n"
PARAGRAPHS = ["The old mill stands by the river.", "A bridge of stone.", "Nothing else."]
QUESTION = "What stands by the river?"


def ask(folder: Path, *arguments: str, given: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """The command in ``folder``, with ``given`` on standard input."""
    raw = given.encode() if isinstance(given, str) else given or b""
    environment = {**os.environ, "XCOMPRESS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "ask.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, input=raw, capture_output=True, timeout=300, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def tiny_overrides(model_folder: Callable[[str], Path]) -> list[str]:
    """Tiny random models instead of the embedded one."""
    folder = model_folder("llama")
    return [
        *(f"reader.model={folder}", f"compressor.model={folder}"),
        *("compressor.max_new_tokens=12", "reader.max_new_tokens=6", "generation.candidates=2"),
    ]


# ---- passages


def test_plain_text_is_paragraphs() -> None:
    assert paragraphs(TEXT) == paragraphs("\ufeff" + TEXT.replace("\n", "\r\n")) == PARAGRAPHS
    assert paragraphs(" \n\n ") == []


def test_files_of_every_kind(tmp_path: Path) -> None:
    """Text, JSON lines in the known layouts, CSV; standard input with lines or paragraphs."""
    (tmp_path / "a.txt").write_text(TEXT)
    assert [passage.text for passage in read_passages(tmp_path / "a.txt")] == PARAGRAPHS
    rows = ['{"title": "Mill", "text": "It stands."}', '{"contents": "Mill\\nIt stands."}', '"It stands."']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    expected = [Passage("Mill", "It stands."), Passage("Mill", "It stands."), Passage("", "It stands.")]
    assert read_passages(tmp_path / "a.jsonl") == expected
    assert parse_passages("\n".join(rows[:2]) + "\n\n") == expected[:2]
    (tmp_path / "a.csv").write_text("title,text\nMill,It stands.\n")
    assert read_passages(tmp_path / "a.csv") == expected[:1]
    assert [passage.text for passage in parse_passages(TEXT)] == PARAGRAPHS


def test_a_folder_is_searched(tmp_path: Path) -> None:
    """The best paragraph first, titled by its file; hidden files and other kinds stay out."""
    (tmp_path / "deep" / ".hidden").mkdir(parents=True)
    (tmp_path / "deep" / "river.txt").write_text(TEXT)
    (tmp_path / "hill.md").write_text("A hill with sheep on it.")
    (tmp_path / "deep" / ".hidden" / "no.txt").write_text("The river, the river, the river.")
    (tmp_path / "no.py").write_text("river = 'river'")
    found, of = search_folder(tmp_path, QUESTION, 2)
    assert of == 4 and len(found) == 2 and found[0] == Passage("deep/river", PARAGRAPHS[0])


# ---- wrong input


@pytest.mark.parametrize(
    ("arguments", "given", "what"),
    [
        ([], None, "ask a question"),
        (["--calibrate"], None, "--calibrate needs --gate FILE"),
        ([" ", "--passages", "a.txt"], None, "the question is blank"),
        (["Who?", "--passages", "absent.txt"], None, "absent.txt does not exist"),
        (["Who?", "--passages", "absent.jsonl"], None, "absent.jsonl does not exist"),
        (["Who?", "--passages", "."], None, "is a folder; search it with --folder"),
        (["Who?", "--passages", "empty.txt"], None, "empty.txt holds no passage"),
        (["Who?", "--passages", "latin.txt"], None, "latin.txt is not UTF-8 text"),
        (["Who?", "--passages", "bad.jsonl"], None, "bad.jsonl, line 2: the row is in an unknown layout: its keys are body"),
        (["Who?", "--folder", "absent"], None, "folder absent does not exist"),
        (["Who?", "--folder", "a.txt"], None, "a.txt is not a folder"),
        (["Who?", "--folder", "bare"], None, "folder bare holds no text"),
        (["Who?", "--folder", ".", "--top", "0"], None, "--top must be 1 or more"),
        (["Who?"], "", "standard input holds no passage"),
        (["Who?"], b"\xff\xfe", "standard input is not UTF-8 text"),
        (["Who?"], '{"text": "a"}\n{"text": ', "standard input, line 2"),
        (["Who?", "a.txt"], None, "a.txt is a file or folder; say --passages a.txt"),
        (["Who?", "--passages", "a.txt", "reader=llama"], None, "did you mean llama3_8b"),
        (["Who?", "--passages", "a.txt", "compressor.max_rouds=1"], None, "did you mean compressor.max_rounds"),
        (["Who?", "--passages", "a.txt", "--gate", "absent.json"], None, "gate file absent.json does not exist"),
        (["Who?", "--passages", "a.txt", "--selector", "mine"], None, "selector 'mine' is not among selectors: there is none"),
        (["Who?", "--passages", "a.txt", "reader.model=nowhere"], None, "model folder nowhere does not exist"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path: Path, arguments: list[str], given: str | bytes | None, what: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("Brontë".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (tmp_path / "bare").mkdir()
    if "reader.model=nowhere" in arguments:
        arguments = [*arguments, "compressor.model=nowhere"]
    done = ask(tmp_path, *arguments, given=given)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and what in last and "Traceback" not in done.stderr


# ---- answers


def test_an_answer_with_its_candidates(tmp_path: Path, tiny_overrides: list[str]) -> None:
    """Steps on standard error; answer, summary, every candidate and what it took on standard output."""
    (tmp_path / "a.txt").write_text(TEXT)
    done = ask(tmp_path, QUESTION, "--passages", "a.txt", *tiny_overrides)
    assert done.returncode == 0, done.stderr
    assert [step in done.stderr for step in ("sampling ...", "scoring ...", "reading ...")] == [True] * 3
    for words in (
        "Answer",
        "Summary",
        "SPS",
        "PPL",
        "chosen",
        "initial",
        "lowest PPL",
        "3 from a.txt",
        "not calibrated",
        "tokens:",
    ):
        assert words in done.stdout, words


def test_json_gate_and_standard_input(tmp_path: Path, tiny_overrides: list[str]) -> None:
    """--calibrate writes a gate, which a question then uses; --json is strict and alone on standard output."""
    train = tmp_path / "train.jsonl"
    rows = [
        {"id": str(k), "question": f"What is {k}?", "answers": ["x"], "ctxs": [{"title": "", "text": TEXT}]} for k in range(4)
    ]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    calibration = [f"dataset.calibration_path={train}", "dataset.corpus=null"]
    done = ask(tmp_path, "--calibrate", "--gate", "gate.json", *tiny_overrides, *calibration)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gate.json: a ratio above ") and "(30% of 4)" in done.stdout
    done = ask(tmp_path, QUESTION, "--gate", "gate.json", "--json", "--no-answer", *tiny_overrides, given=TEXT)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout, parse_constant=lambda text: pytest.fail(f"{text} is not strict JSON"))
    assert plain["gate"] in ("skipped", "sampled") and plain["answer"] is None and plain["threshold"] > 0
    assert len(plain["candidates"]) == (1 if plain["skipped"] else 3)
    assert [passage["text"] for passage in plain["passages"]] == PARAGRAPHS
    other = ask(tmp_path, QUESTION, "--gate", "gate.json", *tiny_overrides, "dataset.segment_size=2", given=TEXT)
    assert other.returncode == 2 and "calibrated with another segment size" in other.stderr.splitlines()[-1]


def test_model_text_cannot_drive_the_terminal() -> None:
    """Escape sequences and direction overrides are shown as a replacement mark; ordinary text of any script stays."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import ask as program
    finally:
        sys.path.pop(0)
    assert program.plain("a\x1b[31mb\u202ec\x07") == "a\ufffd[31mb\ufffdc\ufffd"
    assert program.plain("Ḥā 中文 שלום [bold]\n\t") == "Ḥā 中文 שלום [bold]\n\t"


def test_errors_of_parsing_keep_their_row(tmp_path: Path) -> None:
    path = tmp_path / "null.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(UsageError, match=r"null\.jsonl, line 2: the row has no text"):
        read_passages(path)
