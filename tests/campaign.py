"""python tests/campaign.py KILLS FOLDER MODEL: kill, starve and damage whole runs; each must end with the clean run's tables.

Every attempt is a process of its own (forked, so that it need not import everything again). Exit code 1 if any table differs.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from clusters import STAGES, pause, shards, small_run, tables

from analysis.verify import verify
from xcompress.config import compose, run_config
from xcompress.schema import UsageError

USAGE_ERROR = 2
STEP = 5  # at most so many shards more until the next kill
LIMIT = 300.0  # seconds after which an attempt that nobody kills counts as hung
PRELOADED = (
    *("analysis.report", "xcompress.pipeline", "xcompress.engines.hf", "xcompress.reader", "hydra.core.hydra_config"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "xcompress.tracking"),
)


class Campaign:
    """Attempts at one small run, compared with a run that nothing happened to.

    Args:
        folder: for everything that is made.
        model: folder of a tiny model.
        seed: of the times of the kills.
    """

    def __init__(self, folder: Path, model: Path, seed: int = 0) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        for name in PRELOADED:  # once here instead of in every attempt
            importlib.import_module(name)
        self.overrides = [text for text in small_run(folder, model, 8, 2)[2:] if not text.startswith("run_root")]
        assert self.attempt(folder / "clean") == 0, self.log()
        self.clean = tables(folder / "clean"), shards(folder / "clean")

    def log(self) -> str:
        """What the last attempts printed."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def attempt(self, root: Path, kill_at: int | None = None, before: Callable[[], None] = lambda: None) -> int:
        """One process; its exit code, minus the signal that ended it.

        Args:
            root: of the run.
            kill_at: SIGKILL a moment after so many shards are there. Counted in shards, not in seconds, so that kills fall into
                every stage however fast the machine is.
            before: done in the process first.
        """
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with (self.folder / "log").open("ab") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                torch.set_num_threads(1)
                before()
                run_config(compose([*self.overrides, f"run_root={root}"]))
                code = 0
            except UsageError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                code = USAGE_ERROR
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        if kill_at is not None:
            while len(shards(root)) < kill_at:
                if (ended := os.waitpid(child, os.WNOHANG))[0]:
                    return os.waitstatus_to_exitcode(ended[1])
                time.sleep(0.002)
            # The tables take seconds after the last shard, and some attempts must get through them.
            pause(self.draw, 3.0 if kill_at >= len(self.clean[1]) else 0.1)
            os.kill(child, signal.SIGKILL)
        return self._end(child)

    def _end(self, child: int) -> int:
        """Exit code of a process that ends by itself; one that hangs is a failure of the run."""
        deadline = time.monotonic() + LIMIT
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError(f"an attempt still ran after {LIMIT:.0f} s: {self.log()}")
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(ended[1])

    def check(self, root: Path, what: str) -> None:
        """A finished run must have the clean run's tables and shards."""
        same = (tables(root), shards(root)) == self.clean
        self.counts[f"{what}: {'equal' if same else 'DIFFERENT'}"] += 1

    def kills(self, wanted: int) -> None:
        """SIGKILL at random points until it has happened so often; finished runs are compared and begun anew."""
        root, done, last = self.folder / "killed", 0, ""
        while done < wanted:
            before = set(shards(root))
            # One kill in a run's tables is enough: where they take longer than the pause, no attempt would get through.
            spare = last == "the tables"
            kill_at = None if spare else min(len(before) + self.draw.randint(0, STEP), len(self.clean[1]))
            code, last = self.attempt(root, kill_at), ""
            if code == -signal.SIGKILL:
                done += 1
                last = self._stage(root)
                self.counts[f"killed in {last}"] += 1
                self.counts["shards lost by a kill"] += len(before - set(shards(root)))
                if any((root / stage).is_dir() for stage in STAGES):
                    damaged = verify(root).damaged
                    self.counts["half-written files after a kill"] += len(damaged)
                    print(*damaged, sep="\n", file=sys.stderr)
                continue
            assert code == 0, self.log()
            self._finish(root)
        assert self.attempt(root) == 0, self.log()
        self._finish(root)

    def _finish(self, root: Path) -> None:
        self.check(root, "run after kills")
        shutil.rmtree(root)

    def _stage(self, root: Path) -> str:
        """Which stage a run had not finished."""
        whole = Counter(name.partition("/")[0] for name in self.clean[1])
        found = Counter(name.partition("/")[0] for name in shards(root))
        return next((stage for stage in STAGES if found[stage] < whole[stage]), "the tables")

    def damage(self) -> None:
        """A shard of each stage cut off, then one with a flipped bit; the run makes them again."""
        root = self.folder / "damaged"
        shutil.copytree(self.folder / "clean", root)
        for kind in ("truncated", "bit-flipped"):
            for stage in STAGES:
                path = self.draw.choice(sorted((root / stage).rglob("*.parquet")))
                data = bytearray(path.read_bytes())
                if kind == "truncated":
                    del data[self.draw.randrange(len(data)) :]
                else:
                    data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
                path.write_bytes(bytes(data))
                self.counts[f"{kind} shard found"] += any(str(path) in line for line in verify(root).damaged)
            assert self.attempt(root) == 0, self.log()
            self.check(root, f"run after {kind} shards")
        shutil.rmtree(root)

    def clock(self) -> None:
        """Half a run, all its files from the future (the clock was set back), then from 1970."""
        root = self.folder / "clock"
        while self.attempt(root, kill_at=len(self.clean[1]) // 2) == 0:
            shutil.rmtree(root)
        kept = set(shards(root))
        for moment in (time.time() + 10 * 365 * 86400, 0.0):
            for path in root.rglob("*"):
                os.utime(path, (moment, moment))
            assert self.attempt(root) == 0, self.log()
            self.check(root, "run after the clock was set back")
        self.counts["shards lost by the clock"] += len(kept - set(shards(root)))

    def memory(self) -> None:
        """A worker that may not have more memory than it starts with: it ends, and the next one finishes."""
        root = self.folder / "memory"

        def starve() -> None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), used + (8 << 20)))

        code = self.attempt(root, before=starve)
        self.counts["out-of-memory worker stopped"] += code != 0
        assert self.attempt(root) == 0, self.log()
        self.check(root, "run after an out-of-memory worker")

    def disk(self) -> bool:
        """A run on a disk of 96 KiB, then on a read-only one, then on one with room. False if none can be mounted."""
        root = self.folder / "disk"
        root.mkdir()

        def mount(options: str) -> bool:
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        if os.geteuid() != 0 or not mount("size=96k"):
            return False
        try:
            code = self.attempt(root / "runs")
            self.counts["full disk: stopped with one sentence"] += code == USAGE_ERROR and "the disk is full" in self.log()
            kept = set(shards(root / "runs"))
            assert mount("remount,ro,size=96k")
            code = self.attempt(root / "runs")
            self.counts["read-only folder: stopped with one sentence"] += code == USAGE_ERROR and "read-only" in self.log()
            assert mount("remount,rw,size=200m")
            assert self.attempt(root / "runs") == 0, self.log()
            self.check(root / "runs", "run after a full disk and a read-only folder")
            self.counts["shards lost by the disk"] += len(kept - set(shards(root / "runs")))
        finally:
            subprocess.run(["umount", "-l", str(root)], check=False)
        return True


def main(kills: int, folder: Path, model: Path) -> Counter[str]:
    """The whole campaign; its counts."""
    folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(folder, model)
    campaign.kills(kills)
    campaign.damage()
    campaign.clock()
    campaign.memory()
    if not campaign.disk():
        campaign.counts["full disk and read-only folder: not tested, nothing can be mounted here"] += 1
    return campaign.counts


if __name__ == "__main__":
    counts = main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    for name in sorted(counts):
        print(f"{counts[name]:4d}  {name}")
    sys.exit(any("DIFFERENT" in name for name in counts))
