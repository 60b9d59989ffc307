"""Peak memory of a call in this process, as the kernel counts it (Linux)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_growth(run: Callable[[], object]) -> int | None:
    """Bytes by which the resident set grew at its peak during ``run``, or None where the kernel does not tell."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed but the library keeps would hide what this one takes
    try:
        _RESET.write_text("5")  # the peak starts again from here
    except OSError:
        return None
    before = _kilobytes("VmRSS")
    kept = run()
    peak = _kilobytes("VmHWM")
    del kept
    return max(0, peak - before) * 1024


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {field}")
