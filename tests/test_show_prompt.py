"""The prompts on the screen are the prompts that the stages send."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tokenizer

from xcompress.checkpoint import load_tokenizer
from xcompress.config import ROOT, compose, to_settings
from xcompress.engines.base import Request
from xcompress.engines.hf import open_engine
from xcompress.prompts import COMPRESSOR_PARTS, READER_PARTS, load_demos, load_template
from xcompress.schema import UsageError
from xcompress.settings import Settings
from xcompress.show_prompt import choose, compressor_prompts, reader_prompts, render
from xcompress.stages.generate import Compressor
from xcompress.stages.read import QuestionReader

ODD = "S = {x : x > 0}, see {{note}} and {question} \u2028 é"
ROWS = [
    {"_id": f"q{n}", "question": f"What is {n}? {{summary}}", "answers": ["mill"], "ctxs": [
        {"title": f"T{k}", "text": f"{ODD} {n} {k}" + " x" * 30} for k in range(5)
    ]}
    for n in range(1, 4)
]  # fmt: skip


def settings(tmp_path: Path, folder: Path, *overrides: str) -> Settings:
    path, demos = tmp_path / "a.jsonl", tmp_path / "demos.yaml"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    demos.write_text('- {question: "What is by {the} hill?", answers: ["old mill"]}\n', encoding="utf-8")
    config = ["dataset=nq", f"dataset.path={path}", f"dataset.demos_file={demos}", "dataset.segment_size=1"]
    config += ["compressor=smollm2_135m", "compressor.max_rounds=3", "compressor.max_new_tokens=4", "reader=smollm2_135m"]
    config += ["reader.max_new_tokens=4", "dataset.passages=4"]
    return to_settings(compose([*config, f"reader.model={folder}", f"compressor.model={folder}", *overrides]))


class Spy:
    """A real engine whose requests are kept."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.seen = engine, list[Request]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, requests: list[Request], progress: Any = None) -> Any:
        self.seen += requests
        return self.engine.generate(requests, progress)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prompts_are_those_of_a_real_run(tmp_path: Path, model_folder: Callable[[str], Path], family: str) -> None:
    """Round 1 and the reader's prompts, id by id; long passages are shortened alike (the tiny models take 512 tokens)."""
    folder = model_folder(family)
    s = settings(tmp_path, folder)
    tokenizer = load_tokenizer(folder)
    question = choose(s, 2)
    assert question.id == "q2" and len(question.passages) == 4
    engine = Spy(open_engine(folder, "float32", "cpu"))
    template = load_template(s.compressor.prompt_file, COMPRESSOR_PARTS)
    compressor = Compressor(engine, tokenizer, template, s.compressor, s.generation, 1, 0)
    rows = compressor.candidates([question], sampled=False)
    shown = compressor_prompts(s, tokenizer, 512, question)
    assert len(shown) == len(engine.seen) == 3
    assert shown[0].ids == engine.seen[0].prompt
    assert shown[0].tokens_removed == rows[0]["rounds"][0]["tokens_removed"]
    written = rows[0]["rounds"][0]["text"].strip()
    later = tokenizer.decode(engine.seen[1].prompt).replace(written, "(here stands the summary of round 1)")
    assert tokenizer.decode(shown[1].ids) == later

    engine.seen.clear()
    reader = QuestionReader(engine, tokenizer, load_template(s.reader.prompt_file, READER_PARTS), load_demos(
        Path(s.dataset.demos_file)), s.reader)  # fmt: skip
    reader.read([question], [{"question_id": "q2", "candidate": 0, "summary": "(here stands the summary)"}])
    over, raw, closed = reader_prompts(s, tokenizer, 512, question)
    assert [over.ids, raw.ids, closed.ids] == [engine.seen[2].prompt, engine.seen[0].prompt, engine.seen[1].prompt]
    assert raw.tokens_removed > 0, "long enough to be shortened"


