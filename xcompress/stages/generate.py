"""generate: questions -> candidates. CompAct rounds (arXiv 2407.09014) over segments of passages, greedy and K sampled.

Round 1 sees the first segment; each later round the previous summary and its evaluation and the next segment; a trajectory ends
when its evaluation says complete or the segments end. All open trajectories of a shard advance together, and trajectories that
share a prompt share its prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xcompress.engines.base import Draw, Engine, Generation, Progress, Request, derive_seed, naming, regrouping
from xcompress.prompts import Fitted, Parsed, Template, chat_ids, encode, fill, fit, format_passages, parse_round
from xcompress.schema import Passage, Question, UsageError
from xcompress.settings import CompressorSettings, GenerationSettings

VERSION = 1  # raise when the rows of this stage change
_TAGS = ("[COMPLETE]", "[INCOMPLETE]")


@dataclass
class _Trajectory:
    question: Question
    candidate: int
    rounds: list[dict[str, Any]] = field(default_factory=list)
    open: bool = True

    @property
    def last(self) -> Parsed:
        if not self.rounds:
            return Parsed("", "", "missing")
        round_ = self.rounds[-1]
        return Parsed(round_["summary"], round_["evaluation"], round_["verdict"])


class Compressor:
    """A compressor LM with its prompt: :meth:`candidates` gives the pool of each question."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        template: Template,
        settings: CompressorSettings,
        generation: GenerationSettings,
        segment_size: int,
        seed: int,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.settings = settings
        self.generation = generation
        self.segment_size = segment_size
        self.seed = seed
        self._lead = tuple(encode(tokenizer, "\nEvaluation: ", start=False))
        self._tags = [tuple(encode(tokenizer, tag, start=False)) for tag in _TAGS]

    def candidates(
        self,
        questions: Sequence[Question],
        sampled: bool = True,
        progress: Progress | None = None,
        initial: bool = True,
    ) -> list[dict[str, Any]]:
        """Rows of :data:`xcompress.schema.CANDIDATES`, question by question, the initial summary first.

        Args:
            questions: each with at least one passage.
            sampled: False draws the initial summary alone (gate calibration).
            progress: called with the number of tokens just generated.
            initial: False leaves the initial summary out (it was drawn before, and the gate wants the others too).
        """
        numbers = range(0 if initial else 1, (self.generation.candidates if sampled else 0) + 1)
        trajectories = [_Trajectory(question, k) for question in questions for k in numbers]
        for number in range(1, self.settings.max_rounds + 1):
            waiting = [t for t in trajectories if t.open and len(self.segments(t.question)) >= number]
            if not waiting:
                break
            self._round(waiting, number, progress)
        return [_row(trajectory) for trajectory in trajectories]

    def segments(self, question: Question) -> list[tuple[Passage, ...]]:
        """A question's passages as the rounds see them."""
        size = self.segment_size
        return [question.passages[at : at + size] for at in range(0, len(question.passages), size)]

    def _round(self, waiting: Sequence[_Trajectory], number: int, progress: Progress | None) -> None:
        """One compressor call for every waiting trajectory; equal prompts are one request with several draws."""
        by_prompt: dict[tuple[str, tuple[str, str]], list[_Trajectory]] = {}
        for trajectory in waiting:
            last = trajectory.last
            by_prompt.setdefault((trajectory.question.id, (last.summary, last.evaluation)), []).append(trajectory)
        fitted = [self.prompt(group[0].question, group[0].last, number) for group in by_prompt.values()]
        requests = [
            Request(
                prompt=prompt.ids,
                draws=tuple(self.draw(trajectory.question.id, trajectory.candidate, number) for trajectory in group),
                max_new_tokens=self.settings.max_new_tokens,
                repetition_penalty=self.settings.repetition_penalty,
            )
            for prompt, group in zip(fitted, by_prompt.values(), strict=True)
        ]
        with naming([group[0].question.id for group in by_prompt.values()]):
            results = self.engine.generate(requests, progress)
        pairs = [
            (trajectory, prompt, generation)
            for group, prompt, generations in zip(by_prompt.values(), fitted, results, strict=True)
            for trajectory, generation in zip(group, generations, strict=True)
        ]
        with naming([trajectory.question.id for trajectory, _, _ in pairs]):
            parsed = self.judge([(prompt, generation) for _, prompt, generation in pairs])
        for (trajectory, prompt, generation), outcome in zip(pairs, parsed, strict=True):
            trajectory.rounds.append(
                {
                    "round": number,
                    "prompt_tokens": len(prompt.ids),
                    **written(generation, outcome),
                    "passages_dropped": prompt.passages_dropped,
                    "tokens_removed": prompt.tokens_removed,
                }
            )
            trajectory.open = outcome.verdict != "complete"

    def draw(self, question_id: str, candidate: int, number: int) -> Draw:
        """How a candidate's output of round ``number`` is drawn: candidate 0 greedily, the others each by a seed of its own."""
        if candidate == 0:
            return Draw()
        seed = derive_seed(self.seed, question_id, candidate, number)
        return Draw(self.generation.temperature, self.generation.top_p, seed)

    def prompt(self, question: Question, last: Parsed, number: int) -> Fitted:
        """The prompt of round ``number`` (from 1), which sees the summary and the evaluation before it.

        Raises:
            UsageError: it does not fit the compressor even without passages.
        """

        def build(passages: Sequence[Passage]) -> tuple[int, ...]:
            user = fill(
                self.template["first" if number == 1 else "later"],
                question=question.question,
                passages=format_passages(self.template, passages),
                summary=last.summary,
                evaluation=last.evaluation,
            )
            return chat_ids(self.tokenizer, self.template["system"], user, self.settings.chat)

        budget = self.engine.max_context - self.settings.max_new_tokens
        if self.settings.judge == "scored":  # the tags are scored after the prompt and the output
            budget -= len(self._lead) + max(map(len, self._tags))
        return _named(question, lambda: fit(build, self.segments(question)[number - 1], budget))

    def judge(self, outputs: Sequence[tuple[Fitted, Generation]]) -> list[Parsed]:
        """Split each output and decide whether it is complete, as ``compressor.judge`` says."""
        if self.settings.judge == "generated":
            return [parse_round(generation.text) for _, generation in outputs]
        parsed = [Parsed(generation.text.strip(), "", "incomplete") for _, generation in outputs]
        if self.settings.judge == "fixed":
            return parsed
        # "scored": which tag is likelier after the output and "Evaluation:"? One short step on the prompt's tokens.
        contexts = [(*prompt.ids, *generation.tokens, *self._lead) for prompt, generation in outputs]
        with regrouping(len(_TAGS)):
            scores = self.engine.loglikelihood([(context, tag) for context in contexts for tag in self._tags])
        complete = [scores[2 * at] > scores[2 * at + 1] for at in range(len(outputs))]
        return [Parsed(p.summary, "", "complete" if yes else "incomplete") for p, yes in zip(parsed, complete, strict=True)]


def written(generation: Generation, outcome: Parsed) -> dict[str, Any]:
    """The columns of an output: as it was generated, and as it was understood."""
    return {
        "new_tokens": len(generation.tokens),
        "finish_reason": generation.finish_reason,
        "text": generation.text,
        "summary": outcome.summary,
        "evaluation": outcome.evaluation,
        "verdict": outcome.verdict,
        "logprob_sum": generation.logprob_sum,
    }


def _named(question: Question, make: Callable[[], Fitted]) -> Fitted:
    try:
        return make()
    except UsageError as error:
        raise UsageError(f"question {question.id!r}: {error}") from None


def _row(trajectory: _Trajectory) -> dict[str, Any]:
    return {
        "question_id": trajectory.question.id,
        "candidate": trajectory.candidate,
        "summary": trajectory.last.summary,
        "rounds": trajectory.rounds,
        "compressor_tokens": sum(r["prompt_tokens"] + r["new_tokens"] for r in trajectory.rounds),
    }
