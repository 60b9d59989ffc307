"""The command line: what is misspelt, missing or oddly quoted is answered in one sentence, before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xcompress.config import CONFIGS, ROOT, check_overrides, checked_main, compose, run_config, to_settings
from xcompress.schema import UsageError

QUESTION = {"id": "q1", "question": "Who?", "answers": ["A"], "ctxs": [{"title": "T", "text": "A did."}]}


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """scripts/run.py in a folder of its own, without any downloaded model."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)


def only_line(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refused command writes."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    return result.stderr


# ---- whole commands


@pytest.mark.parametrize(
    ("argument", "answer"),
    [("reader=llama3_8", "did you mean llama3_8b?"), ("generation.candidate=3", "did you mean generation.candidates")],
)
def test_misspelt_commands(tmp_path: Path, argument: str, answer: str) -> None:
    assert answer in only_line(run(tmp_path, argument))
    assert list(tmp_path.iterdir()) == [], "nothing is made"


def test_missing_data_file(tmp_path: Path) -> None:
    started = time.monotonic()
    line = only_line(run(tmp_path, "reader=llama3_8b", "dataset=hotpotqa", f"run_root={tmp_path / 'runs'}"))
    assert time.monotonic() - started < 60
    assert "data/hotpotqa/dev.jsonl does not exist" in line and "or set dataset.path=FILE" in line
    assert "hotpotqa.github.io" in line, "where to get it"


def test_missing_weights(tmp_path: Path) -> None:
    path = tmp_path / "my file, a=1.jsonl"
    path.write_text(json.dumps(QUESTION) + "\n", encoding="utf-8")
    arguments = ("reader=llama3_8b", "dataset=hotpotqa", f'dataset.path="{path}"', f"run_root={tmp_path / 'runs'}")
    line = only_line(run(tmp_path, *arguments))
    assert "model meta-llama/Llama-3.1-8B-Instruct is not on this machine" in line
    assert "hf download meta-llama/Llama-3.1-8B-Instruct" in line


def test_checks_load_no_model_code() -> None:
    code = (
        "import sys; from xcompress.config import check_overrides; check_overrides(['experiment=laptop', 'seed=1']);"
        "print([name for name in ('transformers', 'xcompress.pipeline', 'scipy', 'pandas') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"


# ---- overrides


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (
            ["reader=llama3_8"],
            "reader=llama3_8 does not exist; did you mean llama3_8b? Choices: gemma3_12b, gemma3_270m, llama3_8b",
        ),
        (["dataset=hotpot"], "dataset=hotpot does not exist; did you mean hotpotqa?"),
        (["experiment=lapto"], "did you mean laptop?"),
        (["engine=tensorflow"], "engine=tensorflow does not exist; Choices: auto, hf"),
        (["reader=null"], "reader=null does not exist; Choices: gemma3_12b"),
        (["readr=llama3_8b"], "setting readr does not exist; did you mean reader"),
        (["generation.candidate=3"], "setting generation.candidate does not exist; did you mean generation.candidates"),
        (["scoring.energie=[0.9]"], "setting scoring.energie does not exist; did you mean scoring.energies"),
        (["candidates=3"], "did you mean generation.candidates"),
        (["+foo=1"], "unknown setting foo"),
        (["+reader.chatt=true"], "unknown setting reader.chatt; did you mean reader.chat"),
        (["++reader.chatt=true"], "unknown setting reader.chatt"),
        (["~generation"], "lacks the group 'generation'"),
        (["method.gate=papr"], "method.gate=papr is not known (did you mean paper?)"),
        (["method.first_token=no"], "method.first_token must be true or false, not 'no'"),
        (["generation.candidates=-1"], "generation.candidates must be 0 or more"),
        (["hotpotqa"], "'hotpotqa' is not an override; write key=value"),
        (["seed=1", ""], "'' is not an override"),
        (["dataset.path=[a"], "an override cannot be parsed"),
        (["dataset.path=a b,c"], "lists several values; add -m to run them all, or quote the value"),
        (["reader=llama3_8b,qwen3_8b"], "add -m"),
        (["-m", "reader=llama3_8b,qwen3_8"], "reader=qwen3_8 does not exist; did you mean qwen3_8b?"),
        (["-m", "reader=glob(zzz*)"], "stands for no value"),
        (["-m", "method.gate=papr,none"], "method.gate=papr is not known"),
        (["dataset.path=${x}"], "configuration key dataset.path: Interpolation key 'x' not found"),
        (['dataset.path="data/${x}.jsonl"'], "configuration key dataset.path"),
    ],
)
def test_wrong_overrides_are_one_sentence(arguments: list[str], answer: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_overrides(arguments)
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["reader=qwen3_8b", "seed=1", "stages=[analyse]"],
        ["-m", "reader=llama3_8b,qwen3_8b"],
        ["--multirun", "reader=llama3_8b,qwen3_8b", "seed=range(1,4)", "method.energy=choice(0.5,0.9)"],
        ["hydra.mode=MULTIRUN", "seed=1,2"],
        ["-m", "reader=glob(*8b)"],
        ["-m", 'dataset.path="a b","c,d"'],
        ["+scoring.subspaces.query={matrix: q_proj, center: true, energy_of: squares}", "method.subspace=query"],
        ["dataset.columns={question: q}", "dataset.format=table"],
        ["hydra.verbose=true"],
        ["--help", "stray"],
        ["--config-name", "other", "zzz=1"],
    ],
)
def test_right_overrides_pass(arguments: list[str]) -> None:
    check_overrides(arguments)


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        ('dataset.path="a b,c=d.jsonl"', "a b,c=d.jsonl"),
        ("dataset.path='a b,c=d.jsonl'", "a b,c=d.jsonl"),
        ('dataset.path="{a} [b]: c.jsonl"', "{a} [b]: c.jsonl"),
        (r'dataset.path="a \${x}.jsonl"', "a ${x}.jsonl"),
        ("dataset.path=/data/a-b_c.v1.jsonl", "/data/a-b_c.v1.jsonl"),
    ],
)
def test_quoted_values_pass_through(argument: str, path: str) -> None:
    check_overrides([argument])
    assert to_settings(compose([argument])).dataset.path == path


