"""The next token of every row: penalty, temperature, nucleus, draw. Rows never influence each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xcompress.engines.base import Draw

_NUCLEUS = 512  # most nuclei are far smaller; a row whose nucleus is larger is sorted in full


def uniforms(draw: Draw, count: int) -> np.ndarray:
    """[count] numbers in [0, 1) that belong to this draw alone (Philox, counter-based: the same on every platform)."""
    return np.random.Generator(np.random.Philox(draw.seed)).random(count)


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Repetition penalty on [R, V] logits where ``seen`` [R, V] (bool): positive ones divided, negative ones multiplied."""
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def choose(logits: torch.Tensor, draws: Sequence[Draw], uniform: torch.Tensor) -> torch.Tensor:
    """[R] next tokens from [R, V] fp32 logits: the arg-max for greedy rows, else an inverse-CDF draw from the nucleus.

    The nucleus is the smallest set of most likely tokens whose probability reaches ``top_p`` (Holtzman et al. 2020).
    ``uniform`` [R] holds each row's own number for this step. One number a step, rather than Gumbel noise for the whole
    vocabulary, keeps a draw independent of its neighbours at a thousandth of the random numbers.
    """
    tokens = logits.argmax(-1)
    sampled = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if not sampled:
        return tokens
    index = torch.tensor(sampled, device=logits.device)
    temperature = torch.tensor([draws[row].temperature for row in sampled], device=logits.device)[:, None]
    top_p = torch.tensor([draws[row].top_p for row in sampled], dtype=torch.float64, device=logits.device)
    scaled = logits[index] / temperature
    total = scaled.double().logsumexp(-1, keepdim=True)
    values, order = scaled.topk(min(_NUCLEUS, scaled.shape[1]), dim=-1)
    picked = _inverse_cdf((values.double() - total).exp(), top_p, uniform[index])
    too_small = ((values.double() - total).exp().sum(-1) < top_p).nonzero().flatten()
    chosen = order.gather(1, picked[:, None]).squeeze(1)
    if len(too_small):
        values, order = scaled[too_small].sort(dim=-1, descending=True, stable=True)
        picked = _inverse_cdf((values.double() - total[too_small]).exp(), top_p[too_small], uniform[index][too_small])
        chosen[too_small] = order.gather(1, picked[:, None]).squeeze(1)
    tokens[index] = chosen
    return tokens


def _inverse_cdf(probabilities: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[R] ranks drawn from descending [R, M] probabilities cut at ``top_p`` [R]."""
    cumulative = probabilities.cumsum(-1)
    nucleus = (cumulative < top_p[:, None]).sum(-1).clamp_max(cumulative.shape[1] - 1)  # rank of the last token inside
    mass = cumulative.gather(1, nucleus[:, None])
    return torch.minimum((cumulative <= uniform.double()[:, None] * mass).sum(-1), nucleus)
