"""Whole runs with tiny random models: resume, sharing, damage, identities, missing labels."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from xcompress.config import ROOT, compose, run_config, to_settings
from xcompress.pipeline import Run
from xcompress.schema import UsageError

Runner = Callable[..., Path]
TABLES = ("table1.csv", "table1.md", "table1.json", "table1.svg", "counts.json", "candidates.parquet")


def write_questions(path: Path, count: int, start: int = 0, labelled: bool = True) -> Path:
    """A file of ``count`` questions with 2 to 7 passages each (so 1 to 3 rounds at 3 a segment)."""
    rows = []
    for number in range(start, start + count):
        draw = random.Random(number)
        passages = [
            {"title": f"Town {k}", "text": " ".join(draw.choice(["river", "hill", "old", "mill", "bridge"]) for _ in range(9))}
            for k in range(2 + number % 6)
        ]
        row = {"_id": f"q{number}", "question": f"What stands by river {number}?", "ctxs": passages}
        rows.append({**row, "answers": [["mill", "Old Mill", "a"][number % 3]]} if labelled else {**row, "answers": None})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def overrides(tmp_path: Path, model_folder: Callable[[str], Path]) -> list[str]:
    """Overrides of a small complete run: tiny Llama as compressor and reader, 6 questions, 4 for calibration."""
    demos = tmp_path / "demos.yaml"
    demos.write_text('- {question: "What is by the hill?", answers: ["old mill"]}\n', encoding="utf-8")
    return [
        "experiment=laptop",
        f"dataset.demos_file={demos}",
        f"reader.model={model_folder('llama')}",
        f"compressor.model={model_folder('llama')}",
        "compressor.max_new_tokens=12",
        "reader.max_new_tokens=6",
        "generation.candidates=2",
        f"dataset.path={write_questions(tmp_path / 'test.jsonl', 6)}",
        "dataset.corpus=null",
        "dataset.segment_size=3",
        f"dataset.calibration_path={write_questions(tmp_path / 'train.jsonl', 4, start=100)}",
        "shard_size=2",
        "statistics.resamples=200",
        "engine.prefill_tokens=512",
    ]


@pytest.fixture
def run(tmp_path: Path, overrides: list[str]) -> Runner:
    """Run with further overrides (a later one wins); returns the folder of the tables."""

    def runner(*more: str, root: str = "runs") -> Path:
        keys = {text.split("=", 1)[0] for text in more}
        kept = [text for text in overrides if text.split("=", 1)[0] not in keys]
        folder = run_config(compose([*kept, *more, f"run_root={tmp_path / root}"]))
        assert folder is not None
        return folder

    return runner


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run that must be equal to the byte."""
    return {name: (folder / name).read_bytes() for name in TABLES}


def shards(root: Path, stage: str) -> list[Path]:
    """Finished shards of a stage."""
    return sorted((root / stage).rglob("*.parquet"))


def test_a_run_makes_everything_and_again_nothing(run: Runner, tmp_path: Path) -> None:
    """Tables, records and shards are there; the second run computes no shard and gives the same bytes."""
    folder = run()
    root = tmp_path / "runs"
    made = {path: path.stat().st_mtime_ns for path in root.rglob("*.parquet") if "tables" not in path.parts}
    assert [len(shards(root, stage)) for stage in ("questions", "candidates", "scores", "answers")] == [5, 5, 5, 3]
    first = contents(folder)
    assert run() == folder
    assert contents(folder) == first
    assert {path: path.stat().st_mtime_ns for path in made} == made
    table = json.loads(first["table1.json"], parse_constant=lambda text: pytest.fail(f"{text} is not strict JSON"))
    assert [row["method"] for row in table["rows"]] == [
        *("closed_book", "raw_passages", "compact", "random", "shortest", "longest"),
        *("lowest_ppl", "lowest_longppl", "compressor", "question", "confidence", "majority"),
        *("lowest_sps", "xcompress", "oracle"),
    ]
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["work"]["generate"]["questions"] == 10
    assert provenance["packages"]["torch"] and provenance["identities"]["candidates"]["seed"] == 0
    assert (folder / "config.yaml").exists()


