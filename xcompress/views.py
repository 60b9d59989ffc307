"""Where a method's SPS and concentration ratio lie among the stored variants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xcompress import checkpoint
from xcompress.forward import resolve_layer
from xcompress.prompts import start_token
from xcompress.schema import UsageError
from xcompress.settings import MethodSettings, Settings

Axes = Mapping[str, list[Any]]


def blocks(axes: Axes) -> int:
    """Number of blocks of the reader whose scores have these axes (layers 0..L, and the normed last one)."""
    return len(axes["layer"]) - 2


def sps_place(axes: Axes, method: MethodSettings) -> tuple[int, int, int, int, int, int]:
    """Index of the variant that ``method`` names along the axes start, first, subspace, layer, pooling, energy.

    Raises:
        UsageError: the reader has no such variant.
    """
    if method.subspace not in axes["subspace"]:
        raise UsageError(f"method.subspace={method.subspace} was not scored; there is {', '.join(axes['subspace'])}")
    return (
        *ratio_place(axes, method),
        axes["subspace"].index(method.subspace),
        _layer(method, blocks(axes)),
        axes["pooling"].index(method.pooling),
        int(np.argmin(np.abs(np.array(axes["energy"]) - method.energy))),
    )


def ratio_place(axes: Axes, method: MethodSettings) -> tuple[int, int]:
    """Index of the method's token rules along the axes start and first.

    Raises:
        UsageError: texts were not scored under its start-token rule.
    """
    rules: list[bool] = axes["start_token"]
    if method.start_token not in rules:
        raise UsageError(f"method.start_token={method.start_token} was not scored; there is {rules}")
    return rules.index(method.start_token), axes["first_token"].index(method.first_token)


def check_variant(settings: Settings, reader: Path) -> None:
    """Layer, subspace and start token of the method, as far as the small files in the reader's folder tell.

    Raises:
        UsageError: the reader has no such layer, start token or output head of its own.
    """
    method = settings.method
    config = json.loads((reader / "config.json").read_text(encoding="utf-8"))
    text_config = config.get("text_config", config)
    _layer(method, int(text_config.get("num_hidden_layers", text_config.get("n_layer"))))
    tied = text_config.get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    if settings.scoring.subspaces[method.subspace].matrix == "output_head" and tied:
        raise UsageError(f"method.subspace={method.subspace}: the output head of {settings.reader.name} is its embedding")
    if method.start_token and start_token(checkpoint.load_tokenizer(reader)) is None:
        raise UsageError(f"method.start_token=true: the tokenizer of {settings.reader.name} has no start token")


def _layer(method: MethodSettings, number: int) -> int:
    try:
        return resolve_layer(method.layer, number)
    except ValueError as error:
        raise UsageError(f"method.layer: {error}") from None
