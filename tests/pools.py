"""A pool small enough to work out by hand, for the tests of the analysis."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.load import Pool, Quality
from xcompress.config import compose, to_settings
from xcompress.forward import POOLINGS
from xcompress.schema import Question
from xcompress.settings import Settings

NAN = np.nan
# Three questions, an initial summary and two sampled ones.
EM = np.array([[0.0, 100.0, 0.0], [100.0, 0.0, 0.0], [0.0, 0.0, 100.0]])
F1 = np.array([[50.0, 100.0, 0.0], [100.0, 0.0, 100.0], [0.0, 20.0, 100.0]])
TOKENS = np.array([[5.0, 9.0, 7.0], [8.0, 0.0, 6.0], [4.0, 4.0, 9.0]])
NLL = np.array([[2.0, 3.0, 1.0], [1.0, NAN, 1.0], [NAN, NAN, NAN]])
SPS = np.array([[3.0, 1.0, 2.0], [2.0, NAN, 4.0], [9.0, 9.0, 8.0]])
COST = np.array([[100.0, 110.0, 120.0], [100.0, 130.0, 140.0], [200.0, 210.0, 220.0]])
RATIO = np.array([0.1, 0.9, 0.3])


def settings(*overrides: str) -> Settings:
    """Settings of the laptop experiment with K = 2 and few resamples."""
    return to_settings(compose(["experiment=laptop", "generation.candidates=2", "statistics.resamples=500", *overrides]))


def pool(**changes: Any) -> Pool:
    """The pool above; its SPS stands at the default variant only (elsewhere NaN)."""
    sps = np.full((3, 3, 1, 2, 1, 5, len(POOLINGS), 8), NAN)
    sps[:, :, 0, 0, 0, 2, 0, 5] = SPS
    ratio = np.full((3, 3, 1, 2), NAN)
    ratio[:, 0, 0, 0] = RATIO
    values: dict[str, Any] = {
        "questions": [Question(f"q{k}", "?", ("gold",)) for k in range(3)],
        "labelled": np.array([True, True, True]),
        "quality": Quality(EM, F1, EM),
        "raw": Quality(EM[:, 0], F1[:, 0], EM[:, 0]),
        "closed": Quality(EM[:, 1], F1[:, 1], EM[:, 1]),
        "tokens": TOKENS,
        "first_token": np.where(TOKENS > 0, TOKENS % 2, NAN),
        "nll": NLL,
        "longppl": np.full((3, 3), NAN),
        "question_nll": np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0]]),
        "answer_nll": np.array([[1.0, 2.0, 3.0], [NAN, 2.0, 1.0], [2.0, 2.0, 3.0]]),
        "compressor_nll": np.array([[1.0, 0.5, 3.0], [1.0, 2.0, 0.5], [2.0, 2.0, 3.0]]),
        "reading_tokens": np.full((3, 3), 40.0),
        "rival_tokens": {"longppl": 500.0, "question": 90.0},
        "sps": sps,
        "ratio": ratio,
        "compressor_tokens": COST,
        "calibration_ratio": np.array([[[r, NAN]] for r in (0.2, 0.4, 0.6, 0.8)]),
        "axes": {
            "start_token": [False],
            "first_token": [True, False],
            "subspace": ["embedding"],
            "layer": ["0", "1", "2", "3", "normed"],
            "pooling": list(POOLINGS),
            "energy": [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999],
        },
        "summaries": [["s"] * 3] * 3,
        "predictions": [["a", "The B!", "b"], ["", "", "c"], ["d", "e", "f"]],
    }
    return Pool(**{**values, **changes})
