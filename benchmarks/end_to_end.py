"""Whole runs: seconds a question of each stage, and whether they grow in proportion to the questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import Row, Section
from benchmarks.timing import summary
from benchmarks.workload import Setting
from xcompress import checkpoint
from xcompress.config import ROOT, compose, to_settings
from xcompress.pipeline import Run

# A process of its own for each size; a small run before it, so that imports and loading do not blur the line.
_WARM_RUN = """
import json, sys
from pathlib import Path
import scale
questions, folder, model = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
scale.run(20, folder / "warm", model, "shard_size=10")
print(json.dumps(scale.run(questions, folder / "run", model, "shard_size=10")))
"""
_STAGES = ("generate", "score", "rivals", "read")


def fit(questions: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Slope, intercept and R^2 of the least-squares line."""
    x, y = np.asarray(questions, dtype=float), np.asarray(seconds, dtype=float)
    slope, intercept = np.polyfit(x, y, 1)
    rest = y - (slope * x + intercept)
    return float(slope), float(intercept), float(1 - (rest @ rest) / ((y - y.mean()) @ (y - y.mean())))


def run(setting: Setting) -> Section:
    """The laptop run on the embedded model, then the program's own costs with a scripted engine."""
    section = Section("End to end")
    _laptop(setting, section)
    _growth(setting, section)
    return section


def _laptop(setting: Setting, section: Section) -> None:
    """Shards are done one after the other, so one run of 16 questions is also a run of 4, of 8 and of 12."""
    shard, count = (1, 2) if setting.quick else (4, 16)
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["experiment=laptop", f"limit={count}", f"shard_size={shard}", "method=xcompress_no_gate"]
        settings = to_settings(compose([*overrides, "dataset.calibration_path=null", f"run_root={folder}"]))
        collected = Run(settings).execute()
    assert collected is not None
    lines = []
    for stage in _STAGES:
        notes = collected.work[stage]
        seconds = [note["seconds"] for note in notes]
        done = list(accumulate(note["questions"] for note in notes))
        each = [note["seconds"] / note["questions"] for note in notes]
        slope, _, share = fit(done, list(accumulate(seconds)))
        tokens = sum(note["tokens"] for note in notes)
        line = [stage, f"{np.median(each):.2f} [{min(each):.2f}, {max(each):.2f}]", f"{tokens / sum(seconds):,.0f}"]
        lines.append([*line, f"{slope:.2f} s a question, R^2 {share:.4f}"])
        section.raw[stage] = {"seconds": seconds, "questions": done}
    headings = [f"embedded model, {count} questions", "s a question, median of shards [range]", "tokens/s", "line over shards"]
    section.tables.append((headings, lines))


def _growth(setting: Setting, section: Section) -> None:
    """The same pipeline with an engine that answers at once and a reader of two tiny layers: the program's own time."""
    sizes = (20, 40) if setting.quick else (50, 100, 200, 400, 800)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        _tiny(setting, model)
        for size in sizes:
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
            arguments = [str(size), str(Path(folder) / str(size)), str(model)]
            command = [sys.executable, "-c", _WARM_RUN, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            found.append(json.loads(done.stdout.splitlines()[-1]))
            setting.say(f"{size} questions with the scripted engine: {_milliseconds(found[-1]):.1f} ms a question")
    seconds = [each["questions"] * _milliseconds(each) / 1000 for each in found]
    slope, intercept, share = fit(sizes, seconds)
    section.rows.append(
        Row(
            f"program's own time, {sizes[0]} to {sizes[-1]} questions: R^2 of the line",
            f"{1000 * slope:.1f} ms a question",
            f"{intercept:.2f} s once",
            summary([share]),
            0.99,
        )
    )
    columns = ["prepare_ms", *_STAGES, "analyse_ms"]
    lines = [[str(each["questions"]), *(f"{_part(each, name):.1f}" for name in columns)] for each in found]
    section.tables.append(
        (["questions (scripted engine): ms a question", *(name.removesuffix("_ms") for name in columns)], lines)
    )
    section.raw["growth"] = found
    section.notes.append(
        "the scripted engine answers at once and the reader has two tiny layers, so the second table is the program's own"
        " processor time (one thread): what it adds to the models'. 6 summaries a question, 10 questions a shard."
    )


def _part(costs: dict[str, Any], name: str) -> float:
    value = costs[name]
    return float(value["ms"] if isinstance(value, dict) else value)


def _milliseconds(costs: dict[str, Any]) -> float:
    """Processor milliseconds a question, all stages but the analysis (whose resampling does not depend on the questions)."""
    return sum(_part(costs, name) for name in ("prepare_ms", *_STAGES))


def _tiny(setting: Setting, folder: Path) -> None:
    """A model folder with the embedded model's tokenizer and two random layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = checkpoint.load_tokenizer(setting.folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM
    model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
