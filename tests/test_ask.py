"""scripts/ask.py as a user runs it: passages from everywhere, what it prints, strict JSON, one sentence for wrong input."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xcompress.config import ROOT
from xcompress.passages import paragraphs, parse_passages, read_passages, search_folder
from xcompress.schema import Passage, UsageError

TEXT = "The old mill stands\nby the river.\n\n\nA bridge of stone.\n \nNothing else.\n"
PARAGRAPHS = ["The old mill stands by the river.", "A bridge of stone.", "Nothing else."]
QUESTION = "What stands by the river?"


def load_program() -> Any:
    """scripts/ask.py as a module."""
    spec = importlib.util.spec_from_file_location("ask", ROOT / "scripts" / "ask.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


program = load_program()


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The program's main in a folder of its own, with ``given`` on standard input."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XCOMPRESS_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str, given: str | bytes = b"") -> None:
        raw = given.encode() if isinstance(given, str) else given
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        program.main(list(arguments))

    return run


@pytest.fixture
def tiny_overrides(tmp_path: Path, model_folder: Callable[[str], Path]) -> list[str]:
    """Tiny random models instead of the embedded one, and a demonstration that fits them."""
    demos = tmp_path / "demos.yaml"
    demos.write_text('- {question: "What is by the hill?", answers: ["old mill"]}\n', encoding="utf-8")
    folder = model_folder("llama")
    return [
        *(f"reader.model={folder}", f"compressor.model={folder}", f"dataset.demos_file={demos}"),
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
        (["Who?", "--passages", "absent.jsonl"], None, "there is no file absent.jsonl"),
        (["Who?", "--passages", "."], None, "is a folder; search it with --folder"),
        (["Who?", "--passages", "empty.txt"], None, "empty.txt holds no passage"),
        (["Who?", "--passages", "latin.txt"], None, "latin.txt is not UTF-8 text"),
        (["Who?", "--passages", "bad.jsonl"], None, "bad.jsonl, row 2: the row is in an unknown layout: its keys are body"),
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
def test_wrong_input_is_one_sentence(
    tmp_path: Path, ask: Callable[..., None], arguments: list[str], given: str | bytes | None, what: str
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("Brontë".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (tmp_path / "bare").mkdir()
    if "reader.model=nowhere" in arguments:
        arguments = [*arguments, "compressor.model=nowhere"]
    with pytest.raises(UsageError) as caught:
        ask(*arguments, given=given or "")
    assert what in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """And nothing that loads a model was imported by then."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "scripts" / "ask.py"), "Who?", "--passages", "absent.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout, said) == (2, "", ["error: absent.txt does not exist"])
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)


# ---- answers


def test_an_answer_with_its_candidates(
    tmp_path: Path, ask: Callable[..., None], tiny_overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps on standard error; answer, summary, every candidate and what it took on standard output."""
    (tmp_path / "a.txt").write_text(TEXT)
    ask(QUESTION, "--passages", "a.txt", *tiny_overrides)
    shown = capsys.readouterr()
    assert [step in shown.err for step in ("sampling ...", "scoring ...", "reading ...")] == [True] * 3
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
        assert words in shown.out, words


def test_json_gate_and_standard_input(
    tmp_path: Path, ask: Callable[..., None], tiny_overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """--calibrate writes a gate, which a question then uses; --json is strict and alone on standard output."""
    train = tmp_path / "train.jsonl"
    passages = [{"title": "", "text": TEXT}]
    rows = [{"id": str(k), "question": f"What is {k}?", "answers": ["x"], "ctxs": passages} for k in range(4)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ask("--calibrate", "--gate", "gate.json", *tiny_overrides, f"dataset.calibration_path={train}", "dataset.corpus=null")
    said = capsys.readouterr().out
    assert said.startswith("gate.json: a ratio above ") and "(30% of 4)" in said
    ask(QUESTION, "--gate", "gate.json", "--json", "--no-answer", *tiny_overrides, given=TEXT)
    plain = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is not strict JSON"))
    assert plain["gate"] in ("skipped", "sampled") and plain["answer"] is None and plain["threshold"] > 0
    assert len(plain["candidates"]) == (1 if plain["skipped"] else 3)
    assert [passage["text"] for passage in plain["passages"]] == PARAGRAPHS
    with pytest.raises(UsageError, match="calibrated with another segment size"):
        ask(QUESTION, "--gate", "gate.json", *tiny_overrides, "dataset.segment_size=2", given=TEXT)


def test_model_text_cannot_drive_the_terminal() -> None:
    """Escape sequences and direction overrides are shown as a replacement mark; ordinary text of any script stays."""
    assert program.plain("a\x1b[31mb\u202ec\x07") == "a\ufffd[31mb\ufffdc\ufffd"
    assert program.plain("Ḥā 中文 שלום [bold]\n\t") == "Ḥā 中文 שלום [bold]\n\t"


def test_errors_of_parsing_keep_their_row(tmp_path: Path) -> None:
    path = tmp_path / "null.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(UsageError, match=r"null\.jsonl, row 2: the row has no text"):
        read_passages(path)
