"""SPS, NLL, PPL and concentration ratio of your own texts under a reader, without data set, prompts or run folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xcompress import checkpoint
from xcompress.embedded import cache_root
from xcompress.perplexity import perplexity
from xcompress.schema import UsageError
from xcompress.settings import MethodSettings, ScoringSettings, SubspaceSettings


@dataclass(frozen=True)
class TextScore:
    """Scores of one text.

    Attributes:
        sps: Spectrum Projection Score; lower means closer to the reader's principal subspace. NaN where the first token is left
            out and there is no other.
        nll: mean negative log-likelihood a scored token, nats; None if no token is scored (one token, no start token).
        ratio: concentration ratio ||mean-pooled||_2 / ||max-pooled||_1.
        tokens: length under the reader, start token not counted.
    """

    sps: float
    nll: float | None
    ratio: float
    tokens: int

    @property
    def ppl(self) -> float | None:
        """Perplexity, exp(NLL); infinity where that overflows."""
        return perplexity(self.nll)


class SPSScorer:
    """Scores texts under one reader; the defaults are the paper's SPS.

    Safe to share among threads (one at a time runs on the model).

    Args:
        model: a local folder, or the hub name of a model that is already downloaded.
        revision: commit of the hub repository.
        dtype: "float32", "bfloat16", "float16", or "auto" (bfloat16 on a GPU that computes in it).
        device: "cpu", "cuda", ..., or "auto".
        matrix: "embedding" (paper), "q_proj" (of block L-1) or "output_head".
        center: remove the matrix's column mean first (PCA).
        energy: share of the spectrum that the subspace holds, in (0, 1].
        energy_of: "values" (paper) or "squares" (explained variance) of the singular values.
        layer: "penultimate" (paper), "last", "normed", or 0..L.
        pooling: "max" (paper), "mean", "last", "min" or "absmax".
        first_token: whether the first token's state takes part in pooling.
        start_token: score the text after the tokenizer's start token.
        batch_tokens: tokens of one forward pass; None finds what the device's memory holds.
        cache: folder for the decomposition of the matrix; by default below the user's cache folder.

    Raises:
        UsageError: the model is not on this machine or lacks what was asked for, or a value is not known.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        matrix: str = "embedding",
        center: bool = False,
        energy: float = 0.95,
        energy_of: str = "values",
        layer: str | int = "penultimate",
        pooling: str = "max",
        first_token: bool = True,
        start_token: bool = False,
        batch_tokens: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        scoring = ScoringSettings({matrix: SubspaceSettings(matrix, center, energy_of)}, [energy], (start_token,), rivals=False)
        self.method = MethodSettings(
            "sps",
            subspace=matrix,
            layer=layer,
            pooling=pooling,
            energy=energy,
            first_token=first_token,
            start_token=start_token,
        )
        folder = checkpoint.locate(str(model), revision)
        from xcompress.reader import TextScorer
        from xcompress.views import sps_place

        loaded = checkpoint.load(folder, dtype, device)
        bases = Path(cache) if cache else cache_root() / "bases"
        self._scorer = TextScorer(loaded, scoring, bases, batch_tokens)
        if start_token and self._scorer.start is None:
            raise UsageError(f"start_token=True: the tokenizer of {loaded.name} has no start token")
        self._place = sps_place(self._scorer.axes, self.method)

    def score(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> list[TextScore | None]:
        """A score for each text, in order; None for a blank one.

        Args:
            texts: any number; each may be at most as long as the reader's context.
            progress: called with the number of tokens just scored.

        Raises:
            UsageError: ``texts`` is one string, or an entry is not text.
        """
        if isinstance(texts, str):
            raise UsageError('texts is one string; give a list: score(["..."])')
        for at, text in enumerate(texts):
            if not isinstance(text, str):
                raise UsageError(f"text {at} is a {type(text).__name__}, not a string")
        with self._scorer.loaded.lock:
            scores = self._scorer.score(texts, progress)
        start, first = self._place[:2]
        return [
            None
            if score is None
            else TextScore(float(score.sps[self._place]), score.nll, float(score.ratio[start, first]), score.tokens)
            for score in scores
        ]
