"""Perplexity from token log-probabilities. NLL is what is stored and ranked; PPL is only shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def mean_nll(token_logprobs: torch.Tensor) -> float | None:
    """Mean negative log-likelihood (nats a token), or None for a text of which no token is scored."""
    return None if token_logprobs.numel() == 0 else float(-token_logprobs.double().mean())


def perplexity(nll: float | None) -> float | None:
    """exp(NLL); infinity where that overflows, None where there is no NLL."""
    if nll is None:
        return None
    return math.exp(nll) if nll < 709 else math.inf


ALPHA, BETA = 2.0, -2.0  # arXiv 2410.23771: gain from the long context, and log-probability with it, that make a token key


def key_tokens(short: Sequence[float | None], long: Sequence[float], alpha: float = ALPHA, beta: float = BETA) -> list[int]:
    """Positions of the tokens that the long context makes likely: gain above ``alpha`` and log-probability above ``beta``.

    Args:
        short: [T] log-probabilities of the tokens alone; None where a token has no predecessor (it is never key).
        long: [T] log-probabilities of the same tokens after the long context.

    Raises:
        ValueError: the two differ in length.
    """
    if len(short) != len(long):
        raise ValueError(f"{len(short)} and {len(long)} log-probabilities are not of the same tokens")
    return [at for at, (s, g) in enumerate(zip(short, long, strict=True)) if s is not None and g - s > alpha and g > beta]


def long_nll(short: Sequence[float | None], long: Sequence[float], alpha: float = ALPHA, beta: float = BETA) -> float | None:
    """log LongPPL: mean NLL, given the long context, of the key tokens; None (no score) where there is none."""
    keys = key_tokens(short, long, alpha, beta)
    return -sum(long[at] for at in keys) / len(keys) if keys else None
