"""stepwise: questions and their pool -> one trajectory that is chosen round by round (the policy of the authors' release).

In every round the greedy output is scored; unless the gate keeps it, other outputs of the same prompt are drawn, the lowest SPS
is chosen, and the choice is what the next round sees. Pools then differ by method from the second round on, so these rows
belong to one method. Outputs that the pool holds already, from the same prompt and decoding, are taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from xcompress.engines.base import Generation, Progress, Request, naming
from xcompress.prompts import Fitted, Parsed
from xcompress.reader import TextScorer
from xcompress.schema import Question
from xcompress.selectors import gate_skips, lowest
from xcompress.settings import MethodSettings
from xcompress.stages.generate import Compressor, written
from xcompress.views import ratio_place, sps_place

VERSION = 1  # raise when the rows of this stage change
_NOTHING = Parsed("", "", "missing")


_Known = Mapping[tuple[Any, ...], Mapping[str, Any]]


class Gate(Protocol):
    """Decides from a ratio whether the greedy output is kept."""

    def skips(self, ratio: float | None) -> bool:
        """Whether nothing else is drawn."""
        ...


class OpenGate:
    """No gate: always draw."""

    def skips(self, ratio: float | None) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class StaticGate:
    """The paper's gate: a ratio above the threshold keeps the greedy output."""

    threshold: float

    def skips(self, ratio: float | None) -> bool:
        """See :func:`xcompress.selectors.gate_skips`."""
        return gate_skips(ratio, self.threshold)


@dataclass
class _Path:
    """A question's trajectory under way."""

    question: Question
    last: Parsed = _NOTHING
    steps: list[dict[str, Any]] = field(default_factory=list)
    open: bool = True
    gate_pool: list[float] = field(default_factory=list)


