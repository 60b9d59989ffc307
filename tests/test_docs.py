"""The documents' commands and programs, run as they stand in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xcompress.config import ROOT

DOCS = ("docs/tutorial.md", "docs/extending.md", "docs/gpu.md", "README.md")
_SET_UP = ("make ", "source ", "pip ")  # what the tests' own environment stands for


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a document in a language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def script(document: str) -> str:
    """All bash blocks of a document as one script, without setting up."""
    lines = "\n".join(blocks(document, "bash")).splitlines()
    return "\n".join(line for line in lines if not line.startswith(_SET_UP))


def commands(document: str) -> list[list[str]]:
    """The words of every ``python scripts/...`` line."""
    lines = [line for block in blocks(document, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("python scripts/")]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what runs, to write into."""
    folder = tmp_path / "checkout"
    for name in ("analysis", "configs", "scripts", "xcompress"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command in the copy, with this Python as ``python`` and the copy's package."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    if not (programs / "python").exists():
        (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / "python").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3500, check=False)


@pytest.mark.parametrize("document", DOCS)
def test_commands_are_right(checkout: Path, document: str) -> None:
    """Without models: the document's files are written, then every command's arguments and settings are checked."""
    files = re.findall(r"^(?:mkdir [^\n]*|cat > \S+ <<'END'\n.*?^END)$", script(document), re.MULTILINE | re.DOTALL)
    for block in files:
        assert run(checkout, ["bash", "-euc", block]).returncode == 0
    found = commands(document)
    assert found
    check = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "from xcompress.config import check_overrides\n"
        "import ask\n"
        f"for words in {found!r}:\n"
        "    if words[1] == 'scripts/run.py': check_overrides(words[2:])\n"
        "    elif words[1] == 'scripts/ask.py': ask.configuration(ask.parse(words[2:]).overrides)\n"
        "    elif words[1] == 'scripts/fetch_data.py': check_overrides(words[2:])\n"
        "    else: raise SystemExit(f'not checked: {words}')\n"
    )
    done = run(checkout, [sys.executable, "-c", check])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCS)
def test_links_lead_somewhere(document: str) -> None:
    """Files that exist, and headings that are there."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("document", ["docs/tutorial.md", "docs/extending.md"])
def test_the_document_runs(checkout: Path, document: str) -> None:
    """Every command with the embedded model, in order; then what they are said to show is there."""
    done = run(checkout, ["bash", "-euo", "pipefail", "-c", script(document)])
    assert done.returncode == 0, done.stderr[-3000:]
    tables = [path.read_text(encoding="utf-8") for path in (checkout / "results" / "runs" / "tables").glob("*/table1.md")]
    if document == "docs/tutorial.md":
        assert "chosen" in done.stdout and "INCONCLUSIVE" in done.stdout and (checkout / "gate.json").exists()
        assert len(tables) == 2
    else:
        assert "a selector of your own chose" in done.stdout
        assert any("sps a root token" in table for table in tables) and any("Reader my_reader" in table for table in tables)
        assert list((checkout / "results" / "runs" / "questions").glob("quiz-test*"))


@pytest.mark.slow
@pytest.mark.parametrize("document", ["docs/tutorial.md", "README.md"])
def test_the_programs_run(checkout: Path, document: str) -> None:
    """The Python blocks, as they stand."""
    for block in blocks(document, "python"):
        done = run(checkout, ["python", "-c", block])
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip()


@pytest.mark.slow
def test_the_reference_is_made_without_a_warning(tmp_path: Path) -> None:
    """Every module has its page, and the public names are on the first one."""
    pytest.importorskip("pdoc", reason="needs pip install -e '.[docs]'")
    done = run(tmp_path, [sys.executable, str(ROOT / "scripts" / "api_reference.py"), str(tmp_path / "api")])
    assert done.returncode == 0, done.stderr[-3000:]
    for module in ("xcompress/controller", "xcompress/scorer", "xcompress/stages/generate", "analysis/table1"):
        assert (tmp_path / "api" / f"{module}.html").exists(), module
    front = (tmp_path / "api" / "xcompress.html").read_text(encoding="utf-8")
    assert "XCompress" in front and "SPSScorer" in front
