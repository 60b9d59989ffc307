"""The stages in order: what is there is used, what is missing is computed, one shard after the other."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcompress import checkpoint, doctor
from xcompress.checkpoint import fingerprint, locate
from xcompress.engines.base import Engine, Progress
from xcompress.forward import resolve_layer
from xcompress.progress import Bar
from xcompress.prompts import COMPRESSOR_PARTS, READER_PARTS, load_demos, load_template, start_token
from xcompress.schema import ANSWERS, CANDIDATES, QUESTIONS, RIVALS, SCORES, Question, UsageError
from xcompress.settings import ModelSettings, Settings, SourceSettings
from xcompress.stages import generate, prepare, read, rivals, score
from xcompress.store import Shard, StageFolder, digest, write_json

log = logging.getLogger(__name__)
Rows = list[dict[str, Any]]


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

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = Path(settings.run_root)
        self.prepare_seconds = 0.0
        self.compressor_template = load_template(settings.compressor.prompt_file, COMPRESSOR_PARTS)
        self.reader_template = load_template(settings.reader.prompt_file, READER_PARTS)
        self.demos = load_demos(Path(settings.dataset.demos_file))
        self.source = settings.dataset.source()
        self.calibration_source = settings.dataset.calibration()
        if set(settings.stages) != {"prepare"}:  # data can be looked at on a machine without the models
            self.folders = {"reader": _folder_of(settings.reader), "compressor": _folder_of(settings.compressor)}
            self._check_method()
            self._make_folders()

    def _check_method(self) -> None:
        """Layer, subspace, start token and gate of the method, as far as the reader's small files tell."""
        method = self.settings.method
        config = json.loads((self.folders["reader"] / "config.json").read_text(encoding="utf-8"))
        text_config = config.get("text_config", config)
        blocks = text_config.get("num_hidden_layers", text_config.get("n_layer"))
        try:
            resolve_layer(method.layer, int(blocks))
        except ValueError as error:
            raise UsageError(f"method.layer: {error}") from None
        tied = text_config.get("tie_word_embeddings", config.get("tie_word_embeddings", True))
        if self.settings.scoring.subspaces[method.subspace].matrix == "output_head" and tied:
            raise UsageError(
                f"method.subspace={method.subspace}: the output head of {self.settings.reader.name} is its embedding"
            )
        if method.start_token and start_token(checkpoint.load_tokenizer(self.folders["reader"])) is None:
            raise UsageError(f"method.start_token=true: the tokenizer of {self.settings.reader.name} has no start token")
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
            "engine": _engine_identity(s.engine),
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
        reader = {
            "reader": fingerprint(self.folders["reader"]),
            "dtype": checkpoint.pick_dtype(s.reader.dtype, checkpoint.pick_device(s.reader.device), self.folders["reader"]),
            "device": checkpoint.pick_device(s.reader.device).partition(":")[0],
        }
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
            "engine": _engine_identity(s.engine),
            "passage": self.reader_template["passage"],
        }
        self.rivals = StageFolder(self.root, "rivals", s.reader.name, self.rival_identity, RIVALS)
        self.answer_identity = {
            "stage": "answers",
            "version": read.VERSION,
            **reader,
            "engine": _engine_identity(s.engine),
            "prompt": dict(self.reader_template.parts),
            "chat": s.reader.chat,
            "demos": [list(pair) for pair in self.demos],
            "max_new_tokens": s.reader.max_new_tokens,
        }
        self.answers = StageFolder(self.root, "answers", s.reader.name, self.answer_identity, ANSWERS)

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
        if "generate" in self.settings.stages:
            self._generate(splits)
        if "score" in self.settings.stages:
            self._score(splits)
        if "read" in self.settings.stages:
            self._read(splits)
        checkpoint.release()
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
        s = self.settings

        def work() -> Callable[[Split, int, Progress], Rows]:
            engine, tokenizer = self._engine("compressor")
            compressor = generate.Compressor(
                engine, tokenizer, self.compressor_template, s.compressor, s.generation, s.dataset.segment_size, s.seed
            )
            return lambda split, index, progress: compressor.candidates(split.questions[index], split.name == "test", progress)

        self._stage("generate", [(split, self._candidate_folder(split), split.candidates) for split in splits], work)

    def _score(self, splits: Sequence[Split]) -> None:
        s = self.settings

        def work() -> Callable[[Split, int, Progress], Rows]:
            from xcompress.reader import TextScorer

            loaded = checkpoint.load(self.folders["reader"], s.reader.dtype, s.reader.device)
            scorer = TextScorer(loaded, s.scoring, self.root / "bases", s.reader.batch_tokens)
            if s.method.subspace not in scorer.bases:
                raise UsageError(
                    f"method.subspace={s.method.subspace} is not there for {s.reader.name}; it has {', '.join(scorer.bases)}"
                )
            write_json(self.scores.path / "axes.json", {"axes": scorer.axes, "bases": scorer.describe()})

            def one(split: Split, index: int, progress: Progress) -> Rows:
                candidates = self._input(self._candidate_folder(split), split.candidates[index], "generate")
                return score.score(candidates, scorer, progress)

            return one

        self._stage("score", [(split, self.scores, self.after_candidates(split)) for split in splits], work)

        if s.scoring.rivals:
            self._rivals(splits)

    def _rivals(self, splits: Sequence[Split]) -> None:
        """LongPPL and question likelihood of the test split's candidates, with the reader's engine."""

        def work() -> Callable[[Split, int, Progress], Rows]:
            engine, tokenizer = self._engine("reader")
            scorer = rivals.RivalScorer(engine, tokenizer, self.reader_template)
            return lambda split, index, progress: scorer.score(
                split.questions[index], self._input(self.candidates, split.candidates[index], "generate"), progress
            )

        test = [split for split in splits if split.name == "test"]
        self._stage("rivals", [(split, self.rivals, self.after_candidates(split)) for split in test], work)

    def _read(self, splits: Sequence[Split]) -> None:
        s = self.settings

        def work() -> Callable[[Split, int, Progress], Rows]:
            engine, tokenizer = self._engine("reader")
            reader = read.QuestionReader(engine, tokenizer, self.reader_template, self.demos, s.reader)
            return lambda split, index, progress: reader.read(
                split.questions[index], self._input(self.candidates, split.candidates[index], "generate"), progress
            )

        test = [split for split in splits if split.name == "test"]
        self._stage("read", [(split, self.answers, self.after_candidates(split)) for split in test], work)

    def _stage(
        self,
        name: str,
        parts: Sequence[tuple[Split, StageFolder, list[Shard]]],
        make: Callable[[], Callable[[Split, int, Progress], Rows]],
    ) -> None:
        """Compute the missing shards of a stage; its model is loaded only if something is missing."""
        missing = [(split, folder, shard) for split, folder, shards in parts for shard in shards if folder.find(shard) is None]
        total = sum(split.questions.sizes[shard.index] for split, _, shards in parts for shard in shards)
        todo = sum(split.questions.sizes[shard.index] for split, _, shard in missing)
        if not missing:
            log.info("%s: all %d questions are there already", name, total)
            return
        log.info("%s: %d of %d questions to do", name, todo, total)
        with _stage_errors(name):
            one = make()
            with Bar(name, todo) as bar:
                for split, folder, shard in missing:
                    started = time.monotonic()
                    bar.tokens_in_shard = 0
                    rows = one(split, shard.index, bar.tokens)
                    questions = split.questions.sizes[shard.index]
                    note = {
                        "seconds": round(time.monotonic() - started, 3),
                        "questions": questions,
                        "tokens": bar.tokens_in_shard,
                    }
                    folder.write(shard, rows, note)
                    bar.advance(questions)

    def _input(self, folder: StageFolder, shard: Shard, stage: str) -> Rows:
        try:
            return folder.read(shard)
        except FileNotFoundError as error:
            raise UsageError(f"{error}; run the stage {stage!r} first (stages=[...,{stage},...])") from None

    def _engine(self, role: str) -> tuple[Engine, Any]:
        from hydra.utils import instantiate

        s: ModelSettings = self.settings.reader if role == "reader" else self.settings.compressor
        engine: Engine = instantiate(
            dict(self.settings.engine), folder=self.folders[role], dtype=s.dtype, device=s.device, _convert_="all"
        )
        if not engine.reproducible:
            log.warning("engine %s cannot promise to repeat sampled texts; engine=hf can", engine.name)
        return engine, checkpoint.load_tokenizer(self.folders[role])

    # ---- what the analysis gets

    def collect(self, splits: Sequence[Split]) -> Collected:
        """All rows of this run, read back from the shards."""
        by_name = {split.name: split for split in splits}
        test = by_name["test"]
        calibration = by_name.get("calibration")
        after = {split.name: self.after_candidates(split) for split in splits}
        rival_shards = after["test"] if self.settings.scoring.rivals else []
        work = {
            "generate": [n for sp in splits for n in self._candidate_folder(sp).work(sp.candidates)],
            "score": [note for split in splits for note in self.scores.work(after[split.name])],
            "rivals": self.rivals.work(rival_shards),
            "read": self.answers.work(after["test"]),
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
            scores_folder=self.scores.path,
            identities={
                "questions": {split.name: [shard.input for shard in split.candidates] for split in splits},
                "candidates": self.candidate_identity,
                "scores": self.score_identity,
                "rivals": self.rival_identity,
                "answers": self.answer_identity,
            },
            shards={
                "candidates": _names(self.candidates, test.candidates),
                "calibration": _names(self.scores, after["calibration"]) if calibration else [],
                "scores": _names(self.scores, after["test"]),
                "rivals": _names(self.rivals, rival_shards),
                "answers": _names(self.answers, after["test"]),
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
    scores_folder: Path
    identities: dict[str, Any]
    shards: dict[str, list[str]]
    work: dict[str, list[dict[str, Any]]]


def _names(folder: StageFolder, shards: Sequence[Shard]) -> list[str]:
    paths = [folder.find(shard) for shard in shards]
    return [f"{folder.path.name}/{path.name}" for path in paths if path is not None]


# Settings of memory and speed: they change rows by floating-point ties at most, and a run that was out of memory must be able
# to go on with smaller ones.
_TUNING = {"cache_gb", "prefill_tokens"}


def _engine_identity(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in engine.items() if key not in _TUNING}


def _folder_of(settings: ModelSettings) -> Path:
    model = settings.model
    if isinstance(model, Mapping):
        from hydra.utils import instantiate

        model = instantiate(dict(model))
    if not isinstance(model, str) or not model:
        raise UsageError(f"{settings.name}: `model` must be a hub name, a folder, or {{_target_: ...}}, not {model!r}")
    return locate(model, settings.revision)


@contextmanager
def _stage_errors(name: str) -> Any:
    """Name the stage in what went wrong; what is finished stays."""
    try:
        yield
    except UsageError:
        raise
    except (KeyboardInterrupt, SystemExit):
        log.warning("stopped in %s; finished shards are kept, run the same command to go on", name)
        raise
    except Exception as error:
        error.add_note(f"(in stage {name}; finished shards are kept, run the same command to go on)")
        raise