class StepwiseCompressor:
    """Chooses in every round.

    Args:
        compressor: prompts, draws and judges.
        scorer: the reader, with at least the variant that ``method`` names.
        method: its ``options`` say what competes with the greedy output.
        gate: with a ``pool`` (the rolling gate) questions run one after the other, else all of a call advance together.
    """

    def __init__(self, compressor: Compressor, scorer: TextScorer, method: MethodSettings, gate: Gate) -> None:
        self.compressor = compressor
        self.scorer = scorer
        self.method = method
        self.gate = gate
        self.place = sps_place(scorer.axes, method)
        self.ratio_place = ratio_place(scorer.axes, method)

    def run(
        self, questions: Sequence[Question], pool: Sequence[Mapping[str, Any]], progress: Progress | None = None
    ) -> list[dict[str, Any]]:
        """Rows of :data:`xcompress.schema.STEPWISE`, in the order of the questions.

        Args:
            questions: each with at least one passage.
            pool: their candidates, rows of :data:`xcompress.schema.CANDIDATES`; may lack any of them.
            progress: called with the number of tokens just drawn.
        """
        known = _known(pool)
        paths = [_Path(question) for question in questions]
        ordered = hasattr(self.gate, "pool")
        for wave in [[path] for path in paths] if ordered else [paths]:
            for number in range(1, self.compressor.settings.max_rounds + 1):
                waiting = [path for path in wave if path.open and len(self.compressor.segments(path.question)) >= number]
                if waiting:
                    self._round(waiting, number, known, progress)
            for path in wave:
                path.gate_pool = list(getattr(self.gate, "pool", ()))
        return [_row(path) for path in paths]

    def _round(
        self,
        waiting: Sequence[_Path],
        number: int,
        known: _Known,
        progress: Progress | None,
    ) -> None:
        prompts = [self.compressor.prompt(path.question, path.last, number) for path in waiting]
        greedy = self._outputs(waiting, prompts, number, [0], known, progress)
        ratios = self._scored([options[0] for options in greedy], progress)
        skipped = [self.gate.skips(ratio) for ratio in ratios]
        drawing = [at for at, skip in enumerate(skipped) if not skip]
        paths, texts = [waiting[at] for at in drawing], [prompts[at] for at in drawing]
        if self.method.options == "beams":
            others = self._beams(paths, texts, progress)
        else:
            numbers = list(range(1, self.compressor.generation.candidates + 1))
            others = self._outputs(paths, texts, number, numbers, known, progress)
        self._scored([option for options in others for option in options], progress)
        drawn = dict(zip(drawing, others, strict=True))
        for at, path in enumerate(waiting):
            options = [*greedy[at], *drawn.get(at, [])]
            first = 0 if self.method.include_initial or len(options) == 1 else 1
            position, bare = lowest([option["sps"] for option in options[first:]])
            chosen = 0 if bare else first + position
            path.steps.append(
                {
                    "round": number,
                    "prompt_tokens": len(prompts[at].ids),
                    "passages_dropped": prompts[at].passages_dropped,
                    "tokens_removed": prompts[at].tokens_removed,
                    "ratio": ratios[at],
                    "skipped": skipped[at],
                    "chosen": chosen,
                    "options": options,
                }
            )
            option = options[chosen]
            path.last = Parsed(option["summary"], option["evaluation"], option["verdict"])
            path.open = option["verdict"] != "complete"

    def _outputs(
        self,
        paths: Sequence[_Path],
        prompts: Sequence[Fitted],
        number: int,
        candidates: Sequence[int],
        known: _Known,
        progress: Progress | None,
    ) -> list[list[dict[str, Any]]]:
        """Options of each path drawn as the pool's ``candidates`` are; only those that the pool lacks are generated."""
        keys = [[(p.question.id, number, p.last.summary, p.last.evaluation, k) for k in candidates] for p in paths]
        requests, owners = [], []
        for at, (path, prompt) in enumerate(zip(paths, prompts, strict=True)):
            missing = [k for k, key in zip(candidates, keys[at], strict=True) if key not in known]
            if missing:
                draws = tuple(self.compressor.draw(path.question.id, k, number) for k in missing)
                requests.append(self._request(prompt, self.compressor.settings.repetition_penalty, draws=draws))
                owners += [(at, k) for k in missing]
        names = [paths[at].question.id for at in dict.fromkeys(at for at, _ in owners)]
        generated = self._generate(requests, names, [prompts[at] for at, _ in owners], progress)
        fresh = dict(zip(owners, generated, strict=True))
        found = []
        for at, own in enumerate(keys):
            options = []
            for k, key in zip(candidates, own, strict=True):
                option = {**known[key], "shared": True} if key in known else {**fresh[at, k], "shared": False}
                options.append({"kind": "sampled" if k else "greedy", **option})
            found.append(options)
        return found

    def _beams(
        self, paths: Sequence[_Path], prompts: Sequence[Fitted], progress: Progress | None
    ) -> list[list[dict[str, Any]]]:
        width = self.method.beams
        requests = [self._request(prompt, self.method.beam_penalty, beams=width) for prompt in prompts]
        names = [path.question.id for path in paths]
        options = self._generate(requests, names, [prompt for prompt in prompts for _ in range(width)], progress)
        marked = [{"kind": "beam", **option, "shared": False} for option in options]
        return [marked[at : at + width] for at in range(0, len(marked), width)]

    def _request(self, prompt: Fitted, penalty: float, **wanted: Any) -> Request:
        return Request(
            prompt=prompt.ids,
            max_new_tokens=self.compressor.settings.max_new_tokens,
            repetition_penalty=penalty,
            **{"draws": (), **wanted},
        )

    def _generate(
        self, requests: Sequence[Request], names: Sequence[str], prompts: Sequence[Fitted], progress: Progress | None
    ) -> list[dict[str, Any]]:
        """The outputs of all requests in a row, as understood.

        Args:
            requests: one or more continuations each.
            names: the question of each request.
            prompts: the prompt of each output.
            progress: called with the number of tokens just drawn.
        """
        if not requests:
            return []
        with naming(names):
            generated = self.compressor.engine.generate(requests, progress)
        results: list[Generation] = [generation for result in generated for generation in result]
        with naming([name for name, result in zip(names, generated, strict=True) for _ in result]):
            parsed = self.compressor.judge(list(zip(prompts, results, strict=True)))
        return [written(generation, outcome) for generation, outcome in zip(results, parsed, strict=True)]

    def _scored(self, options: Sequence[dict[str, Any]], progress: Progress | None) -> list[float | None]:
        """Put SPS and token count into the options; returns their concentration ratios (None for a blank one)."""
        texts = list(dict.fromkeys(option["summary"] for option in options))
        scores = dict(zip(texts, self.scorer.score(texts), strict=True))
        ratios: list[float | None] = []
        for option in options:
            score = scores[option["summary"]]
            option["sps"] = None if score is None else float(score.sps[self.place])
            option["tokens"] = 0 if score is None else score.tokens
            ratios.append(None if score is None else float(score.ratio[self.ratio_place]))
        return ratios


def _known(pool: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The pool's outputs by what they were made from: question, round, summary and evaluation before it, candidate."""
    known = {}
    for row in pool:
        summary = evaluation = ""
        for step in row["rounds"]:
            kept = ("new_tokens", "finish_reason", "text", "summary", "evaluation", "verdict", "logprob_sum")
            key = (row["question_id"], step["round"], summary, evaluation, row["candidate"])
            known[key] = {name: step[name] for name in kept}
            summary, evaluation = step["summary"], step["evaluation"]
    return known


def _row(path: _Path) -> dict[str, Any]:
    options = [(step, option) for step in path.steps for option in step["options"]]
    return {
        "question_id": path.question.id,
        "summary": path.last.summary,
        "steps": path.steps,
        "compressor_tokens": sum(step["prompt_tokens"] + option["new_tokens"] for step, option in options),
        "scored_tokens": sum(option["tokens"] for _, option in options),
        "gate_pool": path.gate_pool,
    }
