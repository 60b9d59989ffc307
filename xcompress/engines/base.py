"""The contract of a text generation engine: a list of requests in, a list of generations out, in the same order.

Requests hold token ids, not text, so every engine sees exactly the same tokens (one start token, the same template). Every
sampling value is explicit: an engine takes nothing from a model's own generation file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

from xcompress.schema import UsageError


@dataclass(frozen=True)
class Draw:
    """How one continuation is drawn. ``temperature`` 0 is greedy; ``seed`` belongs to this continuation alone."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One prompt and the continuations wanted of it.

    Attributes:
        prompt: token ids, start token included where the tokenizer has one.
        draws: one continuation each; none where ``beams`` is set.
        max_new_tokens: a hard limit, always set.
        stop: texts at which a continuation ends; they are not part of it.
        repetition_penalty: 1 is neutral; applies to prompt and continuation (Keskar et al. 2019, CTRL, section 4.1).
        beams: 0, or the number of beams of a beam search, whose finished sequences are the continuations, best first.
    """

    prompt: tuple[int, ...]
    draws: tuple[Draw, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    beams: int = 0


@dataclass(frozen=True)
class Generation:
    """One continuation.

    Attributes:
        text: without the stop text and without special tokens.
        tokens: generated ids; a stop token is not among them.
        finish_reason: "stop" (stop token or stop text) or "length" (cut off at ``max_new_tokens``).
        logprob_sum: sum of the model's own log-probabilities (temperature 1, no penalty) of ``tokens``, in nats.
    """

    text: str
    tokens: tuple[int, ...] = field(repr=False)
    finish_reason: str
    logprob_sum: float


Progress = Callable[[int], None]
"""Called with the number of tokens just drawn, stop tokens included."""


class RowErrors(UsageError):
    """Some requests of a list have failed for good while the others were answered; a remote engine raises it.

    Args:
        rows: why, by index into the list.
        questions: ids of the questions they belong to, where a stage has said so (:func:`naming`).
    """

    def __init__(self, rows: Mapping[int, str], questions: Sequence[str] = ()) -> None:
        self.rows = dict(rows)
        self.questions = tuple(dict.fromkeys(questions))
        whose = f" of the questions {', '.join(self.questions[:10])}" if self.questions else ""
        more = f" and {len(self.questions) - 10} more" if len(self.questions) > 10 else ""
        reasons = list(dict.fromkeys(self.rows.values()))
        super().__init__(f"{len(self.rows)} requests{whose}{more} failed: {'; '.join(reasons[:3])}")

    def __reduce__(self) -> tuple[Any, ...]:
        return RowErrors, (self.rows, self.questions)


@contextmanager
def naming(questions: Sequence[str]) -> Iterator[None]:
    """Say which question each request of the call inside belongs to, should some fail."""
    try:
        yield
    except RowErrors as error:
        raise RowErrors(error.rows, [questions[row] for row in error.rows]) from None


@contextmanager
def regrouping(size: int) -> Iterator[None]:
    """Inside, each item of the caller's list is ``size`` requests in a row; what fails is said of the items."""
    try:
        yield
    except RowErrors as error:
        raise RowErrors({row // size: why for row, why in error.rows.items()}) from None


@runtime_checkable
class Engine(Protocol):
    """What the stages need of an engine."""

    name: str
    reproducible: bool  # seeded draws repeat and do not depend on order or batch (floating-point ties apart)
    max_context: int  # prompt and continuation together, in tokens

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        """Generations of each request: one for each of its draws, or ``beams`` of them.

        Raises:
            UsageError: a prompt plus its ``max_new_tokens`` does not fit ``max_context``; said before anything is computed.
        """
        ...

    def token_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probability (nats) of each continuation token given its context and the tokens before it.

        Args:
            pairs: context and continuation as token ids, neither empty.
        """
        ...

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Sums of :meth:`token_logprobs`."""
        ...


def derive_seed(seed: int, *parts: object) -> int:
    """A 63-bit seed from the run's seed and what the draw belongs to (question id, candidate, round).

    Hashed, so neighbouring seeds and ids give unrelated streams, and the order of questions, batch size and restarts change
    nothing.
    """
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def text_until(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str]) -> str:
    """The text of generated ids, up to the first stop text and without special tokens; the same for every engine."""
    text = str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    cuts = [text.index(end) for end in stop if end in text]
    return text[: min(cuts)] if cuts else text


def check_length(request: Request, max_context: int) -> None:
    """Refuse a request that cannot fit, before anything is computed.

    Raises:
        UsageError: with both lengths and what to change.
    """
    if len(request.prompt) + request.max_new_tokens > max_context:
        raise UsageError(
            f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones exceed the model's {max_context};"
            " lower dataset.passages or dataset.segment_size, or raise the engine's max_context"
        )
    if not request.prompt:
        raise UsageError("an empty prompt cannot be continued by a model whose tokenizer has no start token")
    if request.max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    if request.beams and (request.draws or request.stop):
        raise ValueError("a beam search has no draws, and ends at stop tokens only")
