"""What the controller gives back for a question: the chosen summary, all candidates, what the gate said, what it cost."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from xcompress.selectors import Candidate

GateOutcome = Literal["off", "not calibrated", "skipped", "sampled"]


@dataclass(frozen=True)
class Spent:
    """Tokens that one question took.

    Attributes:
        compressor: prompt and new tokens of every trajectory drawn, each prompt counted once a trajectory (as in Table 1; an
            engine that shares prefixes computes fewer).
        scoring: summary tokens through the reader.
        reading: prompt and new tokens of the answer, 0 if none was asked for.
    """

    compressor: int
    scoring: int
    reading: int = 0


@dataclass(frozen=True)
class Compressed:
    """What the controller gives for one question.

    Attributes:
        id: of the question; sampling is seeded by it.
        question: as it was asked.
        summary: the chosen summary; "" only if every candidate is blank.
        chosen: its index among ``candidates``.
        candidates: the initial summary first; it alone where the gate skipped sampling.
        gate: "skipped" (the initial summary was good enough, nothing was sampled), "sampled", "not calibrated" (the method has
            a gate, but no threshold was given: sampled), or "off" (the method has none).
        threshold: concentration ratio above which the gate skips, or None.
        fallback: no candidate had a usable score, so the initial summary was taken.
        cut_off: indices of candidates whose last round ended at the length limit.
        passages_unused: passages that no round could see (``compressor.max_rounds`` x ``dataset.segment_size``).
        tokens_removed: tokens of passage text left out to fit the compressor, the most over all candidates.
        spent: tokens it took.
        answer: the reader's answer from the chosen summary, or None if none was asked for.
    """

    id: str
    question: str
    summary: str
    chosen: int
    candidates: tuple[Candidate, ...]
    gate: GateOutcome
    threshold: float | None
    fallback: bool
    cut_off: tuple[int, ...]
    passages_unused: int
    tokens_removed: int
    spent: Spent
    answer: str | None = None

    @property
    def skipped(self) -> bool:
        """Whether the gate kept the initial summary and nothing was sampled."""
        return self.gate == "skipped"

    def scores(self) -> dict[str, Any]:
        """What metadata of the chosen summary may say, as plain values: sps, ppl, chosen, gate, candidates (how many)."""
        best = self.candidates[self.chosen]
        ppl = best.ppl if best.ppl is not None and math.isfinite(best.ppl) else None
        return {"sps": best.sps, "ppl": ppl, "chosen": self.chosen, "gate": self.gate, "candidates": len(self.candidates)}

    def as_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; numbers that are not finite become None."""
        plain = asdict(self)
        plain["skipped"] = self.skipped
        plain["candidates"] = [{**asdict(candidate), "ppl": candidate.ppl} for candidate in self.candidates]
        for candidate in plain["candidates"]:
            for key, value in candidate.items():
                if isinstance(value, float) and not math.isfinite(value):
                    candidate[key] = None
        return plain
