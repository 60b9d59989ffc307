"""One progress bar a stage: questions done, time left, tokens a second."""

from __future__ import annotations

import time
from types import TracebackType

from tqdm import tqdm


class Bar:
    """Counts questions (by shard) and tokens (as they come)."""

    def __init__(self, stage: str, questions: int) -> None:
        self._bar = tqdm(total=questions, desc=f"{stage:>8}", unit="q", dynamic_ncols=True, smoothing=0.1, mininterval=0.5)
        self.all_tokens = 0
        self.questions = 0
        self._started = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.close()

    def tokens(self, count: int) -> None:
        """Called by engines and scorers with the tokens just done."""
        self.all_tokens += count
        rate = self.all_tokens / max(1e-9, time.monotonic() - self._started)
        self._bar.set_postfix_str(f"{self.all_tokens} tokens, {rate:.0f} tokens/s", refresh=False)
        self._bar.update(0)  # draws only when the last drawing is old enough

    def advance(self, questions: int) -> None:
        """A shard of so many questions is stored."""
        self.questions += questions
        self._bar.update(questions)
