"""The stages in order: what is there is used, what is missing is computed, one shard after the other."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xcompress import checkpoint, doctor
from xcompress.checkpoint import fingerprint
from xcompress.engines import choose
from xcompress.execution.base import Batch, Job, Rows, open_execution
from xcompress.execution.stage import run_stage
from xcompress.execution.work import model_folder
from xcompress.prompts import COMPRESSOR_PARTS, READER_PARTS, load_demos, load_template
from xcompress.schema import ANSWERS, CANDIDATES, QUESTIONS, RIVALS, SCORES, STEPWISE, Question, UsageError
from xcompress.selectors import RollingGate, gate_threshold
from xcompress.settings import Settings, SourceSettings
from xcompress.stages import generate, prepare, read, rivals, score, stepwise
from xcompress.store import Shard, StageFolder, digest
from xcompress.tracking import NoTracker, Tracker
from xcompress.views import check_variant, ratio_place

log = logging.getLogger(__name__)


@dataclass
class Split:
    """One set of questions on its way through the stages."""

    name: str  # "test" or "calibration"
    questions: prepare.StoredQuestions  # by shard, each read when it is asked for
    candidates: list[Shard]

    @property
    def health(self) -> dict[str, Any]:
        return dict(self.questions.health)


class Run:
    """One run: resolved settings, the folders they name, and the stages.

    Everything that can be checked without a model is checked when this is made.

    Raises:
        UsageError: a file, model, prompt or setting is missing or wrong.
    """

    def __init__(self, settings: Settings, tracker: Tracker | None = None) -> None:
        self.tracker = tracker or NoTracker()
        self.execution = open_execution(settings.execution)
        self.settings = settings = self.execution.adapt(settings)
        self.root = Path(settings.run_root)
        self.prepare_seconds = 0.0
        self.compressor_template = load_template(settings.compressor.prompt_file, COMPRESSOR_PARTS)
        self.reader_template = load_template(settings.reader.prompt_file, READER_PARTS)
        self.demos = load_demos(Path(settings.dataset.demos_file))
        self.source = settings.dataset.source()
        self.calibration_source = settings.dataset.calibration()
        if set(settings.stages) != {"prepare"}:  # data can be looked at on a machine without the models
            self.folders = {"reader": model_folder(settings.reader), "compressor": model_folder(settings.compressor)}
            self._check_method()
            choose.check(settings)
            self._make_folders()

    def _check_method(self) -> None:
        """Layer, subspace, start token and gate of the method, as far as the reader's small files tell."""
        method = self.settings.method
        check_variant(self.settings, self.folders["reader"])
        if method.gate != "none" and self.calibration_source is None and not self.settings.dataset.calibration_holdout:
            log.warning(
                "no calibration questions: the gated row will be n/a; set dataset.calibration_path=FILE,"
                " dataset.calibration_holdout=N, or method=xcompress_no_gate"
            )
        elif self.calibration_source is not None:
            log.info("the gate is calibrated on %s", self.calibration_source.path)

    def _make_folders(self) -> None:
        """Folder names hash what changes the rows; stages that agree upstream share upstream folders."""
        s = self.settings
        sampling = {"temperature": s.generation.temperature, "top_p": s.generation.top_p, "top_k": None, "min_p": None}
        self.candidate_identity = {
            "stage": "candidates",
            "version": generate.VERSION,
            "compressor": fingerprint(self.folders["compressor"]),
            "dtype": checkpoint.pick_dtype(
                s.compressor.dtype, checkpoint.pick_device(s.compressor.device), self.folders["compressor"]
            ),
            "device": checkpoint.pick_device(s.compressor.device).partition(":")[0],
            "engine": choose.identity(s.engine),
            "prompt": dict(self.compressor_template.parts),
            "chat": s.compressor.chat,
            "judge": s.compressor.judge,
            "max_rounds": s.compressor.max_rounds,
            "max_new_tokens": s.compressor.max_new_tokens,
            "repetition_penalty": s.compressor.repetition_penalty,
            "segment_size": s.dataset.segment_size,
            "candidates": s.generation.candidates,
            "sampling": sampling,
            "seed": s.seed,
        }
        self.candidates = StageFolder(self.root, "candidates", s.compressor.name, self.candidate_identity, CANDIDATES)
        # Calibration needs the initial summaries alone; they are the same whatever is sampled beside them.
        greedy = {**self.candidate_identity, "candidates": 0, "sampling": None, "seed": None}
        self.greedy = StageFolder(self.root, "candidates", s.compressor.name, greedy, CANDIDATES)
        device = checkpoint.pick_device(s.reader.device)

        def reader_in(dtype: str) -> dict[str, str]:
            return {
                "reader": fingerprint(self.folders["reader"]),
                "dtype": checkpoint.pick_dtype(dtype, device, self.folders["reader"]),
                "device": device.partition(":")[0],
            }

        reader = reader_in(s.scoring_dtype)
        self.score_identity = {
            "stage": "scores",
            "version": score.VERSION,
            **reader,
            "subspaces": [  # a list: the stored axis has their order
                [name, entry.matrix, entry.center, entry.energy_of, entry.rows] for name, entry in s.scoring.subspaces.items()
            ],
            "energies": [float(energy) for energy in s.scoring.energies],
            "start_token": list(s.scoring.start_token),
        }
        self.scores = StageFolder(self.root, "scores", s.reader.name, self.score_identity, SCORES)
        self.rival_identity = {
            "stage": "rivals",
            "version": rivals.VERSION,
            **reader,
            "engine": choose.identity(s.engine),
            "passage": self.reader_template["passage"],
        }
        self.rivals = StageFolder(self.root, "rivals", s.reader.name, self.rival_identity, RIVALS)
        self.answer_identity = {
            "stage": "answers",
            "version": read.VERSION,
            **reader_in(s.reading_dtype),
            "engine": choose.identity(s.engine),
            "prompt": dict(self.reader_template.parts),
            "chat": s.reader.chat,
            "demos": [list(pair) for pair in self.demos],
            "max_new_tokens": s.reader.max_new_tokens,
        }
        self.answers = StageFolder(self.root, "answers", s.reader.name, self.answer_identity, ANSWERS)
        self._make_stepwise_folders(reader)

    def _make_stepwise_folders(self, reader: dict[str, str]) -> None:
        """Folders of the trajectory that is chosen round by round; they belong to one method."""
        s = self.settings
        method = s.method
        subspace = s.scoring.subspaces[method.subspace]
        self.stepwise_identity = {
            "stage": "stepwise",
            "version": stepwise.VERSION,
            "candidates": self.candidate_identity,
            **reader,
            "options": method.options,
            "beams": [method.beams, method.beam_penalty] if method.options == "beams" else None,
            "gate": [method.gate, method.gate_share, method.gate_pool] if method.gate == "release" else method.gate,
            "subspace": [subspace.matrix, subspace.center, subspace.energy_of, subspace.rows],
            "view": [str(method.layer), method.pooling, method.energy, method.first_token, method.start_token],
            "include_initial": method.include_initial,
        }
        self.stepwise = StageFolder(self.root, "stepwise", method.name, self.stepwise_identity, STEPWISE)
        identity = {**self.answer_identity, "of": "stepwise"}
        self.stepwise_answers = StageFolder(self.root, "answers", s.reader.name, identity, ANSWERS)

    # ---- the stages

    def execute(self) -> Collected | None:
        """Run ``settings.stages``; returns all rows if the tables are to be made of them.

        Raises:
            UsageError: a stage needs rows of an earlier one that is neither there nor among the stages to run.
        """
        started = time.monotonic()
        splits = self.prepare()
        self.prepare_seconds = time.monotonic() - started
        if set(self.settings.stages) == {"prepare"}:
            doctor.examine({split.name: split.questions for split in splits}, self.settings)
        try:
            for name, stage in (
                ("generate", self._generate),
                ("score", self._score),
                ("stepwise", self._stepwise),
                ("read", self._read),
            ):
                if name in self.settings.stages:
                    stage(splits)
        finally:
            self.execution.close()
        return self.collect(splits) if "analyse" in self.settings.stages else None

    def prepare(self) -> list[Split]:
        """Questions of the test split and, where there is one, of the calibration split, in shards."""
        s = self.settings
        splits = []
        holdout = s.dataset.calibration_holdout
        if self.calibration_source is not None:
            splits.append(self._prepare("calibration", self.calibration_source, 0, s.dataset.calibration_limit))
        elif holdout:
            splits.append(self._prepare("calibration", self.source, 0, holdout))
        splits.append(self._prepare("test", self.source, holdout, s.limit))
        return splits

    def _prepare(self, name: str, source: SourceSettings, skip: int, limit: int | None) -> Split:
        s = self.settings
        identity = {**prepare.identity(source, s.dataset.passages), "skip": skip, "limit": limit, "shard_size": s.shard_size}
        folder = StageFolder(self.root, "questions", f"{s.dataset.name}-{name}", identity, QUESTIONS)
        questions = prepare.stored(folder, s.dataset.passages)
        if questions is None:
            questions = prepare.store(folder, source, s.dataset.passages, skip, limit, s.shard_size)
        return Split(name, questions, [Shard(index, key) for index, key in enumerate(questions.candidate_keys)])

    def _candidate_folder(self, split: Split) -> StageFolder:
        return self.greedy if split.name == "calibration" else self.candidates

    def after_candidates(self, split: Split) -> list[Shard]:
        """The shards made from a split's candidates, named by the content of the candidate files.

        Scores and answers can then never be joined to summaries they were not computed from, even if those were generated again
        with another result.

        Raises:
            UsageError: candidates are missing.
        """
        folder = self._candidate_folder(split)
        shards = []
        for shard in split.candidates:
            path = folder.find(shard)
            if path is None:
                raise UsageError(
                    f"{folder.path} has no shard {shard.stem}; run the stage 'generate' first (stages=[...,generate,...])"
                )
            shards.append(Shard(shard.index, digest([folder.path.name, path.name])))
        return shards

    def _generate(self, splits: Sequence[Split]) -> None:
        self._stage("generate", [self._jobs(split, self._candidate_folder(split), split.candidates) for split in splits])

    def _score(self, splits: Sequence[Split]) -> None:
        self._stage("score", [self._after_candidates(split, self.scores) for split in splits])
        if self.settings.scoring.rivals:
            self._stage("rivals", [self._after_candidates(split, self.rivals) for split in splits if split.name == "test"])

    def _stepwise(self, splits: Sequence[Split]) -> None:
        """The trajectory that a stepwise method chooses round by round, on the test split."""
        if self.settings.method.policy != "stepwise":
            return
        shards = self.stepwise_shards(splits)
        if shards is None:
            log.warning("stepwise: not run, since the gate has no calibration questions")
            return
        test = next(split for split in splits if split.name == "test")
        threshold = self._threshold(splits)
        rolling = self.settings.method.gate == "release"

        def inputs(index: int) -> dict[str, Any]:
            # The rolling gate goes on where the shard before has left it.
            before = self._input(self.stepwise, shards[index - 1], "stepwise") if rolling and index else []
            gate = self._gate(threshold, before[-1]["gate_pool"] if before else ())
            return {"candidates": self._input(self.candidates, test.candidates[index], "generate"), "gate": gate}

        def ready(index: int) -> bool:
            return not rolling or index == 0 or self.stepwise.find(shards[index - 1]) is not None

        self._stage("stepwise", [self._jobs(test, self.stepwise, shards, inputs, ready)])

    def _gate(self, threshold: float | None, pool: Sequence[float]) -> stepwise.Gate:
        method = self.settings.method
        if method.gate == "release":
            return RollingGate(method.gate_share, method.gate_pool, pool)
        return stepwise.OpenGate() if threshold is None else stepwise.StaticGate(threshold)

    def _threshold(self, splits: Sequence[Split]) -> float | None:
        """The static gate's threshold from the scores of the calibration split; None without a static gate, or without such."""
        calibration = [split for split in splits if split.name == "calibration"]
        if self.settings.method.gate != "paper" or not calibration:
            return None
        axes = json.loads((self.scores.path / "axes.json").read_text(encoding="utf-8"))["axes"]
        shape = (len(axes["start_token"]), len(axes["first_token"]))
        place = ratio_place(axes, self.settings.method)
        rows = [row for shard in self.after_candidates(calibration[0]) for row in self._input(self.scores, shard, "score")]
        ratios = [float(np.reshape(row["ratio"], shape)[place]) for row in rows if row["status"] == "ok"]
        return gate_threshold(ratios, self.settings.method.gate_share)

    def stepwise_shards(self, splits: Sequence[Split]) -> list[Shard] | None:
        """The shards of the stepwise stage, None where its gate cannot be set.

        With the rolling gate a question's rows depend on all questions before it, so a shard's name does too.
        """
        threshold = self._threshold(splits)
        if self.settings.method.gate == "paper" and threshold is None:
            return None
        test = next(split for split in splits if split.name == "test")
        shards: list[Shard] = []
        for shard in self.after_candidates(test):
            before = shards[-1].input if shards and self.settings.method.gate == "release" else None
            shards.append(Shard(shard.index, digest([shard.input, before, threshold])))
        return shards

    def _read(self, splits: Sequence[Split]) -> None:
        test = next(split for split in splits if split.name == "test")
        self._stage("read", [self._after_candidates(test, self.answers)])
        chosen = self.stepwise_shards(splits) if self.settings.method.policy == "stepwise" else None
        if chosen is None:
            return
        after = self.after_candidates(test)

        def inputs(index: int) -> dict[str, Any]:
            return {
                "chosen": self._input(self.stepwise, chosen[index], "stepwise"),
                "candidates": self._input(self.candidates, test.candidates[index], "generate"),
                "answers": self._input(self.answers, after[index], "read"),
            }

        self._stage("read (stepwise)", [self._jobs(test, self.stepwise_answers, self.after_stepwise(chosen), inputs)])

    def after_stepwise(self, chosen: Sequence[Shard]) -> list[Shard]:
        """The shards of answers to the stepwise choices, named by the content of the files they are made from.

        Raises:
            UsageError: stepwise rows are missing.
        """
        found = []
        for shard in chosen:
            path = self.stepwise.find(shard)
            if path is None:
                raise UsageError(f"{self.stepwise.path} has no shard {shard.stem}; run the stage 'stepwise' first")
            found.append(Shard(shard.index, digest([self.stepwise.path.name, path.name])))
        return found

    def _stage(self, name: str, parts: Sequence[list[Job]]) -> None:
        """Compute the missing shards of a stage; its model is loaded only if something is missing."""
        run_stage(self.settings, self.execution, self.tracker, name, [job for part in parts for job in part])

    def _after_candidates(self, split: Split, folder: StageFolder) -> list[Job]:
        """Jobs that turn a split's candidates into rows of ``folder``."""

        def inputs(index: int) -> dict[str, Any]:
            return {"candidates": self._input(self._candidate_folder(split), split.candidates[index], "generate")}

        return self._jobs(split, folder, self.after_candidates(split), inputs)

    @staticmethod
    def _jobs(
        split: Split,
        folder: StageFolder,
        shards: Sequence[Shard],
        inputs: Callable[[int], Mapping[str, Any]] = lambda _: {},
        ready: Callable[[int], bool] = lambda _: True,
    ) -> list[Job]:
        """A job for each shard; ``inputs`` gives what a batch holds beside its questions, ``ready`` whether that is there."""

        def job(shard: Shard) -> Job:
            index = shard.index
            return Job(
                folder,
                shard,
                split.questions.sizes[index],
                load=lambda: Batch(split.name, split.questions[index], **inputs(index)),
                ready=lambda: ready(index),
            )

        return [job(shard) for shard in shards]

    def _input(self, folder: StageFolder, shard: Shard, stage: str) -> Rows:
        try:
            return folder.read(shard)
        except FileNotFoundError as error:
            raise UsageError(f"{error}; run the stage {stage!r} first (stages=[...,{stage},...])") from None

    # ---- what the analysis gets

    def collect(self, splits: Sequence[Split]) -> Collected:
        """All rows of this run, read back from the shards."""
        by_name = {split.name: split for split in splits}
        test = by_name["test"]
        calibration = by_name.get("calibration")
        after = {split.name: self.after_candidates(split) for split in splits}
        rival_shards = after["test"] if self.settings.scoring.rivals else []
        chosen = (self.stepwise_shards(splits) if self.settings.method.policy == "stepwise" else None) or []
        read_chosen = self.after_stepwise(chosen)
        work = {
            "generate": [n for sp in splits for n in self._candidate_folder(sp).work(sp.candidates)],
            "score": [note for split in splits for note in self.scores.work(after[split.name])],
            "rivals": self.rivals.work(rival_shards),
            "stepwise": self.stepwise.work(chosen),
            "read": self.answers.work(after["test"]),
            "read (stepwise)": self.stepwise_answers.work(read_chosen),
        }
        return Collected(
            settings=self.settings,
            root=self.root,
            questions=[question for part in test.questions for question in part],
            health={split.name: split.health for split in splits},
            prepare_seconds=self.prepare_seconds,
            candidates=[row for shard in test.candidates for row in self._input(self.candidates, shard, "generate")],
            scores=[row for shard in after["test"] for row in self._input(self.scores, shard, "score")],
            rivals=[row for shard in rival_shards for row in self._input(self.rivals, shard, "score")],
            answers=[row for shard in after["test"] for row in self._input(self.answers, shard, "read")],
            calibration_scores=[
                row
                for shard in (after["calibration"] if calibration else [])
                for row in self._input(self.scores, shard, "score")
            ],
            stepwise=[row for shard in chosen for row in self._input(self.stepwise, shard, "stepwise")],
            stepwise_answers=[row for shard in read_chosen for row in self._input(self.stepwise_answers, shard, "read")],
            scores_folder=self.scores.path,
            identities={
                "questions": {split.name: [shard.input for shard in split.candidates] for split in splits},
                "candidates": self.candidate_identity,
                "scores": self.score_identity,
                "rivals": self.rival_identity,
                "answers": self.answer_identity,
                **({"stepwise": self.stepwise_identity} if chosen else {}),
            },
            shards={
                "questions": _names(test.questions.folder, test.questions.shards),
                "candidates": _names(self.candidates, test.candidates),
                "calibration": _names(self.scores, after["calibration"]) if calibration else [],
                "scores": _names(self.scores, after["test"]),
                "rivals": _names(self.rivals, rival_shards),
                "answers": _names(self.answers, after["test"]),
                "stepwise": _names(self.stepwise, chosen),
                "stepwise_answers": _names(self.stepwise_answers, read_chosen),
            },
            work=work,
        )


@dataclass(frozen=True)
class Collected:
    """The rows of one run as the analysis gets them, with what they came from."""

    settings: Settings
    root: Path
    questions: list[Question]
    health: dict[str, Any]
    prepare_seconds: float
    candidates: Rows
    scores: Rows
    rivals: Rows
    answers: Rows
    calibration_scores: Rows
    stepwise: Rows
    stepwise_answers: Rows
    scores_folder: Path
    identities: dict[str, Any]
    shards: dict[str, list[str]]
    work: dict[str, list[dict[str, Any]]]


def _names(folder: StageFolder, shards: Sequence[Shard]) -> list[str]:
    paths = [folder.find(shard) for shard in shards]
    return [f"{folder.path.name}/{path.name}" for path in paths if path is not None]