def test_deleted_and_damaged_shards_are_made_again(run: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing shard, a cut one and one with a flipped bit: named, recomputed, same tables."""
    folder = run()
    before = contents(folder)
    root = tmp_path / "runs"
    shards(root, "answers")[0].unlink()
    cut = shards(root, "scores")[1]
    cut.write_bytes(cut.read_bytes()[:-20])
    flipped = shards(root, "candidates")[2]
    data = bytearray(flipped.read_bytes())
    data[len(data) // 3] ^= 1
    flipped.write_bytes(bytes(data))
    caplog.clear()
    run()
    assert cut.name in caplog.text and flipped.name in caplog.text and "damaged" in caplog.text
    assert contents(folder) == before


def test_a_larger_limit_and_a_second_reader_reuse_what_is_there(
    run: Runner, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """limit=4 leaves two shards that limit=6 uses; another reader adds scores and answers but no candidate."""
    run("limit=4")
    root = tmp_path / "runs"
    four = set(shards(root, "candidates"))
    run()
    six = set(shards(root, "candidates"))
    assert four < six and len(six) == len(four) + 1
    run(f"reader.model={model_folder('qwen3')}", "reader.name=other")
    assert set(shards(root, "candidates")) == six
    assert len(list((root / "scores").iterdir())) == 2 and len(list((root / "answers").iterdir())) == 2


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("seed=1", {"candidates"}),
        ("generation.temperature=0.9", {"candidates"}),
        ("compressor.repetition_penalty=1.2", {"candidates"}),
        ("dataset.segment_size=2", {"candidates"}),
        ("scoring.energies=[0.9,0.95]", {"scores"}),
        ("reader.max_new_tokens=5", {"answers"}),
        ("reader.chat=true", {"answers"}),
        ("engine.prefill_tokens=64", set()),
        ("reader.batch_tokens=64", set()),
        ("method.gate_share=0.5", set()),
        ("method.pooling=mean", set()),
        ("statistics.level=0.9", set()),
    ],
)
def test_what_matters_has_its_own_files(overrides: list[str], tmp_path: Path, override: str, stages: set[str]) -> None:
    """A setting that changes a stage's rows changes that stage's files and no other's (later ones follow by content)."""

    def files(*more: str) -> dict[str, list[str]]:
        one = Run(to_settings(compose([*overrides, *more, f"run_root={tmp_path / 'runs'}"])))
        test = next(split for split in one.prepare() if split.name == "test")
        return {
            "candidates": [f"{one.candidates.path}/{shard.stem}" for shard in test.candidates],
            "scores": [str(one.scores.path)],
            "answers": [str(one.answers.path)],
        }

    before, after = files(), files(override)
    for stage, names in before.items():
        assert set(names).isdisjoint(after[stage]) == (stage in stages), stage
        assert (names == after[stage]) == (stage not in stages), stage


def test_order_of_questions_does_not_change_candidates(run: Runner, tmp_path: Path) -> None:
    """The same questions in reverse order give the same summaries."""
    forward = pq.read_table(run() / "candidates.parquet").to_pylist()
    lines = (tmp_path / "test.jsonl").read_text().splitlines()
    backward_file = tmp_path / "backward.jsonl"
    backward_file.write_text("\n".join(reversed(lines)) + "\n")
    backward = pq.read_table(run(f"dataset.path={backward_file}") / "candidates.parquet").to_pylist()

    def by_key(rows: list[dict[str, object]]) -> dict[object, object]:
        return {(row["question_id"], row["candidate"]): row["summary"] for row in rows}

    assert by_key(forward) == by_key(backward)
    assert len({row["summary"] for row in forward}) > len(forward) // 2


def test_stages_can_run_one_by_one(run: Runner, tmp_path: Path, overrides: list[str]) -> None:
    """Separate commands over saved files give what one command gives; a stage without its input says which to run."""
    config = [*overrides, f"run_root={tmp_path / 'steps'}"]
    with pytest.raises(UsageError, match="run the stage 'generate' first"):
        run_config(compose([*config, "stages=[prepare,score]"]))
    for stage in ("prepare", "generate", "score", "read"):
        assert run_config(compose([*config, f"stages=[{stage}]"])) is None
    stepwise = run_config(compose([*config, "stages=[analyse]"]))
    assert stepwise is not None
    assert contents(stepwise) == contents(run())


def test_missing_labels_are_not_zero(run: Runner, tmp_path: Path) -> None:
    """No label at all: every mean is n/a with a reason. Some: means are over the labelled ones, and n says so."""
    none = run(f"dataset.path={write_questions(tmp_path / 'none.jsonl', 4, labelled=False)}")
    rows = json.loads((none / "table1.json").read_text())["rows"]
    assert all(row["em"] is None and "no question has a gold answer" in row["reason"] for row in rows)
    assert json.loads((none / "counts.json").read_text())["answers"]["all"] == 4 * (2 + 3)
    some_file = tmp_path / "some.jsonl"
    write_questions(some_file, 4, labelled=False)
    labelled = write_questions(tmp_path / "labelled.jsonl", 3, start=50).read_text()
    some_file.write_text(some_file.read_text() + labelled)
    some = run(f"dataset.path={some_file}")
    assert {row["n"] for row in json.loads((some / "table1.json").read_text())["rows"]} == {3}


def test_without_calibration_the_gate_says_so(run: Runner) -> None:
    """The gated row is n/a with what to set; the others stand. A hold-out calibrates and leaves the tables."""
    rows = json.loads((run("dataset.calibration_path=null") / "table1.json").read_text())["rows"]
    by_name = {row["method"]: row for row in rows}
    assert by_name["xcompress"]["em"] is None and "calibration" in by_name["xcompress"]["reason"]
    assert by_name["lowest_sps"]["n"] == 6
    held = json.loads((run("dataset.calibration_path=null", "dataset.calibration_holdout=2") / "table1.json").read_text())
    assert {row["n"] for row in held["rows"]} == {4}
    assert next(row for row in held["rows"] if row["method"] == "xcompress")["em"] is not None


def test_a_sweep_goes_on_after_a_failed_job(tmp_path: Path, overrides: list[str], model_folder: Callable[[str], Path]) -> None:
    """Two readers, the first not there: its sentence is printed, the second's table is made, the exit code is not 0."""
    kept = [text for text in overrides if not text.startswith(("reader.model", "limit"))]
    readers = f"reader.model={tmp_path / 'absent'},{model_folder('llama')}"
    command = [
        sys.executable,
        str(ROOT / "scripts" / "run.py"),
        "-m",
        *kept,
        "limit=2",
        readers,
        f"run_root={tmp_path / 'sweep'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "this job failed: model folder" in done.stdout and "does not exist; give the path" in done.stdout + done.stderr
    assert len(list((tmp_path / "sweep" / "tables").glob("*/table1.json"))) == 1


def test_killed_at_any_moment_it_goes_on(run: Runner, tmp_path: Path, overrides: list[str]) -> None:
    """SIGKILL after the first candidate shard and after the first answer shard: at most one shard is lost, tables are equal."""
    clean = contents(run("shard_size=1", root="clean"))
    root = tmp_path / "killed"
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), *overrides, f"run_root={root}"]
    command = [text for text in command if not text.startswith("shard_size")] + ["shard_size=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in this process: the bytes are to be equal
    for stage in ("candidates", "answers"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + 120
        while process.poll() is None and not shards(root, stage) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert shards(root, stage), "the run ended before it could be killed"
    kept = {path: path.stat().st_mtime_ns for stage in ("candidates", "scores") for path in shards(root, stage)}
    folder = run("shard_size=1", root="killed")
    assert contents(folder) == clean
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert not [path for path in root.rglob("*.part")] or all(path.name.startswith(".") for path in root.rglob("*.part"))
