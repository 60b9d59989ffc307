"""python tests/scale.py QUESTIONS FOLDER MODEL: a whole run over so many questions with a scripted engine, and its costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from xcompress.config import compose, run_config

STAGES = ("generate", "score", "rivals", "read")


def write_inputs(folder: Path, questions: int) -> None:
    """A file of questions with two short passages each, made line by line."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "test.jsonl").open("w", encoding="utf-8") as file:
        for number in range(questions):
            passages = [{"title": f"Town {k}", "text": f"By river {number} stands the old mill."} for k in range(2)]
            row = {
                "_id": f"q{number}",
                "question": f"What stands by river {number}?",
                "answers": ["old mill"],
                "ctxs": passages,
            }
            file.write(json.dumps(row) + "\n")
    (folder / "demos.yaml").write_text('- {question: "What is by the hill?", answers: ["old mill"]}\n', encoding="utf-8")


def run(questions: int, folder: Path, model: Path, *more: str) -> dict[str, Any]:
    """Processor milliseconds a question and megabytes of each stage; 6 candidates a question, 100 questions a shard."""
    write_inputs(folder, questions)
    meter = folder / "meter.jsonl"
    meter.unlink(missing_ok=True)
    run_config(
        compose(
            [
                *("experiment=laptop", f"dataset.path={folder / 'test.jsonl'}", f"dataset.demos_file={folder / 'demos.yaml'}"),
                *(f"reader.model={model}", f"compressor.model={model}", "dataset.corpus=null", "dataset.calibration_path=null"),
                *("method=xcompress_no_gate", "generation.candidates=5", "shard_size=100", "statistics.resamples=20"),
                "engine._target_=scripted.open_engine",
                *("logger._target_=scripted.Meter", f"+logger.file={meter}", "logger.name=meter", "compressor.max_rounds=1"),
                "scoring.subspaces={embedding: {matrix: embedding, center: false, energy_of: values, rows: all}}",
                *("scoring.energies=[0.95]", "scoring.start_token=[false]", f"run_root={folder / 'runs'}", *more),
            ]
        )
    )
    return costs([json.loads(line) for line in meter.read_text(encoding="utf-8").splitlines()], questions)


def costs(rows: list[dict[str, Any]], questions: int) -> dict[str, Any]:
    """Per stage: milliseconds a question from its first shard on, and memory at a tenth of it and at its end."""
    found: dict[str, Any] = {"questions": questions}
    for stage in STAGES:
        own = [row for row in rows if row["stage"] == stage]
        first, last = own[0], own[-1]
        early = own[len(own) // 10]
        done = last["done"] - first["done"]
        found[stage] = {
            "ms": round(1000 * (last["cpu"] - first["cpu"]) / done, 3),
            "mb_early": round(early["mb"]),
            "mb_late": round(last["mb"]),
        }
    before = next(row for row in rows if row["stage"] == "begin")
    start = next(row for row in rows if row["stage"] == "generate")
    end = next((row for row in rows if row["stage"] == "tables"), None)
    found["prepare_ms"] = round(1000 * (start["cpu"] - before["cpu"]) / questions, 3)
    if end is not None:
        last_read = [row for row in rows if row["stage"] == "read"][-1]
        found["analyse_ms"] = round(1000 * (end["cpu"] - last_read["cpu"]) / questions, 3)
        found["analyse_mb"] = round(end["mb"])
    return found


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]), indent=1))
