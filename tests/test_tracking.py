"""Weights & Biases offline and online, with the real package: everything arrives, and nothing of it stops a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import ENVIRONMENT, small_run, swept

from xcompress.config import ROOT, compose, to_settings
from xcompress.schema import UsageError
from xcompress.tracking import NoTracker, Wandb, open_tracker

QUIET = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("WANDB")}


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file (LevelDB's log format: blocks of 32 KiB, each chunk with checksum, length and kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0:
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def told(path: Path) -> dict[str, Any]:
    """What a .wandb file says: configuration, logged names, summary names, exit code, group."""
    found: dict[str, Any] = {"config": {}, "logged": set(), "summary": set(), "exit": None, "group": ""}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["group"] = record.run.run_group
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            found["logged"] |= {item.key or "/".join(item.nested_key) for item in record.history.item}
        elif kind == "summary":
            found["summary"] |= {item.key or "/".join(item.nested_key) for item in record.summary.update}
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


@pytest.mark.slow
def test_a_sweep_offline(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """Each job is a run of its own in the sweep's group; the failed one is marked as failed; the tables are on disk as ever."""
    model = model_folder("llama")
    command = [text for text in small_run(tmp_path, model, 3, 1) if not text.startswith("reader.model")]
    root = tmp_path / "runs"
    readers = f"reader.model={model},{tmp_path / 'absent'}"
    done = subprocess.run(
        swept(command, readers, f"run_root={root}", "logger=wandb"),
        capture_output=True, text=True, timeout=900, check=False, env=QUIET, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = [told(path) for path in sorted((root / "wandb").glob("offline-run-*/*.wandb"))]
    assert len(found) == 2
    good, bad = sorted(found, key=lambda run: run["exit"])
    assert (good["exit"], bad["exit"]) == (0, 1)
    assert good["group"] == bad["group"] and good["group"].startswith("sweep-")
    assert good["config"]["reader"]["model"] == str(model) and good["config"]["seed"] == 0
    logged = " ".join(sorted(good["logged"]))
    for name in ("generate/questions", "score/tokens", "read/questions", "table1/", "figures/table1/"):
        assert name in logged, logged
    assert any(name.startswith("xcompress/em") for name in good["summary"]), good["summary"]
    assert len(list((root / "tables").glob("*/table1.md"))) == 1


STARTED = """
import sys
from pathlib import Path
from xcompress.config import compose, to_settings
from xcompress.tracking import Wandb
settings = to_settings(compose(["experiment=laptop", f"run_root={sys.argv[1]}"]))
with Wandb(mode="online", timeout_seconds=5) as tracker:
    tracker.begin(settings, None)
    tracker.progress("generate", 1, 1, 10)
print("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "0" * 40], ids=["no login", "no network"])
def test_online_without_login_or_network(tmp_path: Path, key: str) -> None:
    """No prompt, no waiting beyond the set time, no failure: one warning, and the run goes on."""
    environment = {**QUIET, "HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", STARTED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**environment, **({"WANDB_API_KEY": key} if key else {})}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("went on\n"), done.stderr
    assert "wandb" in done.stderr and "Traceback" not in done.stderr
    if not key:
        assert "no login on this machine" in done.stderr and list((tmp_path / "wandb").glob("offline-run-*"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = to_settings(compose(["experiment=laptop", "logger=wandb", f"run_root={tmp_path}"]))
    with pytest.raises(UsageError, match=r"logger=wandb needs wandb: pip install -e '.\[wandb\]'; or set logger=none"):
        open_tracker(settings, None)


def test_settings_of_trackers() -> None:
    assert isinstance(open_tracker(to_settings(compose(["experiment=laptop"])), None), NoTracker)
    with pytest.raises(UsageError, match=r"logger\.mode=onlin is not known"):
        Wandb(mode="onlin")
    with pytest.raises(UsageError, match=r"unknown setting logger\.prject; did you mean logger\.project"):
        open_tracker(to_settings(compose(["experiment=laptop", "logger=wandb", "+logger.prject=x"])), None)


def test_trouble_while_logging_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """After the first trouble nothing more is sent, and nothing is raised."""

    class Broken:
        def log(self, _: dict[str, object]) -> None:
            raise ConnectionError("gone\nlong story")

        def finish(self, exit_code: int) -> None:
            raise ConnectionError("gone")

    with Wandb() as tracker:
        tracker._run = Broken()
        tracker.progress("generate", 1, 2, 3)
        tracker.progress("score", 1, 2, 3)
    assert [record.getMessage() for record in caplog.records] == ["wandb could not log (gone); the run goes on without it"]
