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


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Repetition penalty [R] on [R, V] logits where ``seen`` [R, V] (bool): positive ones divided, negative ones multiplied."""
    penalty = penalty[:, None]
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
    total = scaled.logsumexp(-1, keepdim=True).double()
    values, order = scaled.topk(min(_NUCLEUS, scaled.shape[1]), dim=-1)
    probabilities = (values.double() - total).exp()
    chosen = _inverse_cdf(probabilities, order, top_p, uniform[index])
    too_small = (probabilities.sum(-1) < top_p).nonzero().flatten()
    if len(too_small):
        values, order = scaled[too_small].sort(dim=-1, descending=True, stable=True)
        probabilities = (values.double() - total[too_small]).exp()
        chosen[too_small] = _inverse_cdf(probabilities, order, top_p[too_small], uniform[index][too_small])
    tokens[index] = chosen
    return tokens


def _inverse_cdf(probabilities: torch.Tensor, order: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[R] tokens drawn from descending [R, M] probabilities of tokens ``order`` [R, M], cut at ``top_p`` [R].

    The cumulative sum runs in the order of token ids, not of ranks: two nearly equal tokens that change rank under rounding
    (another batch, another kernel) then leave every other boundary where it was.
    """
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= top_p[:, None], 0.0)  # the smallest set that reaches top_p
    ids, by_id = order.sort(dim=-1)
    cumulative = kept.gather(1, by_id).cumsum(-1)
    place = (cumulative <= uniform.double()[:, None] * cumulative[:, -1:]).sum(-1)
    # u < 1, so a kept token follows; rounding at the very end could point past the last one with any mass.
    last = cumulative.shape[1] - 1 - (kept.gather(1, by_id).flip(-1) > 0).double().argmax(-1)
    return ids.gather(1, torch.minimum(place, last)[:, None]).squeeze(1)
