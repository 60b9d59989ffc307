"""The fault campaign and the scale run, as scripts of their own, so that they can also be run longer by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import ENVIRONMENT

from xcompress.config import ROOT

PATH = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
KILLS = int(os.environ.get("XCOMPRESS_KILLS", "30"))
LARGEST = int(os.environ.get("XCOMPRESS_SCALE", "10000"))  # 100000 takes about 10 minutes


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script of this folder to its end."""
    command = [sys.executable, str(ROOT / "tests" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=7200, check=False, env=PATH)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fault_campaign(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """Kills in every stage, damaged shards, a clock set back, too little memory, a full and a read-only disk: equal tables."""
    done = script("campaign.py", KILLS, tmp_path / "campaign", model_folder("llama"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name.strip(): int(count) for count, name in (line.strip().split("  ", 1) for line in done.stdout.splitlines())}
    assert sum(count for name, count in counts.items() if name.startswith("killed in")) == KILLS
    assert len([name for name in counts if name.startswith("killed in")]) >= 3, "in several stages"
    for name in ("shards lost by a kill", "half-written files after a kill", "shards lost by the clock"):
        assert counts[name] == 0, name
    for name in ("truncated shard found", "bit-flipped shard found"):
        assert counts[name] == 5, name
    assert counts["out-of-memory worker stopped"] == 1
    if "run after a full disk and a read-only folder: equal" in counts:
        for name in ("full disk: stopped with one sentence", "read-only folder: stopped with one sentence"):
            assert counts[name] == 1, name
        assert counts["shards lost by the disk"] == 0
    else:
        assert any("nothing can be mounted" in name for name in counts)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_scale(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """Ten (or a hundred) times the questions cost ten (or a hundred) times as much, in the same memory."""
    stages = "stages=[prepare,generate,score,read]"
    found = []
    for questions in (1000, LARGEST):
        done = script("scale.py", questions, tmp_path / str(questions), model_folder("llama"), stages)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout[done.stdout.index('{\n "questions"') :]))
        print(json.dumps(found[-1]))
    small, large = found
    for stage in ("generate", "score", "rivals", "read"):
        assert large[stage]["ms"] < 1.5 * small[stage]["ms"] + 0.2, stage
        assert large[stage]["mb_late"] < large[stage]["mb_early"] + 40, stage
    # What a question leaves in the driver is the names of its shards: under a kilobyte a shard of 100.
    assert large["read"]["mb_late"] < small["read"]["mb_late"] + 0.005 * LARGEST + 60
