"""Ray actors on a real cluster of two nodes: the same bytes as one process, whatever is killed on the way."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from clusters import ENVIRONMENT, finish, shards, small_run, tables, wait_for

from xcompress.config import compose, to_settings
from xcompress.execution.ray import Ray
from xcompress.schema import UsageError
from xcompress.settings import Settings

QUESTIONS = 250
ACTORS = ("execution=ray", "execution.actors=2", "execution.num_cpus=1", "execution.patience_seconds=120")


class TwoNodes:
    """A cluster on this machine in a process of its own, so that Ray's state and warnings stay out of pytest's."""

    CODE = """
import sys
from ray.cluster_utils import Cluster
node = dict(num_cpus=1, object_store_memory=150_000_000)
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
other = cluster.add_node(**node)
print("at", cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(other, allow_graceful=False)  # SIGKILL to its raylet and all it runs
    print("killed", flush=True)
cluster.shutdown()
"""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENVIRONMENT,
        )
        self.address = self._answer("at ").split()[1]

    def _answer(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError("the cluster did not start")

    def kill_a_node(self) -> None:
        """SIGKILL the second node."""
        assert self.process.stdin is not None
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        self._answer("killed")

    def close(self) -> None:
        """End the cluster."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def cluster() -> Iterator[TwoNodes]:
    """Two nodes with one CPU each."""
    nodes = TwoNodes()
    yield nodes
    nodes.close()


def actors() -> list[int]:
    """Process ids of the actors that hold models."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdecimal() and (path / "cmdline").read_bytes().startswith(b"ray::Holder"):
                found.append(int(path.name))
        except OSError:
            continue  # it has just ended
    return found


def laptop(*more: str) -> Settings:
    """Settings of the laptop experiment."""
    return to_settings(compose(["experiment=laptop", *more]))


class Nothing:
    """No jobs."""

    def take(self, wait: bool = True) -> None:
        """None."""


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"execution=ray needs Ray: pip install -e '.\[ray\]'; or set execution=local"):
        next(Ray().run(laptop(), "generate", Nothing(), print))


def test_no_cluster_at_the_address() -> None:
    """Said at once; Ray itself would look for it for minutes."""
    begun = time.monotonic()
    with pytest.raises(UsageError, match=r"execution\.address=127\.0\.0\.1:9: no Ray cluster answers there"):
        next(Ray(address="127.0.0.1:9").run(laptop(), "generate", Nothing(), print))
    assert time.monotonic() - begun < 60


def test_settings_as_the_actors_have_them() -> None:
    """Devices follow num_gpus, batch settings are those of the execution, and identities see neither of the latter."""
    settings = laptop("reader.device=auto", "compressor.device=auto")
    assert Ray().adapt(settings).reader.device == "cpu"
    on_gpus = Ray(num_gpus=1, cache_gb=9, prefill_tokens=77, batch_tokens=88).adapt(settings)
    assert (on_gpus.reader.device, on_gpus.compressor.device) == ("cuda", "cuda")
    assert (on_gpus.engine["cache_gb"], on_gpus.engine["prefill_tokens"], on_gpus.reader.batch_tokens) == (9, 77, 88)
    assert Ray(num_gpus=1).adapt(laptop("reader.device=cpu")).reader.device == "cpu", "what is set is kept"
    with pytest.raises(UsageError, match=r"execution\.cache_gb: this engine has no such setting"):
        Ray(cache_gb=1).adapt(dataclasses.replace(settings, engine={"_target_": "x"}))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match=r"reader\.dtype=auto cannot be told here"):
            Ray(num_gpus=1).adapt(laptop("reader.device=auto", "reader.dtype=auto"))
    with pytest.raises(UsageError, match="1 or more"):
        Ray(actors=0)


@pytest.mark.slow
def test_an_actor_and_a_node_die(cluster: TwoNodes, tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """SIGKILL to an actor while summaries are made, to a node while they are scored: nothing is lost, doubled or changed."""
    # So many that a stage lasts seconds: the node must die while it is at work.
    command = small_run(tmp_path, model_folder("llama"), questions=QUESTIONS, calibration=4)
    local = finish([*command, f"run_root={tmp_path / 'local'}"])
    assert local.returncode == 0, local.stderr
    root = tmp_path / "ray"
    arguments = [*command, f"run_root={root}", *ACTORS, f"execution.address={cluster.address}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=ENVIRONMENT)
        try:
            wait_for(lambda: process.poll() is not None or len(list((root / "candidates").rglob("*.parquet"))) > 3)
            os.kill(actors()[0], signal.SIGKILL)
            wait_for(lambda: process.poll() is not None or len(list((root / "scores").rglob("*.parquet"))) > 3)
            assert process.poll() is None, (tmp_path / "log").read_text()
            cluster.kill_a_node()
            assert process.wait(600) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
    text = (tmp_path / "log").read_text()
    print(*(line for line in text.splitlines() if "actor" in line or "ray:" in line), sep="\n")
    assert "ray: 2 nodes with 2 CPUs" in text
    assert any("generate: actor" in line and "is lost" in line for line in text.splitlines()), text
    assert any("score: actor" in line and "is lost" in line for line in text.splitlines()), text
    assert tables(root) == tables(tmp_path / "local")
    assert shards(root) == shards(tmp_path / "local"), "the same shards, each once"
    again = finish([*command, f"run_root={root}"])
    assert again.returncode == 0 and f"all {QUESTIONS} questions are there already" in again.stderr + again.stdout