def test_an_interpolation_error_names_the_key() -> None:
    with pytest.raises(UsageError, match=r"configuration key reader\.prompt_file: Interpolation key 'nowhere' not found"):
        to_settings(compose(["reader.prompt_file=${nowhere}"]))
    with pytest.raises(UsageError, match=r"configuration key dataset\.path: "):
        run_config(compose(['dataset.path="a ${x}"']))


def test_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = to_settings(compose(["experiment=laptop"]))
    assert Path(found.dataset.path or "").is_file() and Path(found.reader.prompt_file).is_file()
    own = tmp_path / "configs" / "prompts" / "reader_short_answer.yaml"
    own.parent.mkdir(parents=True)
    own.touch()
    again = to_settings(compose(["experiment=laptop"]))
    assert Path(again.reader.prompt_file).resolve() == own.resolve(), "a file that exists here comes first"


# ---- exit codes


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(UsageError("a file is missing"), 2, "error: a file is missing\n"), (KeyboardInterrupt(), 130, "stopped; run the same")],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    def main() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["run.py", "seed=1"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as stopped:
        checked_main(main)
    assert stopped.value.code == code
    assert capsys.readouterr().err.startswith(line)


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="a bug"):
        checked_main(main)


def test_every_group_of_the_command_line_is_a_folder() -> None:
    assert {"reader", "compressor", "dataset", "engine", "method", "execution", "experiment"} <= {
        p.name for p in CONFIGS.iterdir()
    }


def readme_commands() -> list[str]:
    """The commands with overrides that the README and the page on clusters print (tests/test_docs.py runs the tutorial's)."""
    files = (ROOT / "README.md", ROOT / "docs" / "cluster.md")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    commands = ("python scripts/run.py", "python scripts/fetch_data.py")
    return [line.partition("  #")[0].strip() for line in lines if line.startswith(commands)]


@pytest.mark.parametrize("line", readme_commands())
def test_readme_commands_compose(line: str) -> None:
    script, *arguments = shlex.split(line)[1:]
    assert (ROOT / script).is_file()
    check_overrides(arguments)


def test_the_readme_names_every_choice() -> None:
    """And no choice that does not exist."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for group in ("reader", "compressor", "dataset", "method", "engine", "execution", "logger", "experiment"):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{group}=` |")]
        named = set(re.findall(r"`([a-z0-9_]+)`", row.split("|")[2]))
        assert named == {path.stem for path in (CONFIGS / group).glob("*.yaml")}, group
