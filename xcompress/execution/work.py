"""A stage's work from its settings alone, so that it can be made in any process: :func:`make`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompress import checkpoint
from xcompress.engines import choose
from xcompress.engines.base import Engine, Progress
from xcompress.execution.base import Batch, Rows, Work
from xcompress.prompts import COMPRESSOR_PARTS, READER_PARTS, load_demos, load_template
from xcompress.schema import UsageError
from xcompress.settings import ModelSettings, ScoringSettings, Settings
from xcompress.stages import generate, read, rivals, score, stepwise

if TYPE_CHECKING:
    from xcompress.reader import TextScorer

log = logging.getLogger(__name__)


def make(settings: Settings, stage: str) -> Work:
    """Load the model of a stage and return what turns a batch into its rows.

    Raises:
        UsageError: a model, prompt or setting is missing or wrong.
    """
    return MAKERS[stage](settings)


def model_folder(settings: ModelSettings) -> Path:
    """The folder of a configured model.

    Raises:
        UsageError: it is not there, or ``model`` is neither a name nor a ``_target_``.
    """
    model = settings.model
    if isinstance(model, Mapping):
        from hydra.utils import instantiate

        model = instantiate(dict(model))
    if not isinstance(model, str) or not model:
        raise UsageError(f"{settings.name}: `model` must be a hub name, a folder, or {{_target_: ...}}, not {model!r}")
    return checkpoint.locate(model, settings.revision)


def _engine(settings: Settings, model: ModelSettings, dtype: str) -> tuple[Engine, Any]:
    """The configured engine on a model, and the model's tokenizer."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    folder = model_folder(model)
    chosen = dict(choose.resolve(settings).engine)
    try:
        engine: Engine = instantiate(chosen, folder=folder, dtype=dtype, device=model.device, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UsageError):  # Hydra would hide the sentence
            raise error.__cause__ from None
        raise
    if not engine.reproducible:
        log.warning("engine %s cannot promise to repeat sampled texts; engine=hf can", engine.name)
    return engine, checkpoint.load_tokenizer(folder)


def compressor(s: Settings) -> generate.Compressor:
    """The compressor with its engine and prompt."""
    engine, tokenizer = _engine(s, s.compressor, s.compressor.dtype)
    template = load_template(s.compressor.prompt_file, COMPRESSOR_PARTS)
    return generate.Compressor(engine, tokenizer, template, s.compressor, s.generation, s.dataset.segment_size, s.seed)


def question_reader(s: Settings) -> read.QuestionReader:
    """The reader with its engine, prompt and demonstrations."""
    engine, tokenizer = _engine(s, s.reader, s.reading_dtype)
    template, demos = load_template(s.reader.prompt_file, READER_PARTS), load_demos(Path(s.dataset.demos_file))
    return read.QuestionReader(engine, tokenizer, template, demos, s.reader)


def text_scorer(s: Settings, scoring: ScoringSettings, cache: Path | None = None) -> TextScorer:
    """The reader as what scores texts; ``cache`` holds its bases (by default below the run root)."""
    from xcompress.reader import TextScorer

    loaded = checkpoint.load(model_folder(s.reader), s.scoring_dtype, s.reader.device)
    return TextScorer(loaded, scoring, cache or Path(s.run_root) / "bases", s.reader.batch_tokens)


def narrowed(s: Settings) -> ScoringSettings:
    """The method's own variant alone, where not all of them are to be stored."""
    method = s.method
    return dataclasses.replace(
        s.scoring,
        subspaces={method.subspace: s.scoring.subspaces[method.subspace]},
        energies=[method.energy],
        start_token=[method.start_token],
    )


def _generate(s: Settings) -> Work:
    writer = compressor(s)
    return Work(lambda batch, progress: writer.candidates(batch.questions, batch.split == "test", progress))


def _score(s: Settings) -> Work:
    scorer = text_scorer(s, s.scoring)
    if s.method.subspace not in scorer.bases:
        raise UsageError(
            f"method.subspace={s.method.subspace} is not there for {s.reader.name}; it has {', '.join(scorer.bases)}"
        )
    about = {"axes.json": {"axes": scorer.axes, "bases": scorer.describe()}}
    return Work(lambda batch, progress: score.score(batch.candidates, scorer, progress), about)


def _rivals(s: Settings) -> Work:
    """LongPPL and question likelihood, with the reader's engine."""
    engine, tokenizer = _engine(s, s.reader, s.scoring_dtype)
    scorer = rivals.RivalScorer(engine, tokenizer, load_template(s.reader.prompt_file, READER_PARTS))
    return Work(lambda batch, progress: scorer.score(batch.questions, batch.candidates, progress))


def _stepwise(s: Settings) -> Work:
    """The trajectory that a stepwise method chooses: both models, the reader with the method's own variant alone."""
    method = s.method
    scorer, writer = text_scorer(s, narrowed(s)), compressor(s)

    def run(batch: Batch, progress: Progress) -> Rows:
        gate = batch.gate or stepwise.OpenGate()
        return stepwise.StepwiseCompressor(writer, scorer, method, gate).run(batch.questions, batch.candidates, progress)

    return Work(run)


def _read(s: Settings) -> Work:
    reader = question_reader(s)
    return Work(lambda batch, progress: reader.read(batch.questions, batch.candidates, progress))


def _read_chosen(s: Settings) -> Work:
    reader = question_reader(s)
    return Work(
        lambda batch, progress: reader.read_chosen(batch.questions, batch.chosen, batch.candidates, batch.answers, progress)
    )


MAKERS: Mapping[str, Callable[[Settings], Work]] = {
    "generate": _generate,
    "score": _score,
    "rivals": _rivals,
    "stepwise": _stepwise,
    "read": _read,
    "read (stepwise)": _read_chosen,
}
ROLES: Mapping[str, str] = {"generate": "compressor", "stepwise": "both"}
"""Which model a stage holds, the reader where it is not said; stages of one role can keep it between them."""
