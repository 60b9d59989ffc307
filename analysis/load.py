"""From the stored rows to arrays: one pool a question, every candidate scored and read, quality computed from the answers.

EM, F1 and containment are computed here rather than in the reading stage: they need no model, and a corrected gold answer then
changes the tables without reading anything again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xcompress import views
from xcompress.answers import containment, exact_match, f1
from xcompress.perplexity import long_nll
from xcompress.pipeline import Collected
from xcompress.schema import Question
from xcompress.selectors import gate_threshold
from xcompress.settings import MethodSettings

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quality:
    """Answer quality in per cent, NaN where a question has no gold answer."""

    em: Floats
    f1: Floats
    containment: Floats


@dataclass(frozen=True)
class Stepwise:
    """The trajectory that a stepwise method chose round by round; arrays [Q].

    Attributes:
        quality: of reading its last summary.
        tokens: of that summary under the reader.
        compressor_tokens: prompt and new tokens of every option of every round.
        scored_tokens: summary tokens scored to choose.
        kept: share of its rounds in which the gate kept the greedy output.
        drawn: whether anything was drawn in any round.
        shared: outputs taken from the pool, of all outputs (two totals).
    """

    quality: Quality
    tokens: Floats
    compressor_tokens: Floats
    scored_tokens: Floats
    kept: Floats
    drawn: npt.NDArray[np.bool_]
    shared: tuple[int, int]


@dataclass(frozen=True)
class Pool:
    """Q questions with K + 1 candidates each; candidate 0 is the initial summary.

    Attributes:
        questions: in the data set's order.
        labelled: [Q] bool, whether the question has a gold answer.
        quality: of every candidate, arrays [Q, K + 1].
        raw, closed: quality of reading the raw passages and of closed book, arrays [Q].
        tokens: [Q, K + 1] summary tokens under the reader.
        first_token: [Q, K + 1] id of each summary's first token, NaN for a blank one.
        nll: [Q, K + 1] mean NLL in nats, NaN without a score.
        longppl: [Q, K + 1] log LongPPL (mean NLL of key tokens), NaN where there is no key token or it was not computed.
        question_nll: [Q, K + 1] minus log p(question | summary) a question token, NaN where it was not computed.
        answer_nll: [Q, K + 1] minus the reader's mean log-probability of its own answer, NaN for an empty answer.
        compressor_nll: [Q, K + 1] minus the compressor's mean log-probability of all it wrote for the candidate.
        reading_tokens: [Q, K + 1] prompt and answer tokens of reading each candidate.
        rival_tokens: mean reader tokens a question for LongPPL and for the question likelihood of its whole pool.
        sps: [Q, K + 1, start, first, subspace, layer, pooling, energy], NaN without a score.
        ratio: [Q, K + 1, start, first] concentration ratio.
        compressor_tokens: [Q, K + 1] prompt and new tokens of each trajectory by itself.
        calibration_ratio: [C, start, first] ratios of the calibration split's initial summaries.
        axes: the values along sps's axes.
        summaries, predictions: texts [Q][K + 1].
        stepwise: where the method chooses in every round, what it chose.
    """

    questions: list[Question]
    labelled: npt.NDArray[np.bool_]
    quality: Quality
    raw: Quality
    closed: Quality
    tokens: Floats
    first_token: Floats
    nll: Floats
    longppl: Floats
    question_nll: Floats
    answer_nll: Floats
    compressor_nll: Floats
    rival_tokens: Mapping[str, float]
    reading_tokens: Floats
    sps: npt.NDArray[np.floating[Any]]
    ratio: Floats
    compressor_tokens: Floats
    calibration_ratio: Floats
    axes: Mapping[str, list[Any]]
    summaries: list[list[str]]
    predictions: list[list[str]]
    stepwise: Stepwise | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks of the reader."""
        return views.blocks(self.axes)

    def place(self, method: MethodSettings) -> tuple[int, int, int, int, int, int]:
        """See :func:`xcompress.views.sps_place`."""
        return views.sps_place(self.axes, method)

    def view(self, method: MethodSettings) -> Floats:
        """SPS [Q, K + 1] of the variant that ``method`` names."""
        start, first, subspace, layer, pooling, energy = self.place(method)
        view: Floats = self.sps[:, :, start, first, subspace, layer, pooling, energy].astype(np.float64)
        return view

    def initial_ratio(self, method: MethodSettings) -> Floats:
        """Concentration ratio [Q] of the initial summaries under the method's token rules."""
        start, first = views.ratio_place(self.axes, method)
        ratio: Floats = self.ratio[:, 0, start, first]
        return ratio

    def threshold(self, method: MethodSettings) -> float | None:
        """The paper gate's threshold from the calibration split, or None if there is none."""
        if not len(self.calibration_ratio):
            return None
        return gate_threshold(self.calibration_ratios(method), method.gate_share)

    def calibration_ratios(self, method: MethodSettings) -> Floats:
        """Concentration ratios [C] of the calibration split under the method's token rules."""
        start, first = views.ratio_place(self.axes, method)
        ratios: Floats = self.calibration_ratio[:, start, first]
        return ratios


def load_axes(folder: Path) -> dict[str, list[Any]]:
    """The axes of a scores folder."""
    axes: dict[str, list[Any]] = json.loads((folder / "axes.json").read_text(encoding="utf-8"))["axes"]
    return axes


