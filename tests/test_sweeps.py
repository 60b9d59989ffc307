"""Sweeps of real commands: a job that cannot load its reader, under every launcher; preemption; commands started together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import ENVIRONMENT, finish, shards, small_run, swept, tables, wait_for

from xcompress.config import ROOT, check_overrides, compose
from xcompress.jobs import read_status

LAUNCHERS = {
    "basic": [],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=60"],
}


def sweep_folder(root: Path) -> Path:
    """The folder of the one sweep below a run root."""
    (folder,) = (root / "logs").glob("sweep-*")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_cannot_load_its_reader(tmp_path: Path, model_folder: Callable[[str], Path], launcher: str) -> None:
    """Its own log has the traceback and its status the reason; the others finish; the table has its cell; exit code not 0."""
    model = model_folder("llama")
    readers = f"reader.model={model},{tmp_path / 'absent'},{model_folder('qwen3')}"
    command = [text for text in small_run(tmp_path, model, 2, 1) if not text.startswith("reader.model")]
    done = finish(swept(command, readers, f"run_root={tmp_path / 'runs'}", *LAUNCHERS[launcher]), timeout=900)
    assert done.returncode == 1, done.stderr
    folder = sweep_folder(tmp_path / "runs")
    states = [read_status(folder / str(number)) or {} for number in range(3)]
    assert [status["state"] for status in states] == ["finished", "failed", "finished"]
    assert "absent does not exist" in states[1]["reason"]
    log = (folder / "1" / "job.log").read_text()
    assert "Traceback" in log and "UsageError" in log and "absent does not exist" in log
    assert "questions to do" in (folder / "0" / "job.log").read_text()
    assert "Traceback" not in (folder / "0" / "job.log").read_text()
    assert "reader.model" in (folder / "2" / "config.yaml").read_text() or "qwen3" in (folder / "2" / "config.yaml").read_text()
    rows = json.loads((folder / "table.json").read_text())["rows"]
    assert [(row["state"], row["n"], row["dataset"]) for row in rows] == [
        ("finished", 2, "mini"), ("failed", None, "mini"), ("finished", 2, "mini"),
    ]  # fmt: skip
    assert "FAILED: model folder" in (folder / "table.md").read_text()
    assert "2 of 3 jobs finished" in done.stdout and "FAILED: model folder" in done.stdout
    assert len({row["tables"] for row in rows if row["tables"]}) == 2


@pytest.mark.slow
def test_a_preempted_job_goes_on(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """SIGTERM does not end it (the grace time is used), submitit's signal puts it back into the queue, and it goes on there."""
    command = small_run(tmp_path, model_folder("llama"), 12, 2)
    clean = finish([*command, f"run_root={tmp_path / 'clean'}"])
    assert clean.returncode == 0, clean.stderr
    root = tmp_path / "runs"
    arguments = swept(command, f"run_root={root}", *LAUNCHERS["submitit"])
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=ENVIRONMENT)
        try:
            wait_for(lambda: process.poll() is not None or len(list((root / "candidates").rglob("*.parquet"))) > 3)
            first = read_status(sweep_folder(root) / "0") or {}
            assert first["state"] == "running", (tmp_path / "log").read_text()
            os.kill(first["pid"], signal.SIGTERM)
            os.kill(first["pid"], signal.SIGUSR2)
            kept = {path: path.stat().st_mtime_ns for path in (root / "candidates").rglob("*.parquet")}
            assert process.wait(600) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
    second = read_status(sweep_folder(root) / "0") or {}
    assert second["state"] == "finished" and second["pid"] != first["pid"]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "nothing is computed twice"
    assert tables(root) == tables(tmp_path / "clean") and shards(root) == shards(tmp_path / "clean")
    log_text = (sweep_folder(root) / "0" / "job.log").read_text()
    assert "exit code 144" in log_text and log_text.count("generate:") >= 2


@pytest.mark.slow
def test_the_same_command_twice_at_once(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """Both finish with the same tables, each shard is there once, and most are computed once."""
    command = small_run(tmp_path, model_folder("llama"), 16, 2)
    root = tmp_path / "runs"
    logs = [tmp_path / "one", tmp_path / "two"]
    processes = []
    for path in logs:
        with path.open("w") as log:
            processes.append(subprocess.Popen([*command, f"run_root={root}"], stdout=log, stderr=log, env=ENVIRONMENT))
    try:
        assert [process.wait(900) for process in processes] == [0, 0], [path.read_text() for path in logs]
    finally:
        for process in processes:
            process.kill()
    tables(root)  # of one folder
    names = shards(root)
    assert len({re.sub(r"-[0-9a-f]{16}\.parquet$", "", name) for name in names}) == len(names), "no shard is there twice"
    notes = [json.loads(line) for path in root.glob("*/*/work.jsonl") for line in path.read_text().splitlines()]
    assert len(notes) == len({(note["shard"], note["file"]) for note in notes}), "no shard is computed twice"
    assert not list(root.rglob(".worker-*")) and not list(root.rglob("*.part"))


def test_a_killed_holder_does_not_block(tmp_path: Path) -> None:
    """A claim ends with its process; while it lives, the message names host and pid."""
    code = (
        "import sys, time; from pathlib import Path; from xcompress.execution.claims import Claims;"
        "c = Claims(Path(sys.argv[1])); assert c.take('00001-aa'); print('held', flush=True); time.sleep(60)"
    )
    from xcompress.execution.claims import Claims

    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        mine = Claims(tmp_path)
        assert not mine.take("00001-aa") and mine.take("00002-aa")
        assert mine.others() == [f"{os.uname().nodename} pid {other.pid}"]
        other.kill()
        other.wait()
        assert mine.take("00001-aa") and mine.others() == []
        mine.give_back("00001-aa")
        mine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["claims"]


def test_sbatch_arguments_are_the_documented_ones() -> None:
    """docs/cluster.md shows the lines that submitit makes of the configuration."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf
    from submitit.slurm import slurm

    check_overrides(["-m", "experiment=table1_slurm", "hydra.launcher.partition=gpu"])
    GlobalHydra.instance().clear()
    from hydra import compose as hydra_compose

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = hydra_compose("config", ["experiment=table1_slurm", "hydra.launcher.partition=gpu"], return_hydra_config=True)
    GlobalHydra.instance().clear()
    launcher = OmegaConf.to_container(config.hydra.launcher, resolve=False)
    assert isinstance(launcher, dict)
    known = {
        "job_name": launcher["name"], "time": launcher["timeout_min"], "mem": f"{launcher['mem_gb']}GB",
        "setup": launcher["setup"], "ntasks_per_node": launcher["tasks_per_node"],
        **{key: launcher[key] for key in ("partition", "nodes", "gpus_per_node", "cpus_per_task", "signal_delay_s")},
        **{key: launcher[key] for key in ("array_parallelism", "additional_parameters")},
    }  # fmt: skip
    made = slurm._make_sbatch_string("python -m submitit.core._submit", "FOLDER", map_count=20, **known)
    lines = [line for line in made.splitlines() if line.startswith("#SBATCH") and "FOLDER" not in line]
    documented = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert lines and all(line in documented for line in lines), "\n".join(lines)
    assert compose(["experiment=table1_slurm"]).engine.cache_gb == 12