@pytest.mark.parametrize(
    ("family", "start"),
    [("llama", "1 start token ('<|start|>', id 1)"), ("qwen3", "no start token (this tokenizer has none)")],
)
def test_what_is_printed(tmp_path: Path, model_folder: Callable[[str], Path], family: str, start: str) -> None:
    lines = list(render(settings(tmp_path, model_folder(family), "compressor.judge=generated"), with_ids=True))
    text = "\n".join(lines)
    assert lines[0] == "dataset nq, question 'q1', 4 passages"
    assert "  What is by {the} hill? -> old mill" in lines
    heads = [line for line in lines if line.startswith("===== ") and "tokens" in line]
    assert len(heads) == 6 and all(start in head for head in heads)
    assert "round 1 of at most 3" in heads[0] and "chat template" in heads[0] and "plain text" in heads[3]
    assert "(here stands the summary of round 1)" in text
    assert f"T1: {ODD} 1 1" in text, "passages stand there byte for byte"
    ids = [line.removeprefix("ids: ").split() for line in lines if line.startswith("ids: ")]
    counts = [int(head.partition(": ")[2].partition(" tokens")[0]) for head in heads]
    assert [len(numbers) for numbers in ids] == counts
    assert [numbers.count("1") for numbers in ids] == [1 if family == "llama" else 0] * 6


def test_evaluations_are_shown_where_the_compressor_writes_them(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    prompt = f"compressor.prompt_file={ROOT / 'configs/prompts/compressor_compact.yaml'}"
    s = settings(tmp_path, model_folder("llama"), "compressor.judge=generated", prompt, "engine.max_context=null")
    later = compressor_prompts(s, load_tokenizer(model_folder("llama")), 4096, choose(s))[1]
    text = load_tokenizer(model_folder("llama")).decode(later.ids)
    assert "Previous summary: (here stands the summary of round 1)\n" in text
    assert "Previous evaluation: (here stands the evaluation's reason)\n" in text


def test_choosing_a_question(tmp_path: Path) -> None:
    s = settings(tmp_path, tmp_path)
    assert [choose(s, 3).id, choose(s, 1, "q2").id] == ["q3", "q2"]
    for position, question_id, message in (
        (4, None, "has fewer"),
        (0, None, "count from 1"),
        (1, "q9", "no question with id 'q9'"),
    ):
        with pytest.raises(UsageError, match=message):
            choose(s, position, question_id)


def test_a_tokenizer_without_weights_is_enough_and_a_missing_compressor_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "only-a-tokenizer"
    make_tokenizer(start=True, chat=None).save_pretrained(folder)
    lines = list(render(settings(tmp_path, folder, "compressor.model=nobody/nothing-7b", "reader.chat=true")))
    assert any(
        "compressor's prompts are not shown: the tokenizer of nobody/nothing-7b is not on this" in line for line in lines
    )
    assert sum("plain text (the tokenizer has no chat template)" in line for line in lines) == 3
    with pytest.raises(UsageError, match="the tokenizer of nobody/nothing-7b"):
        list(render(settings(tmp_path, folder, "reader.model=nobody/nothing-7b")))


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    s = settings(tmp_path, model_folder("llama"))
    row = {**ROWS[0], "question": "What\x1b[31m is\x07?"}
    Path(str(s.dataset.path)).write_text(json.dumps(row) + "\n", encoding="utf-8")
    text = "\n".join(render(s))
    assert "What\\x1b[31m is\\x07?" in text and "\x1b" not in text and "\x07" not in text


def test_the_script_and_its_own_arguments(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    s = settings(tmp_path, model_folder("llama"))
    folder = model_folder("llama")
    data = [f"dataset.path={s.dataset.path}", f"reader.model={folder}", f"compressor.model={folder}", "dataset=nq"]
    data += ["compressor=smollm2_135m", "compressor.max_new_tokens=4", f"dataset.demos_file={s.dataset.demos_file}"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts" / "show_prompt.py"), *data, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = run("id=q3", "ids=true")
    assert done.returncode == 0, done.stderr
    assert "question 'q3'" in done.stdout and "\nids: " in done.stdout
    wrong = run("question=two")
    assert (wrong.returncode, wrong.stderr) == (2, "error: question=two: give a position from 1, or id=ID\n")
    assert "did you mean dataset.passages" in run("dataset.passage=3").stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        (["dataset=nq", "reader=llama3_8b", "question=3"], "'dataset=nq' 'reader=llama3_8b' 'question=3'"),
        (["ARGS=dataset=nq id=x"], "dataset=nq id=x"),
        (["dataset=nq", "ARGS=limit=3"], "'dataset=nq' limit=3"),
        ([], "experiment=laptop"),
    ],
)
def test_make_passes_the_choice_on(variables: list[str], arguments: str) -> None:
    environment = {"PATH": os.environ["PATH"]}
    command = ["make", "--dry-run", "--always-make", "show-prompt", *variables]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "show_prompt.py" in line]
    assert " ".join(line.split()).endswith(f"scripts/show_prompt.py {arguments}")
