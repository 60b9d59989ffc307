"""A stage's work from its settings alone, so that it can be made in any process: :func:`make`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xcompress import checkpoint
from xcompress.engines.base import Engine
from xcompress.execution.base import Work
from xcompress.prompts import COMPRESSOR_PARTS, READER_PARTS, load_demos, load_template
from xcompress.schema import UsageError
from xcompress.settings import ModelSettings, Settings
from xcompress.stages import generate, read, rivals, score

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


def open_engine(settings: Settings, model: ModelSettings) -> tuple[Engine, Any]:
    """The configured engine on a model, and the model's tokenizer."""
    from hydra.utils import instantiate

    folder = model_folder(model)
    engine: Engine = instantiate(dict(settings.engine), folder=folder, dtype=model.dtype, device=model.device, _convert_="all")
    if not engine.reproducible:
        log.warning("engine %s cannot promise to repeat sampled texts; engine=hf can", engine.name)
    return engine, checkpoint.load_tokenizer(folder)


def _generate(s: Settings) -> Work:
    engine, tokenizer = open_engine(s, s.compressor)
    template = load_template(s.compressor.prompt_file, COMPRESSOR_PARTS)
    compressor = generate.Compressor(engine, tokenizer, template, s.compressor, s.generation, s.dataset.segment_size, s.seed)
    return Work(lambda batch, progress: compressor.candidates(batch.questions, batch.split == "test", progress))


def _score(s: Settings) -> Work:
    from xcompress.reader import TextScorer

    loaded = checkpoint.load(model_folder(s.reader), s.reader.dtype, s.reader.device)
    scorer = TextScorer(loaded, s.scoring, Path(s.run_root) / "bases", s.reader.batch_tokens)
    if s.method.subspace not in scorer.bases:
        raise UsageError(
            f"method.subspace={s.method.subspace} is not there for {s.reader.name}; it has {', '.join(scorer.bases)}"
        )
    about = {"axes.json": {"axes": scorer.axes, "bases": scorer.describe()}}
    return Work(lambda batch, progress: score.score(batch.candidates, scorer, progress), about)


def _rivals(s: Settings) -> Work:
    """LongPPL and question likelihood, with the reader's engine."""
    engine, tokenizer = open_engine(s, s.reader)
    scorer = rivals.RivalScorer(engine, tokenizer, load_template(s.reader.prompt_file, READER_PARTS))
    return Work(lambda batch, progress: scorer.score(batch.questions, batch.candidates, progress))


def _read(s: Settings) -> Work:
    engine, tokenizer = open_engine(s, s.reader)
    template, demos = load_template(s.reader.prompt_file, READER_PARTS), load_demos(Path(s.dataset.demos_file))
    reader = read.QuestionReader(engine, tokenizer, template, demos, s.reader)
    return Work(lambda batch, progress: reader.read(batch.questions, batch.candidates, progress))


MAKERS: Mapping[str, Callable[[Settings], Work]] = {
    "generate": _generate,
    "score": _score,
    "rivals": _rivals,
    "read": _read,
}
ROLES: Mapping[str, str] = {"generate": "compressor", "score": "reader", "rivals": "reader", "read": "reader"}
"""Which model a stage holds; stages of one role can keep it between them."""
