"""Perplexity from token log-probabilities. NLL is what is stored and ranked; PPL is only shown."""

from __future__ import annotations

import math

import torch


def mean_nll(token_logprobs: torch.Tensor) -> float | None:
    """Mean negative log-likelihood (nats a token), or None for a text of which no token is scored."""
    return None if token_logprobs.numel() == 0 else float(-token_logprobs.double().mean())


def perplexity(nll: float | None) -> float | None:
    """exp(NLL); infinity where that overflows, None where there is no NLL."""
    if nll is None:
        return None
    return math.exp(nll) if nll < 709 else math.inf
