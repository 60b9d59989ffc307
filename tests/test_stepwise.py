"""The policy that chooses in every round: against a plain-loop account of it, and what it shares with the pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import make_tokenizer
from sklearn.decomposition import PCA
from test_generate import TEMPLATE, compressor, make_question
from test_pipeline import Runner, contents, overrides, run

from analysis import stored as stored_run
from analysis.load import to_pool
from analysis.report import TABLES
from xcompress.checkpoint import Loaded
from xcompress.engines.base import Generation, Progress, Request
from xcompress.engines.hf import HFEngine
from xcompress.reader import TextScorer
from xcompress.schema import STEPWISE, Question, UsageError
from xcompress.selectors import RollingGate
from xcompress.settings import MethodSettings, ScoringSettings, SubspaceSettings
from xcompress.stages.generate import Compressor
from xcompress.stages.stepwise import Gate, OpenGate, StaticGate, StepwiseCompressor

pytestmark = pytest.mark.usefixtures("one_thread")
__all__ = ["overrides", "run"]  # fixtures
RELEASE = MethodSettings(
    "xcompress_release", policy="stepwise", options="beams", gate="release", gate_share=0.3, gate_pool=4, subspace="q_proj"
)
NEW_TOKENS = 7


def stepwise(loaded: Loaded, cache: Path, method: MethodSettings, gate: Gate, **changes: Any) -> StepwiseCompressor:
    """The policy on a tiny model that is compressor and reader."""
    tokenizer = make_tokenizer(True)
    values: dict[str, Any] = {"judge": "fixed", "max_new_tokens": NEW_TOKENS, "max_rounds": 3, "candidates": 3, **changes}
    subspaces = {
        "embedding": SubspaceSettings("embedding"),
        "q_proj": SubspaceSettings("q_proj", center=True, energy_of="squares"),
    }
    scoring = ScoringSettings(subspaces, [0.95], [False])
    engine = values.pop("engine", None) or HFEngine(loaded)
    return StepwiseCompressor(compressor(engine, tokenizer, **values), TextScorer(loaded, scoring, cache), method, gate)


def made_of(row: dict[str, Any]) -> list[tuple[bool, int, list[str]]]:
    """What happened in each round: skipped, chosen, texts."""
    return [(step["skipped"], step["chosen"], [o["text"] for o in step["options"]]) for step in row["steps"]]


# ---- the described procedure, in plain loops


class Described:
    """One question after the other, one text at a time, with the library's own generation and scikit-learn's PCA."""

    def __init__(self, model: Any, share: float, size: int) -> None:
        self.model = model
        self.tokenizer = make_tokenizer(True)
        weight = model.model.layers[-2].self_attn.q_proj.weight.detach().double().numpy()
        self.pca = PCA(n_components=0.95, svd_solver="full").fit(weight)
        self.share, self.size = share, size
        self.ratios: list[float] = []

    @torch.inference_mode()
    def write(self, prompt: str, **how: Any) -> list[str]:
        """Continuations of a prompt, as text."""
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=False,
            eos_token_id=0, pad_token_id=0, **how,
        )  # fmt: skip
        return [self.tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True).strip() for row in found]

    @torch.inference_mode()
    def states(self, text: str) -> np.ndarray[Any, Any]:
        """[tokens, D] input of the last block, no start token."""
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        states: np.ndarray[Any, Any] = self.model(ids, output_hidden_states=True).hidden_states[-2][0].double().numpy()
        return states

    def sps(self, text: str) -> float:
        """Distance of the max-pooled states to the principal subspace."""
        if not text:
            return float("inf")
        vector = self.states(text).max(0)[None]
        return float(np.linalg.norm(vector - self.pca.inverse_transform(self.pca.transform(vector))))

    def wants_sampling(self, text: str) -> bool:
        """The rolling gate."""
        states = self.states(text)
        ratio = float(np.linalg.norm(states.mean(0)) / np.abs(states.max(0)).sum())
        if len(self.ratios) < self.size:
            self.ratios.append(ratio)
            return True
        wants = ratio <= np.percentile(self.ratios, 100 * self.share)
        self.ratios.remove(min(self.ratios) if wants else max(self.ratios))
        self.ratios.append(ratio)
        return bool(wants)

    def compress(self, question: Question) -> list[tuple[bool, int, list[str]]]:
        """The rounds of a question: skipped, chosen, texts."""
        rounds: list[tuple[bool, int, list[str]]] = []
        summary = ""
        for at in range(0, len(question.passages), 2):
            documents = "\n\n".join(f"{p.title}={p.text}" for p in question.passages[at : at + 2])
            before = f"\nS:{summary}\nE:" if at else ""
            prompt = f"<|start|><|user|>Q:{question.question}{before}\nD:{documents}<|end|><|assistant|>"
            texts = self.write(prompt)
            wants = not texts[0] or self.wants_sampling(texts[0])
            if wants:
                texts += self.write(prompt, num_beams=5, num_return_sequences=5, repetition_penalty=1.2)
            scores = [self.sps(text) for text in texts]
            chosen = scores.index(min(scores))
            rounds.append((not wants, chosen, texts))
            summary = texts[chosen]
        return rounds


def questions(count: int = 5) -> list[Question]:
    """Questions of two or three rounds."""
    return [make_question(f"N{at}", 3 + at % 4) for at in range(count)]


def test_equal_to_the_described_procedure(tiny: Callable[[str], Loaded], eager: Callable[[str], Any], tmp_path: Path) -> None:
    """Same texts, same choices, same gate in every round, question after question; the gate decides both ways."""
    described = Described(eager("llama"), 0.3, 4)
    expected = [described.compress(question) for question in questions()]
    gate = RollingGate(0.3, 4)
    rows = stepwise(tiny("llama"), tmp_path, RELEASE, gate).run(questions(), [])
    assert [[(s, c, [t.strip() for t in texts]) for s, c, texts in made_of(row)] for row in rows] == expected
    assert sorted(rows[-1]["gate_pool"]) == pytest.approx(sorted(described.ratios), rel=1e-4)
    flat = [step for row in expected for step in row]
    assert {skipped for skipped, _, _ in flat} == {True, False} and any(chosen > 0 for _, chosen, _ in flat)
    assert all(len(step["options"]) == (1 if step["skipped"] else 6) for row in rows for step in row["steps"])
    assert [row["summary"] for row in rows] == [row[-1][2][row[-1][1]] for row in expected]
    pa.Table.from_pylist(rows, schema=STEPWISE)


# ---- sharing


class Counting(HFEngine):
    """Keeps what was asked of it."""

    asked: list[Request]

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        self.asked += requests
        return super().generate(requests, progress)


@pytest.mark.parametrize("options", ["beams", "sampled"])
def test_what_the_pool_has_is_not_generated_again(options: str, tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    """With the pool at hand the rows are the same but for ``shared``; round 1 asks for beams only, or for nothing."""
    method = replace(RELEASE, options=options, gate="none", subspace="embedding")
    engine = Counting(tiny("llama"))
    engine.asked = []
    chooser = stepwise(tiny("llama"), tmp_path, method, OpenGate(), engine=engine)
    pool = chooser.compressor.candidates(questions(3))
    alone = chooser.run(questions(3), [])
    engine.asked = []
    beside = chooser.run(questions(3), pool)
    for row in beside:
        assert all(option["shared"] for option in row["steps"][0]["options"] if option["kind"] != "beam")
    assert [made_of(row) for row in beside] == [made_of(row) for row in alone]
    first = {chooser.compressor.prompt(q, _nothing(), 1).ids for q in questions(3)}
    again = [request for request in engine.asked if request.prompt in first]
    assert [request.beams for request in again] == ([5] * 3 if options == "beams" else [])
    kinds = [[o["kind"] for o in step["options"]] for step in beside[0]["steps"]]
    assert kinds[0] == ["greedy", *(["beam"] * 5 if options == "beams" else ["sampled"] * 3)]


def _nothing() -> Any:
    from xcompress.prompts import Parsed

    return Parsed("", "", "missing")


def test_without_an_order_questions_advance_together(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    """A static gate needs no order: rows do not depend on the questions beside them; it skips what lies above."""
    chooser = stepwise(tiny("llama"), tmp_path, replace(RELEASE, gate="none"), OpenGate())
    together = chooser.run(questions(4), [])
    assert [made_of(row) for row in together] == [made_of(chooser.run([question], [])[0]) for question in questions(4)]
    ratios = [step["ratio"] for row in together for step in row["steps"]]
    chooser.gate = StaticGate(float(np.median([row["steps"][0]["ratio"] for row in together])))
    gated = chooser.run(questions(4), [])
    for row in gated:
        for step in row["steps"]:
            assert step["skipped"] == (step["ratio"] > chooser.gate.threshold)
            assert step["skipped"] == (len(step["options"]) == 1)
    assert len(set(ratios)) > 4
    assert sum(row["compressor_tokens"] for row in gated) < sum(row["compressor_tokens"] for row in together)


def test_the_greedy_output_may_be_left_out(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    """``include_initial`` false: it is chosen only where it stands alone."""
    rows = stepwise(tiny("llama"), tmp_path, replace(RELEASE, include_initial=False), RollingGate(0.3, 4)).run(questions(), [])
    for row in rows:
        for step in row["steps"]:
            assert (step["chosen"] == 0) == step["skipped"]


def test_complete_ends_it(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    """A chosen output that is judged complete ends the trajectory; a blank one is no score and never wins."""
    chooser = stepwise(tiny("llama"), tmp_path, RELEASE, OpenGate())

    def judge(outputs: Sequence[tuple[Any, Generation]]) -> list[Any]:
        from xcompress.prompts import Parsed

        return [Parsed("" if at == 0 else g.text, "", "complete") for at, (_, g) in enumerate(outputs)]

    chooser.compressor.judge = judge  # type: ignore[method-assign]
    (row,) = chooser.run([make_question("A", 6)], [])
    (step,) = row["steps"]
    assert step["ratio"] is None and step["options"][0]["sps"] is None and step["chosen"] > 0
    assert isinstance(chooser.compressor, Compressor) and TEMPLATE["first"]


# ---- whole runs

SMALL = ("method=xcompress_release", "method.gate_pool=5", "method.beams=3", "method.reading_dtype=null")


def stored(root: Path) -> list[dict[str, Any]]:
    """The stepwise rows below a run root, by question."""
    rows = [row for path in sorted(root.glob("stepwise/*/*.parquet")) for row in pq.read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: str(row["question_id"]))


def test_a_release_run(run: Runner, tmp_path: Path) -> None:
    """It has a row of its own in the table; shards carry the gate on, whatever their size; a run goes on where it was."""
    folder = run(*SMALL)
    rows = {row["method"]: row for row in json.loads((folder / "table1.json").read_text())["rows"]}
    own = rows["xcompress_release"]
    assert own["em"] is not None and own["compressor_tokens"] > rows["compact"]["compressor_tokens"]
    assert "stepwise" in own["label"]
    found = stored(tmp_path / "runs")
    assert len(found) == 6 and any(step["skipped"] for row in found for step in row["steps"])
    run(*SMALL, "shard_size=6", root="whole")
    assert [made_of(row) for row in stored(tmp_path / "whole")] == [made_of(row) for row in found]
    run(*SMALL, "limit=4", root="short")
    again = run(*SMALL, root="short")
    assert stored(tmp_path / "short") == found
    assert contents(again) == contents(folder)
    differences = json.loads((folder / "differences.json").read_text())["rows"]
    assert differences[-1]["point"].startswith("choice in every round") and differences[-1]["em"] == own["em"]
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    found_again = stored_run.collected(folder)
    for make in TABLES:
        make(to_pool(found_again), found_again.settings, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept, "the same tables from what is stored"
    answers = [r for p in (tmp_path / "runs").glob("answers/*/*.parquet") for r in pq.read_table(p).to_pylist()]
    assert sum(row["source"] == "stepwise" for row in answers) == 6


def test_stages_one_after_the_other(run: Runner, tmp_path: Path) -> None:
    """Reading before the stage has run says which stage is missing; other methods do not run it."""
    with pytest.raises(UsageError, match="'stepwise' first"):
        run(*SMALL, "stages=[prepare,generate,score,read]")
    run()
    assert not (tmp_path / "runs" / "stepwise").exists()


def test_the_paper_gate_stepwise(run: Runner, tmp_path: Path) -> None:
    """Sampled options behind the static gate: the threshold comes from the calibration questions."""
    run("method.policy=stepwise")
    rows = stored(tmp_path / "runs")
    assert {o["kind"] for row in rows for step in row["steps"] for o in step["options"]} <= {"greedy", "sampled"}
    ratios = [(step["ratio"], step["skipped"]) for row in rows for step in row["steps"]]
    kept = [ratio for ratio, skipped in ratios if skipped]
    drawn = [ratio for ratio, skipped in ratios if not skipped]
    assert drawn and (not kept or min(kept) > max(drawn))
