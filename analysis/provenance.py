"""Where a run's figures come from: code, versions, machine, models, data, time."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from importlib import metadata
from typing import Any

from xcompress.config import ROOT
from xcompress.pipeline import Collected

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "pandas", "pyarrow", "bm25s", "hydra-core", "vllm")


def provenance(collected: Collected, seconds: dict[str, float]) -> dict[str, Any]:
    """The record stored with the tables. Times are of the shards in use, whenever they were computed."""
    return {
        "command": _command(),
        "code": _code(),
        "python": platform.python_version(),
        "packages": _versions(),
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()},
        "dataset": {
            "name": collected.settings.dataset.name,
            "split": collected.settings.dataset.split,
            "licence": collected.settings.dataset.licence,
        },
        "execution": collected.settings.execution["name"],
        "health": collected.health,
        "identities": collected.identities,
        "shards": collected.shards,
        "work": work(collected),
        "seconds_of_this_command": {name: round(value, 1) for name, value in seconds.items()},
    }


def work(collected: Collected) -> dict[str, dict[str, float]]:
    """Seconds, questions and tokens of each stage, summed over the shards in use."""
    return {
        stage: {
            "seconds": round(sum(note["seconds"] for note in notes), 1),
            "questions": sum(note["questions"] for note in notes),
            "tokens": sum(note["tokens"] for note in notes),
        }
        for stage, notes in collected.work.items()
    }


def _command() -> str | None:
    """The command line that runs this configuration (in a sweep: this job alone), or None outside the command line."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return None
    overrides = [text for text in HydraConfig.get().overrides.task if not text.startswith("stages=")]
    return f"python scripts/run.py {shlex.join(overrides)}".rstrip()


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _code() -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "uncommitted_changes": None if status is None else bool(status)}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
