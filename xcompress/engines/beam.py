"""Beam search: the bookkeeping of one request, apart from any model.

The rules are those that the field means by "beam search with B beams" (transformers' default: length-normalised scores, no
early stopping), since the authors' release relies on them. :class:`Beams` is fed the best continuations of each step and says
which beams go on; the engine computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Beam:
    """A sequence under way or finished.

    Attributes:
        tokens: generated ids, a stop token not among them.
        score: sum of penalised log-probabilities; divided by the length (stop token counted) once it is finished.
        logprob_sum: sum of the model's own log-probabilities of ``tokens``, nats.
        finish_reason: "" while it is open, then "stop" or "length".
    """

    tokens: tuple[int, ...]
    score: float
    logprob_sum: float
    finish_reason: str = ""


@dataclass(frozen=True)
class Continuation:
    """A beam's next token: ``score`` is the beam's sum with it, ``logprob`` the model's own log-probability of the token."""

    beam: int
    token: int
    score: float
    logprob: float


class Beams:
    """The beams of one prompt.

    Args:
        width: number of beams, and of finished sequences returned.
        limit: most new tokens.
        stop_ids: tokens that end a sequence.
    """

    def __init__(self, width: int, limit: int, stop_ids: frozenset[int] | set[int]) -> None:
        self.width = width
        self.limit = limit
        self.stop_ids = stop_ids
        self.open = [Beam((), 0.0, 0.0)]  # the first step has one beam only: equal beams would stay equal
        self.finished: list[Beam] = []
        self.done = False

    @property
    def wanted(self) -> int:
        """Continuations that :meth:`step` needs: enough that ``width`` open ones remain if all stop tokens are among them."""
        return max(2, 1 + len(self.stop_ids)) * self.width

    def step(self, best: Sequence[Continuation]) -> list[int]:
        """Take the ``wanted`` best continuations, best first; returns the parent of each beam that goes on ([] at the end).

        Only the first ``width`` may finish a sequence: a stop token further down would be worse than a beam that goes on.
        """
        length = len(self.open[0].tokens) + 1
        going: list[tuple[int, Beam]] = []
        for rank, step in enumerate(best):
            parent = self.open[step.beam]
            logprob = parent.logprob_sum + step.logprob
            stops = step.token in self.stop_ids
            if stops or length == self.limit:
                if rank < self.width:
                    tokens = parent.tokens if stops else (*parent.tokens, step.token)
                    kept = parent.logprob_sum if stops else logprob
                    self.finished.append(Beam(tokens, step.score / length, kept, "stop" if stops else "length"))
            elif len(going) < self.width:
                going.append((step.beam, Beam((*parent.tokens, step.token), step.score, logprob)))
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[: self.width]  # stable: the earlier of equals
        # An open beam is judged as if it ended here; it cannot overtake the worst finished one: over.
        full = len(self.finished) == self.width
        if not going or (full and going[0][1].score / length <= self.finished[-1].score):
            self.done = True
            return []
        self.open = [beam for _, beam in going]
        return [parent for parent, _ in going]
