"""Where a method's SPS and concentration ratio lie among the stored variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from xcompress.forward import resolve_layer
from xcompress.schema import UsageError
from xcompress.settings import MethodSettings

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
        resolve_layer(method.layer, blocks(axes)),
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
