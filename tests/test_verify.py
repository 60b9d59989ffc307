"""make verify: OK for what was written, and the name of each file that is not that any more."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import small_run

from analysis.verify import report, verify
from xcompress.config import ROOT, compose, run_config
from xcompress.schema import UsageError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> Path:
    """A run root with one finished run."""
    folder = tmp_path_factory.mktemp("verify")
    more = ["execution.price_per_hour=3.6", f"run_root={folder / 'runs'}", "shard_size=2"]
    given = [text for text in small_run(folder, model_folder("llama"), 4, 2)[2:] if not text.startswith("shard_size")]
    run_config(compose([*given, *more]))
    return folder / "runs"


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path / "runs"


def tables_of(root: Path) -> Path:
    (folder,) = (root / "tables").iterdir()
    return folder


def test_what_was_written_is_ok(finished: Path) -> None:
    for folder in (finished, tables_of(finished)):
        found = verify(folder)
        assert found.damaged == [] and found.notes == []
        assert list(report(found))[-1].startswith("OK: ") and found.rows > 4 * 3 * 3


def test_the_record_of_a_run(finished: Path) -> None:
    """Code, packages, machine, models, data, rows, and seconds, tokens and cost of each stage."""
    record = json.loads((tables_of(finished) / "provenance.json").read_text())
    assert set(record["code"]) == {"commit", "uncommitted_changes"}
    assert record["packages"]["torch"] and record["machine"]["threads"] >= 1 and record["machine"]["memory_gb"] > 0
    assert len(record["models"]["reader"]["fingerprint"]) == 32 and record["models"]["compressor"]["dtype"] == "float32"
    assert len(record["dataset"]["fingerprint"]["files"][0]) == 32
    assert record["rows"] == {
        "questions": 4, "candidates": 12, "calibration": 2, "scores": 12, "rivals": 12, "answers": 20,
        "stepwise": 0, "stepwise_answers": 0,
    }  # fmt: skip
    stage = record["work"]["generate"]
    assert stage["questions"] == 6 and stage["tokens"] > 0
    assert stage["cost"] == pytest.approx(stage["seconds"] / 1000, abs=1e-4)


@pytest.mark.parametrize("stage", ["questions", "candidates", "scores", "rivals", "answers"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_shard_is_named(root: Path, stage: str, how: str) -> None:
    tables = tables_of(root)
    names = json.loads((tables / "provenance.json").read_text())["shards"][stage]
    path = root / stage / names[-1]
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-9] if how == "cut" else data[:50] + bytes([data[50] ^ 1]) + data[51:])
    found = verify(tables)
    assert [line.partition(": ")[0] for line in found.damaged] == [str(path.resolve())]
    if how != "gone":  # below a run root nothing says which shards should be there
        assert [line.partition(": ")[0] for line in verify(root).damaged] == [str(path)]


@pytest.mark.parametrize("name", ["table1.csv", "candidates.parquet", "verdicts.json", "config.yaml", "provenance.json"])
def test_a_changed_table_is_named(root: Path, name: str) -> None:
    path = tables_of(root) / name
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    assert any(line.startswith(str(path)) for line in verify(tables_of(root)).damaged)
    path.unlink()
    assert any(line == f"{path}: missing" for line in verify(tables_of(root)).damaged)


def test_rows_and_identities_are_checked(root: Path) -> None:
    tables = tables_of(root)
    record = json.loads((tables / "provenance.json").read_text())
    record["rows"]["scores"] = 11
    (tables / "provenance.json").write_text(json.dumps(record))
    (identity,) = (root / "rivals").glob("*/identity.json")
    identity.write_text(identity.read_text().replace('"rivals"', '"other"'))
    found = verify(tables).damaged
    assert any("says 11 rows of scores, the shards hold 12" in line for line in found)
    assert any(line.startswith(str(identity.resolve())) and "folder's name" in line for line in found)


def test_leftovers_are_notes(root: Path) -> None:
    (folder,) = (root / "answers").iterdir()
    (folder / ".x.parquet.host.1.part").write_bytes(b"half")
    (folder / "x.damaged").write_bytes(b"")
    found = verify(root)
    assert found.damaged == [] and len(found.notes) == 2


def test_a_run_stopped_before_its_first_shard_or_amid_its_tables_is_unfinished(root: Path) -> None:
    (root / "candidates" / "other-0123456789ab").mkdir()
    for name in ("checksums.json", "provenance.json"):
        (tables_of(root) / name).unlink()
    found = verify(root)
    assert found.damaged == [] and len(found.notes) == 2
    (folder,) = (root / "answers").iterdir()
    (folder / "identity.json").unlink()
    assert verify(root).damaged == [f"{folder / 'identity.json'}: missing"], "rows that nobody can tell the origin of"


def test_the_command(root: Path) -> None:
    """Exit code 0, 1 and 2."""

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "analysis.verify", str(folder)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done := run(tables_of(root))).returncode == 0 and done.stdout.startswith("OK: "), done.stderr
    (tables_of(root) / "table1.md").write_text("")
    assert (done := run(tables_of(root))).returncode == 1 and "DAMAGED" in done.stdout
    assert (done := run(root.parent)).returncode == 2 and done.stderr.count("\n") == 1
    with pytest.raises(UsageError, match="neither a run's tables folder nor a run root"):
        verify(root.parent)
