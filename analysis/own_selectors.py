"""Scores of the selectors that a configuration names (``selectors``), from the pool that every other row chooses from."""

from __future__ import annotations

import numpy as np

from analysis.load import Floats, Pool
from xcompress.selectors import Candidate, apply_selector, load_selectors
from xcompress.settings import Settings


def own_scores(pool: Pool, settings: Settings) -> dict[str, Floats]:
    """Scores [Q, K + 1] of each selector, lower is better; NaN for a candidate that is not to win.

    Raises:
        UsageError: a selector does not give one number a candidate.
    """
    selectors = load_selectors(settings.selectors)
    if not selectors:
        return {}
    pools = candidates(pool, settings)
    return {
        name: np.array(
            [
                [np.nan if score is None else score for score in apply_selector(name, selector, question, members)]
                for question, members in zip(pool.questions, pools, strict=True)
            ]
        )
        for name, selector in selectors.items()
    }


def candidates(pool: Pool, settings: Settings) -> list[list[Candidate]]:
    """The candidates of each question as a selector sees them, here and in the controller."""
    sps = pool.view(settings.method)
    start, first = pool.place(settings.method)[:2]
    ratio = pool.ratio[:, :, start, first]

    def known(value: float) -> float | None:
        return None if np.isnan(value) else float(value)

    return [
        [
            Candidate(
                index=k,
                summary=summary,
                sps=known(sps[at, k]),
                nll=known(pool.nll[at, k]),
                ratio=known(ratio[at, k]),
                tokens=int(np.nan_to_num(pool.tokens[at, k])),
                compressor_tokens=int(np.nan_to_num(pool.compressor_tokens[at, k])),
                compressor_nll=known(pool.compressor_nll[at, k]),
            )
            for k, summary in enumerate(summaries)
        ]
        for at, summaries in enumerate(pool.summaries)
    ]
