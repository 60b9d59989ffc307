"""What is computed in the comparisons: the embedded model, texts as long as real summaries, prompts as long as real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from xcompress.checkpoint import Loaded, load
from xcompress.config import ROOT
from xcompress.embedded import smollm2_135m
from xcompress.prompts import COMPRESSOR_PARTS, chat_ids, fill, format_passages, load_template
from xcompress.schema import Passage

_STUDY = ROOT / "results" / "smollm2_135m"
_MINI = ROOT / "xcompress" / "mini"
_TEMPLATE = ROOT / "configs" / "prompts" / "compressor_short.yaml"


@dataclass(frozen=True)
class Setting:
    """What every comparison is given.

    Attributes:
        folder: of the embedded model.
        threads: of torch, here and in other programs.
        quick: sizes for trying the benchmark out; the figures mean nothing.
        pythons: interpreter of each other program's environment, by name.
        say: prints a line of progress.
    """

    folder: Path
    threads: int
    quick: bool
    pythons: dict[str, str | None] = field(default_factory=dict)
    say: Callable[[str], None] = print

    @property
    def loaded(self) -> Loaded:
        """The embedded model in float32 as the program loads it (once)."""
        return load(self.folder, "float32", "cpu")

    def stock(self) -> Any:
        """The same weights as anybody gets them from transformers."""
        from transformers import AutoModelForCausalLM

        automatic: Any = AutoModelForCausalLM
        return automatic.from_pretrained(self.folder, dtype="float32", local_files_only=True).eval()


def model_folder() -> Path:
    """Folder of the embedded model."""
    return Path(smollm2_135m())


def corpus() -> list[Passage]:
    """Passages of the mini data set."""
    lines = (_MINI / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [Passage(row.get("title", ""), row["text"]) for row in map(json.loads, lines)]


def questions() -> list[str]:
    """Questions of the mini data set."""
    return [json.loads(line)["question"] for line in (_MINI / "test.jsonl").read_text(encoding="utf-8").splitlines()]


def texts(tokenizer: Any, count: int) -> list[str]:
    """``count`` different texts whose lengths are those of the published study's summaries (its five data sets, 2040 of them).

    The words are the mini data set's: published figures hold no texts. Lengths are drawn with a fixed seed.
    """
    stored = [pd.read_parquet(path, columns=["tokens"]) for path in sorted(_STUDY.glob("*/numbers.parquet"))]
    lengths = np.concatenate([table["tokens"].dropna().to_numpy() for table in stored])
    wanted = np.random.default_rng(0).choice(lengths[lengths > 1], count, replace=False)
    ids = tokenizer(" ".join(passage.text for passage in corpus()), add_special_tokens=False)["input_ids"]
    starts = np.linspace(0, len(ids) - int(wanted.max()) - 1, count).astype(int)
    return [tokenizer.decode(ids[start : start + int(length)]).strip() for start, length in zip(starts, wanted, strict=True)]


def prompts(tokenizer: Any, count: int, tokens: int) -> list[tuple[int, ...]]:
    """``count`` compressor prompts of about ``tokens`` tokens (at most), each over other passages."""
    template = load_template(_TEMPLATE, COMPRESSOR_PARTS)
    passages = corpus()
    found: list[tuple[int, ...]] = []
    at = 0
    for question in questions()[:count]:
        chosen: list[Passage] = []
        best: tuple[int, ...] = ()
        while True:
            trial = _prompt(tokenizer, template, [*chosen, passages[at % len(passages)]], question)
            if len(trial) > tokens:
                break
            chosen.append(passages[at % len(passages)])
            best = trial
            at += 1
        found.append(best)
    return found


def _prompt(tokenizer: Any, template: Any, passages: Sequence[Passage], question: str) -> tuple[int, ...]:
    user = fill(template["first"], question=question, passages=format_passages(template, passages), summary="", evaluation="")
    return chat_ids(tokenizer, template["system"], user, True)
