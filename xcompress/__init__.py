"""Which retrieval summary should my reader get? Spectrum Projection Score (AAAI 2026) as an evaluation and as a library.

``from xcompress import XCompress, SPSScorer`` is all that a pipeline of your own needs; model libraries are imported when one
of the two is made, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcompress.compressed import Compressed
    from xcompress.controller import XCompress
    from xcompress.gate import Gate
    from xcompress.schema import Passage, Question, UsageError
    from xcompress.scorer import SPSScorer, TextScore
    from xcompress.selectors import Candidate

__all__ = ["Candidate", "Compressed", "Gate", "Passage", "Question", "SPSScorer", "TextScore", "UsageError", "XCompress"]
_HOMES = {
    "Candidate": "xcompress.selectors",
    "Compressed": "xcompress.compressed",
    "Gate": "xcompress.gate",
    "Passage": "xcompress.schema",
    "Question": "xcompress.schema",
    "SPSScorer": "xcompress.scorer",
    "TextScore": "xcompress.scorer",
    "UsageError": "xcompress.schema",
    "XCompress": "xcompress.controller",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'xcompress' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