def to_pool(collected: Collected) -> Pool:
    """Arrays of one run's rows. Rows are joined by (question id, candidate), never by position."""
    questions = collected.questions
    place = {question.id: at for at, question in enumerate(questions)}
    size = (len(questions), collected.settings.generation.candidates + 1)
    axes = load_axes(collected.scores_folder)
    shape = tuple(len(values) for values in axes.values())
    tokens, nll, cost, first_token = (np.full(size, np.nan) for _ in range(4))
    longppl, question_nll, answer_nll, compressor_nll, reading = (np.full(size, np.nan) for _ in range(5))
    sps, ratio = np.full((*size, *shape), np.nan, np.float32), np.full((*size, *shape[:2]), np.nan)
    summaries = [[""] * size[1] for _ in questions]
    for row in collected.candidates:
        at = place[row["question_id"]], row["candidate"]
        summaries[at[0]][at[1]] = row["summary"]
        cost[at] = row["compressor_tokens"]
        written = sum(round_["new_tokens"] for round_ in row["rounds"])
        if written and row["summary"].strip():  # a blank summary never wins
            compressor_nll[at] = -sum(round_["logprob_sum"] for round_ in row["rounds"]) / written
    short: dict[tuple[int, int], list[float | None]] = {}
    for row in collected.scores:
        at = place[row["question_id"]], row["candidate"]
        tokens[at] = row["tokens"]
        if row["status"] == "ok":
            nll[at] = np.nan if row["nll"] is None else row["nll"]
            short[at] = row["token_logprobs"]
            first_token[at] = row["first_token"]
            sps[at] = np.reshape(row["sps"], shape)
            ratio[at] = np.reshape(row["ratio"], shape[:2])
    for row in collected.rivals:
        at = place[row["question_id"]], row["candidate"]
        if row["long_logprobs"] is not None and at in short:
            value = long_nll(short[at], row["long_logprobs"])
            longppl[at] = np.nan if value is None else value
            question_nll[at] = -row["question_logprob_sum"] / row["question_tokens"]
    predictions = [[""] * size[1] for _ in questions]
    sources: dict[str, list[str]] = {"raw_passages": [""] * size[0], "closed_book": [""] * size[0]}
    for row in collected.answers:
        if row["source"] == "candidate":
            at = place[row["question_id"]], row["candidate"]
            predictions[at[0]][at[1]] = row["prediction"]
            reading[at] = row["prompt_tokens"] + row["new_tokens"]
            if row["new_tokens"] and row["prediction"] and summaries[at[0]][at[1]].strip():
                answer_nll[at] = -row["logprob_sum"] / row["new_tokens"]
        else:
            sources[row["source"]][place[row["question_id"]]] = row["prediction"]
    golds = collected.settings.dataset.empty_golds
    ratios = [np.reshape(r["ratio"], shape[:2]) for r in collected.calibration_scores if r["status"] == "ok"]
    return Pool(
        questions=questions,
        labelled=np.array([bool(question.answers) for question in questions]),
        quality=_quality(questions, predictions, golds),
        raw=_flat(_quality(questions, [[text] for text in sources["raw_passages"]], golds)),
        closed=_flat(_quality(questions, [[text] for text in sources["closed_book"]], golds)),
        tokens=tokens,
        first_token=first_token,
        nll=nll,
        longppl=longppl,
        question_nll=question_nll,
        answer_nll=answer_nll,
        compressor_nll=compressor_nll,
        reading_tokens=reading,
        rival_tokens={
            name: sum(row[f"{name}_forward_tokens"] for row in collected.rivals) / len(questions)
            for name in ("longppl", "question")
        },
        sps=sps,
        ratio=ratio,
        compressor_tokens=cost,
        calibration_ratio=np.array(ratios) if ratios else np.zeros((0, *shape[:2])),
        axes=axes,
        summaries=summaries,
        predictions=predictions,
        stepwise=_stepwise(collected, place) if collected.stepwise else None,
    )


def _stepwise(collected: Collected, place: Mapping[str, int]) -> Stepwise:
    questions = collected.questions
    tokens, cost, scored, kept = (np.full(len(questions), np.nan) for _ in range(4))
    drawn = np.zeros(len(questions), bool)
    shared = outputs = 0
    for row in collected.stepwise:
        at = place[row["question_id"]]
        options = [option for step in row["steps"] for option in step["options"]]
        last = row["steps"][-1]
        tokens[at] = last["options"][last["chosen"]]["tokens"]
        cost[at], scored[at] = row["compressor_tokens"], row["scored_tokens"]
        kept[at] = float(np.mean([step["skipped"] for step in row["steps"]]))
        drawn[at] = kept[at] < 1
        shared += sum(option["shared"] for option in options)
        outputs += len(options)
    predictions = [[""] for _ in questions]
    for row in collected.stepwise_answers:
        predictions[place[row["question_id"]]] = [row["prediction"]]
    quality = _flat(_quality(questions, predictions, collected.settings.dataset.empty_golds))
    return Stepwise(quality, tokens, cost, scored, kept, drawn, (shared, outputs))


def _quality(questions: list[Question], predictions: list[list[str]], empty_golds: Any) -> Quality:
    values = np.full((3, len(questions), len(predictions[0])), np.nan)
    for at, question in enumerate(questions):
        if not question.answers:
            continue
        for number, text in enumerate(predictions[at]):
            values[0, at, number] = 100 * exact_match(text, question.answers, empty_golds=empty_golds)
            values[1, at, number] = 100 * f1(text, question.answers, empty_golds=empty_golds)
            values[2, at, number] = 100 * containment(text, question.answers)
    return Quality(*values)


def _flat(quality: Quality) -> Quality:
    return Quality(quality.em[:, 0], quality.f1[:, 0], quality.containment[:, 0])
