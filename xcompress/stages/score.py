"""score: candidates -> SPS, NLL and concentration ratio under a reader. Each distinct text is scored once a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xcompress.engines.base import Progress
from xcompress.forward import NonFiniteError
from xcompress.reader import TextScorer
from xcompress.schema import UsageError

VERSION = 1  # raise when the rows of this stage change


def score(candidates: Sequence[dict[str, Any]], scorer: TextScorer, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Rows of :data:`xcompress.schema.SCORES`, one for each candidate row, in order."""
    texts = list(dict.fromkeys(row["summary"] for row in candidates))
    try:
        scores = dict(zip(texts, scorer.score(texts, progress), strict=True))
    except NonFiniteError as error:
        bad = next(row for row in candidates if row["summary"] == error.text)
        raise UsageError(f"question {bad['question_id']!r}, candidate {bad['candidate']}: {error}") from error
    rows = []
    for candidate in candidates:
        result = scores[candidate["summary"]]
        row: dict[str, Any] = {"question_id": candidate["question_id"], "candidate": candidate["candidate"]}
        if result is None:
            rows.append({**row, "status": "blank", "tokens": 0, "scored_tokens": 0})
            continue
        rows.append(
            {
                **row,
                "status": "ok",
                "tokens": result.tokens,
                "nll": result.nll,
                "scored_tokens": result.scored_tokens,
                "token_logprobs": result.token_logprobs,
                "first_token": result.first_token,
                "ratio": result.ratio.ravel(),
                "sps": result.sps.ravel(),
            }
        )
    return rows
