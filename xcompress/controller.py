"""The paper's controller for use in a RAG pipeline: summarise, gate, sample, score, choose (arXiv 2508.05909).

It runs the evaluation's own stages (:mod:`xcompress.stages`), so for the same question, models and seed it gives the summaries
and the choice that an evaluation run stores. What it adds: sampling really is skipped where the gate says so.

    from xcompress import XCompress
    controller = XCompress.from_config("experiment=laptop")
    result = controller.compress("Who wrote Dracula?", ["Dracula is a novel of 1897 by Bram Stoker."], answer=True)
    print(result.summary, result.answer)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompress import checkpoint
from xcompress.asked import Asked, PassageLike, as_question, distinct
from xcompress.compressed import Compressed, GateOutcome, Spent
from xcompress.embedded import cache_root
from xcompress.gate import Gate
from xcompress.prompts import COMPRESSOR_PARTS, READER_PARTS, load_demos, load_template
from xcompress.schema import Question, UsageError
from xcompress.selectors import Candidate, Selector, apply_selector, gate_skips, load_selectors, pick
from xcompress.settings import MethodSettings, Settings
from xcompress.stages.generate import Compressor
from xcompress.store import digest

if TYPE_CHECKING:
    from xcompress.reader import TextScorer
    from xcompress.stages.read import QuestionReader

log = logging.getLogger(__name__)

StepProgress = Callable[[str, int], None]
"""Called with the step ("initial summary", "sampling", "scoring", "reading") and the number of tokens just done."""


@dataclass
class _Pool:
    """One question on its way to a :class:`Compressed`."""

    question: Question
    rows: list[dict[str, Any]] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    gate: GateOutcome = "off"
    chosen: int = 0
    fallback: bool = False
    answer: dict[str, Any] | None = None


class XCompress:
    """The controller. Make one and keep it: it holds the models.

    Threads may share one; calls then take turns on the models, and each gives what it gives alone.

    Args:
        compressor: engine, prompt and settings that write summaries.
        scorer: the reader's weights, for SPS, NLL and the gate's ratio. It must score the method's variant.
        method: which SPS, which gate.
        reader: answers from the chosen summary; only ``answer=True`` needs it.
        gate: a calibrated gate or the file of one. Without it a method with a gate samples for every question.
        selector: chooses instead of the lowest SPS.

    Raises:
        UsageError: the scorer lacks the method's variant, or the gate was calibrated with something else.
    """

    def __init__(
        self,
        compressor: Compressor,
        scorer: TextScorer,
        method: MethodSettings | None = None,
        *,
        reader: QuestionReader | None = None,
        gate: Gate | str | Path | None = None,
        selector: Selector | None = None,
    ) -> None:
        from xcompress.views import sps_place

        self.compressor = compressor
        self.scorer = scorer
        self.method = method or MethodSettings("xcompress")
        _check_policy(self.method)
        self.reader = reader
        self.selector = selector
        self._place = sps_place(scorer.axes, self.method)
        self._gate: Gate | None = None
        self._warned = False
        owners = [scorer, compressor.engine, *([reader.engine] if reader else [])]
        locks = {id(loaded): loaded.lock for owner in owners if (loaded := getattr(owner, "loaded", None)) is not None}
        self._locks = [locks[key] for key in sorted(locks)]  # one order for all controllers: no deadlock
        if gate is not None:
            self.gate = gate if isinstance(gate, Gate) else Gate.load(gate)

    @classmethod
    def from_config(
        cls, *overrides: str, gate: Gate | str | Path | None = None, answers: bool = True, selector: str | None = None
    ) -> XCompress:
        """The controller of a configuration, composed as ``scripts/run.py`` does; its data set is not needed.

        Args:
            overrides: as on the command line, for example ``"reader=llama3_8b"``, ``"experiment=laptop"``.
            gate: see :class:`XCompress`.
            answers: whether ``answer=True`` will be asked for.
            selector: name of an entry of the configuration's ``selectors`` that chooses instead of the lowest SPS.

        Raises:
            UsageError: an override is misspelt, or a model, prompt or file is missing; said before a model is loaded.
        """
        from xcompress.config import settings_of

        return cls.from_settings(settings_of(list(overrides)), gate=gate, answers=answers, selector=selector)

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        gate: Gate | str | Path | None = None,
        answers: bool = True,
        selector: str | None = None,
    ) -> XCompress:
        """The same from settings that were composed already."""
        from xcompress.execution import work
        from xcompress.views import check_variant

        known = load_selectors(settings.selectors)
        if selector is not None and selector not in known:
            raise UsageError(f"selector {selector!r} is not among selectors: {', '.join(known) or 'there is none'}")
        _check_policy(settings.method)
        gate = Gate.load(gate) if isinstance(gate, str | Path) else gate
        load_template(settings.compressor.prompt_file, COMPRESSOR_PARTS)
        load_template(settings.reader.prompt_file, READER_PARTS)
        load_demos(Path(settings.dataset.demos_file))
        work.model_folder(settings.compressor)
        check_variant(settings, work.model_folder(settings.reader))

        return cls(
            work.compressor(settings),
            work.text_scorer(settings, work.narrowed(settings), cache_root() / "bases"),
            settings.method,
            reader=work.question_reader(settings) if answers else None,
            gate=gate,
            selector=known[selector] if selector else None,
        )

    # ---- the gate

    @property
    def gate(self) -> Gate | None:
        """The calibrated gate. Setting one that was calibrated with something else is a UsageError."""
        return self._gate

    @gate.setter
    def gate(self, gate: Gate | None) -> None:
        if gate is not None:
            gate.check(self.made_with())
        self._gate = gate

    def made_with(self) -> dict[str, Any]:
        """Everything that calibration ratios depend on: the reader, the token rules, and what writes the initial summary."""
        c, folder = self.compressor, Path(str(self.compressor.tokenizer.name_or_path))
        return {
            "reader": self.scorer.loaded.name,
            "reader_weights": checkpoint.fingerprint(self.scorer.loaded.folder),
            "reader_dtype": str(self.scorer.loaded.dtype),
            "start_token": self.method.start_token,
            "first_token": self.method.first_token,
            "compressor": checkpoint.model_name(folder),
            "compressor_weights": checkpoint.fingerprint(folder) if folder.is_dir() else str(folder),
            "compressor_dtype": c.settings.dtype,
            "prompt": digest(dict(c.template.parts)),
            "chat": c.settings.chat,
            "judge": c.settings.judge,
            "max_rounds": c.settings.max_rounds,
            "max_new_tokens": c.settings.max_new_tokens,
            "repetition_penalty": c.settings.repetition_penalty,
            "segment_size": c.segment_size,
        }

    def calibrate(self, questions: Iterable[Asked], progress: StepProgress | None = None) -> Gate:
        """Calibrate the gate on questions like those to come (the paper: the training split), use it, and return it.

        Answers are not needed. ``controller.calibrate(questions).save("gate.json")`` keeps it;
        ``XCompress.from_config(..., gate="gate.json")`` takes it up.

        Raises:
            UsageError: no question, or none whose initial summary has a ratio.
        """
        pools = [_Pool(question) for question in distinct(questions)]
        if not pools:
            raise UsageError("calibration needs questions")
        with self._exclusive():
            self._add(pools, progress, "initial summary", sampled=False)
        ratios = [ratio for pool in pools if (ratio := pool.candidates[0].ratio) is not None and math.isfinite(ratio)]
        if not ratios:
            raise UsageError(f"none of the {len(pools)} calibration questions has an initial summary with a ratio")
        if len(ratios) < len(pools):
            log.warning("%d of %d calibration questions have no ratio (blank summary)", len(pools) - len(ratios), len(pools))
        gate = self._gate = Gate(tuple(ratios), self.made_with())
        return gate

    # ---- compressing

    def compress(
        self,
        question: str | Question,
        passages: Sequence[PassageLike] | None = None,
        *,
        answer: bool = False,
        progress: StepProgress | None = None,
    ) -> Compressed:
        """The chosen summary of the passages for one question.

        Args:
            question: a text, or a :class:`xcompress.schema.Question` that holds its passages.
            passages: of a question given as text, best first.
            answer: also read the chosen summary and answer.
            progress: see :data:`StepProgress`.

        Raises:
            UsageError: a blank question, no passages, or a passage of no known kind.
        """
        if isinstance(question, Question):
            if passages is not None:
                raise UsageError("a Question holds its passages; give them once")
            return self.compress_batch([question], answer=answer, progress=progress)[0]
        return self.compress_batch([(question, passages or ())], answer=answer, progress=progress)[0]

    def compress_batch(
        self, questions: Iterable[Asked], *, answer: bool = False, progress: StepProgress | None = None
    ) -> list[Compressed]:
        """:meth:`compress` for many questions together (faster: they share forward passes); results in their order.

        Raises:
            UsageError: as :meth:`compress`; or two different questions have the same id.
        """
        asked = [as_question(item) for item in questions]
        if answer and self.reader is None:
            raise UsageError("answer=True needs a reader that answers; make the controller with one (answers=True)")
        pools = [_Pool(question) for question in distinct(asked)]
        if not pools:
            return []
        with self._exclusive():
            threshold = self._threshold()
            self._draw(pools, threshold, progress)
            for pool in pools:
                self._choose(pool)
            if answer:
                self._answer(pools, progress)
        results = {pool.question.id: self._result(pool, threshold) for pool in pools}
        return [results[question.id] for question in asked]

    def _threshold(self) -> float | None:
        """The gate's threshold, or None where nothing is gated."""
        if self.method.gate == "none":
            return None
        if self._gate is None:
            if not self._warned:
                self._warned = True
                log.warning("the gate is not calibrated: every question is sampled for (calibrate, or method.gate=none)")
            return None
        return self._gate.threshold(self.method.gate_share)

    def _draw(self, pools: Sequence[_Pool], threshold: float | None, progress: StepProgress | None) -> None:
        """Fill the pools: the initial summaries, and the sampled ones where the gate asks for them."""
        if threshold is None:  # all at once: initial and sampled summaries share the prompt's prefill
            for pool in pools:
                pool.gate = "off" if self.method.gate == "none" else "not calibrated"
            self._add(pools, progress, "sampling")
            return
        self._add(pools, progress, "initial summary", sampled=False)
        for pool in pools:
            pool.gate = "skipped" if gate_skips(pool.candidates[0].ratio, threshold) else "sampled"
        self._add([pool for pool in pools if pool.gate == "sampled"], progress, "sampling", initial=False)

    def _add(
        self,
        pools: Sequence[_Pool],
        progress: StepProgress | None,
        step: str,
        sampled: bool = True,
        initial: bool = True,
    ) -> None:
        """Generate candidates and score them."""
        from xcompress.stages import score

        shape = [len(values) for values in self.scorer.axes.values()]
        by_id = {pool.question.id: pool for pool in pools}
        questions = [pool.question for pool in pools]
        rows = self.compressor.candidates(questions, sampled, _step(progress, step), initial)
        scores = score.score(rows, self.scorer, _step(progress, "scoring"))
        for row, scored in zip(rows, scores, strict=True):
            ok = scored["status"] == "ok"
            written = sum(round_["new_tokens"] for round_ in row["rounds"])
            logprob = sum(round_["logprob_sum"] for round_ in row["rounds"])
            pool = by_id[row["question_id"]]
            pool.rows.append(row)
            pool.candidates.append(
                Candidate(
                    index=row["candidate"],
                    summary=row["summary"],
                    sps=float(scored["sps"].reshape(shape)[self._place]) if ok else None,
                    nll=scored["nll"] if ok else None,
                    ratio=float(scored["ratio"].reshape(shape[:2])[self._place[:2]]) if ok else None,
                    tokens=scored["tokens"],
                    compressor_tokens=row["compressor_tokens"],
                    compressor_nll=-logprob / written if written and row["summary"].strip() else None,
                )
            )

    def _choose(self, pool: _Pool) -> None:
        if pool.gate == "skipped":
            return
        scores = [candidate.sps for candidate in pool.candidates]
        if self.selector is not None:
            name = getattr(self.selector, "__name__", "of your own")
            scores = apply_selector(name, self.selector, pool.question, pool.candidates)
        pool.chosen, pool.fallback = pick(scores, self.method.include_initial)

    def _answer(self, pools: Sequence[_Pool], progress: StepProgress | None) -> None:
        assert self.reader is not None
        prompts = [self.reader.fit_summary(pool.question, pool.candidates[pool.chosen].summary) for pool in pools]
        for pool, answer in zip(pools, self.reader.answer(prompts, _step(progress, "reading")), strict=True):
            pool.answer = answer

    def _result(self, pool: _Pool, threshold: float | None) -> Compressed:
        seen = self.compressor.settings.max_rounds * self.compressor.segment_size
        answer = pool.answer
        return Compressed(
            id=pool.question.id,
            question=pool.question.question,
            summary=pool.candidates[pool.chosen].summary,
            chosen=pool.chosen,
            candidates=tuple(pool.candidates),
            gate=pool.gate,
            threshold=threshold,
            fallback=pool.fallback,
            cut_off=tuple(row["candidate"] for row in pool.rows if row["rounds"][-1]["finish_reason"] == "length"),
            passages_unused=max(0, len(pool.question.passages) - seen),
            tokens_removed=max(sum(round_["tokens_removed"] for round_ in row["rounds"]) for row in pool.rows),
            spent=Spent(
                compressor=sum(candidate.compressor_tokens for candidate in pool.candidates),
                scoring=sum(candidate.tokens for candidate in pool.candidates),
                reading=answer["prompt_tokens"] + answer["new_tokens"] if answer else 0,
            ),
            answer=answer["prediction"] if answer else None,
        )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The models to ourselves: scoring hooks into them, and fast tokenizers refuse a second caller."""
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            yield


def _check_policy(method: MethodSettings) -> None:
    """Refuse what depends on more than one finished pool: choices within rounds, and a gate that remembers other questions."""
    if method.policy != "posthoc" or method.gate == "release":
        raise UsageError(
            f"method={method.name} chooses in every round or by the questions before; the controller takes"
            " method.policy=posthoc with method.gate=paper or none"
        )


def _step(progress: StepProgress | None, step: str) -> Callable[[int], None] | None:
    return None if progress is None else lambda tokens: progress(step, tokens)
