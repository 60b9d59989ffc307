"""The paper's gate outside an evaluation run: the calibration ratios and what they were computed with, in one small file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcompress.schema import UsageError
from xcompress.selectors import gate_threshold
from xcompress.store import write_json

_FORMAT = 1


@dataclass(frozen=True)
class Gate:
    """Concentration ratios of the initial summaries of calibration questions (paper, adaptive norm filtering).

    Attributes:
        ratios: one a calibration question that has one; a blank initial summary has none.
        made_with: everything the ratios depend on (reader, compressor, prompt, token rules). A gate serves no other method.
    """

    ratios: tuple[float, ...]
    made_with: Mapping[str, Any]

    def threshold(self, share: float) -> float:
        """Ratio above which the initial summary is kept: the (1 - ``share``) quantile."""
        found = gate_threshold(self.ratios, share)
        assert found is not None  # there is at least one ratio
        return found

    def check(self, made_with: Mapping[str, Any], what: str = "the gate") -> None:
        """Refuse a gate of another reader, compressor or method.

        Raises:
            UsageError: it names what differs.
        """
        differs = [key for key in made_with if self.made_with.get(key) != made_with[key]]
        if differs:
            key = differs[0]
            raise UsageError(
                f"{what} was calibrated with another {', '.join(name.replace('_', ' ') for name in differs)}"
                f" ({key}: {self.made_with.get(key)!r}, here {made_with[key]!r}); calibrate again"
            )

    def save(self, path: str | Path) -> None:
        """Write the gate as JSON (a few kilobytes); the file appears whole or not at all."""
        write_json(Path(path), {"format": _FORMAT, "made_with": dict(self.made_with), "ratios": list(self.ratios)})

    @classmethod
    def load(cls, path: str | Path) -> Gate:
        """The gate of a file that :meth:`save` wrote.

        Raises:
            UsageError: there is no such file, or it is no gate.
        """
        path = Path(path)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"gate file {path} does not exist; calibrate first (XCompress.calibrate, Gate.save)") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"gate file {path} cannot be read: {error}") from None
        ratios = stored.get("ratios") if isinstance(stored, dict) and stored.get("format") == _FORMAT else None
        if not isinstance(ratios, list) or not ratios or not all(isinstance(ratio, float) for ratio in ratios):
            raise UsageError(f"{path} is not a gate file (format {_FORMAT} with a list of ratios); calibrate again")
        if not isinstance(stored.get("made_with"), dict):
            raise UsageError(f"gate file {path} does not say what it was calibrated with; calibrate again")
        return cls(tuple(ratios), stored["made_with"])
