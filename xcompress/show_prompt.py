"""The prompts of one question, exactly as the models see them: decoded from the token ids that would be sent.

The stages themselves build the prompts here, over an engine that writes them down instead of answering. Only small local files
are read (templates, demonstrations, data, tokenizers); no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from xcompress.doctor import local_tokenizer
from xcompress.engines.base import Generation, Progress, Request
from xcompress.health import Health
from xcompress.prompts import COMPRESSOR_PARTS, READER_PARTS, load_demos, load_template, start_token
from xcompress.schema import Question, UsageError
from xcompress.settings import ModelSettings, Settings
from xcompress.stages.generate import Compressor
from xcompress.stages.prepare import stream
from xcompress.stages.read import QuestionReader

SUMMARY = "(here stands the summary of round {})"
REASON = "(here stands the evaluation's reason)"


@dataclass(frozen=True)
class Shown:
    """A prompt: what it is, its token ids, and what was left out to make it fit."""

    title: str
    ids: tuple[int, ...]
    passages_dropped: int = 0
    tokens_removed: int = 0


@dataclass
class Recorder:
    """An :class:`xcompress.engines.base.Engine` that keeps the requests and answers each with a place holder.

    Attributes:
        evaluates: the place holder ends in an evaluation, as a compressor's output does that is judged by it.
    """

    max_context: int
    evaluates: bool = False
    name: str = "recorder"
    reproducible: bool = True
    requests: list[Request] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        """One place holder for each draw, in the form of a compressor's round that is not the last."""
        answers = []
        for request in requests:
            self.requests.append(request)
            evaluation = f"\nEvaluation: {REASON} [INCOMPLETE]" if self.evaluates else ""
            text = SUMMARY.format(len(self.requests)) + evaluation
            answers.append([Generation(text, (), "stop", 0.0) for _ in request.draws])
        return answers

    def token_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Nothing is likelier than anything else."""
        return [[0.0] * len(continuation) for _, continuation in pairs]

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Equal, so that a round judged by them is not taken for the last."""
        return [0.0] * len(pairs)


def choose(settings: Settings, position: int = 1, question_id: str | None = None) -> Question:
    """A question of the test split by its position (from 1) or its id.

    Raises:
        UsageError: there is none, or the data cannot be read.
    """
    dataset = settings.dataset
    health, root = Health(dataset.passages), Path(settings.run_root)
    questions = stream(dataset.source(), dataset.passages, health, root, dataset.calibration_holdout)
    if question_id is not None:
        found = next((question for question in questions if question.id == question_id), None)
        if found is None:
            raise UsageError(f"dataset={dataset.name} has no question with id {question_id!r} in {dataset.path}")
        return found
    if position < 1:
        raise UsageError(f"question={position}: positions count from 1")
    found = next(islice(questions, position - 1, None), None)
    if found is None:
        raise UsageError(f"question={position}: {dataset.path} has fewer questions")
    return found


def compressor_prompts(settings: Settings, tokenizer: Any, window: int, question: Question) -> list[Shown]:
    """The prompt of each compressor round (later ones with a place holder for what the earlier one wrote)."""
    recorder = Recorder(window, settings.compressor.judge == "generated")
    template = load_template(settings.compressor.prompt_file, COMPRESSOR_PARTS)
    compressor = Compressor(
        recorder,
        tokenizer,
        template,
        settings.compressor,
        settings.generation,
        settings.dataset.segment_size,
        settings.seed,
    )
    (row,) = compressor.candidates([question], sampled=False)
    rounds = row["rounds"]
    return [
        Shown(
            f"compressor {settings.compressor.name}, round {at} of at most {len(rounds)}",
            request.prompt,
            rounds[at - 1]["passages_dropped"],
            rounds[at - 1]["tokens_removed"],
        )
        for at, request in enumerate(recorder.requests, start=1)
    ]


def reader_prompts(settings: Settings, tokenizer: Any, window: int, question: Question) -> list[Shown]:
    """The reader's prompts: over a summary (with a place holder for it), over the raw passages, and closed book."""
    recorder = Recorder(window)
    template = load_template(settings.reader.prompt_file, READER_PARTS)
    demos = load_demos(Path(settings.dataset.demos_file))
    reader = QuestionReader(recorder, tokenizer, template, demos, settings.reader)
    summary = {"question_id": question.id, "candidate": 0, "summary": "(here stands the summary)"}
    rows = {row["source"]: row for row in reader.read([question], [summary])}
    raw, closed, over_summary = (request.prompt for request in recorder.requests)
    name = f"reader {settings.reader.name}"
    fitted = rows["raw_passages"]
    return [
        Shown(f"{name}, over a summary", over_summary),
        Shown(f"{name}, over the raw passages", raw, fitted["passages_dropped"], fitted["tokens_removed"]),
        Shown(f"{name}, closed book", closed),
    ]


def render(settings: Settings, position: int = 1, question_id: str | None = None, with_ids: bool = False) -> Iterator[str]:
    """The whole output as lines.

    Args:
        position: of the question in the test split, from 1.
        question_id: its id instead.
        with_ids: print the token ids, too.

    Raises:
        UsageError: no such question, or the reader's tokenizer is not on this machine. Of a compressor that is not there a
            line says so instead.
    """
    question = choose(settings, position, question_id)
    demos = load_demos(Path(settings.dataset.demos_file))
    yield f"dataset {settings.dataset.name}, question {question.id!r}, {len(question.passages)} passages"
    yield f"question: {_visible(question.question)}"
    yield f"gold answers: {_visible('; '.join(question.answers)) or '(none)'}"
    yield f"demonstrations ({len(demos)}, {settings.dataset.demos_file}):"
    for asked, answer in demos:
        yield f"  {_visible(asked)} -> {_visible(answer)}"
    for settings_of, make in ((settings.compressor, compressor_prompts), (settings.reader, reader_prompts)):
        try:
            tokenizer, window = local_tokenizer(settings_of)
        except UsageError as error:
            if settings_of is settings.reader:
                raise
            yield f"\nthe compressor's prompts are not shown: {error}"
            continue
        limits = [number for number in (settings.engine.get("max_context"), window) if number]
        for shown in make(settings, tokenizer, min(limits) if limits else 4096, question):
            yield from _prompt(shown, tokenizer, settings_of, with_ids)


def _prompt(shown: Shown, tokenizer: Any, settings: ModelSettings, with_ids: bool) -> Iterator[str]:
    first = start_token(tokenizer)
    count = 0 if first is None else shown.ids.count(first)
    start = (
        "no start token (this tokenizer has none)"
        if first is None
        else f"{count} start token{'' if count == 1 else 's'} ({tokenizer.convert_ids_to_tokens(first)!r}, id {first})"
    )
    template = bool(getattr(tokenizer, "chat_template", None))
    chat = getattr(settings, "chat", False)
    form = "chat template" if chat and template else "plain text (the tokenizer has no chat template)" if chat else "plain text"
    left_out = (
        f", {shown.tokens_removed} tokens left out to fit ({shown.passages_dropped} whole passages)"
        if shown.tokens_removed
        else ""
    )
    yield ""
    yield f"===== {shown.title}: {len(shown.ids)} tokens, {start}, {form}{left_out}"
    yield _visible(tokenizer.decode(list(shown.ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    yield "===== end of prompt: the model goes on here"
    if with_ids:
        yield f"ids: {' '.join(map(str, shown.ids))}"


_CONTROLS: Mapping[int, str] = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\n\t"}


def _visible(text: str) -> str:
    """Control characters as escapes: data must not be able to steer the terminal."""
    return text.translate(_CONTROLS)
