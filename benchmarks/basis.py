"""The basis of a subspace: the float64 Gram matrix of :func:`xcompress.spectrum.compute_basis` against torch.linalg.svd."""

from __future__ import annotations

import time

import torch

from benchmarks.memory import peak_growth
from benchmarks.table import Row, Section
from benchmarks.timing import Ratio, Series, interleave, ratio, summary
from benchmarks.workload import Setting
from xcompress.spectrum import Basis, compute_basis, residuals

_BOUND = (
    "what binds it: the Gram product in float64, whose rate is that of the machine's float64 matrix products (a quarter or less"
    " of float32's by oneDNN)."
)
_ENERGIES = (0.5, 0.9, 0.95)


def synthetic(rows: int, width: int) -> torch.Tensor:
    """[rows, width] float32 with a spectrum that falls as an embedding matrix's does: a steep head and a long flat tail."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, width + 1, dtype=torch.float32).rsqrt() + 0.1
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    matrix = torch.empty(rows, width)
    mixed = scale[:, None] * turn
    for at in range(0, rows, 8192):
        part = matrix[at : at + 8192]
        torch.mm(torch.randn(len(part), width, generator=generator), mixed, out=part)
    return matrix


def by_svd(matrix: torch.Tensor) -> Basis:
    """The same basis as most would compute it."""
    _, values, vectors = torch.linalg.svd(matrix, full_matrices=False)
    return Basis(vectors.T.contiguous(), values.double(), None, len(matrix))


def by_float64(matrix: torch.Tensor) -> Basis:
    """The reference: QR, then the singular value decomposition of R, in float64 (no Gram matrix, so no squared condition)."""
    triangle = torch.linalg.qr(matrix.double(), mode="r")[1]
    _, values, vectors = torch.linalg.svd(triangle)
    return Basis(vectors.T.float().contiguous(), values, None, len(matrix))


def compare(
    section: Section, setting: Setting, matrix: torch.Tensor, name: str, repetitions: int, target: float | None
) -> None:
    """Time, memory and agreement for one matrix.

    Raises:
        AssertionError: SPS of random vectors differ from the float64 reference's by more than 1e-5 (relative).
    """
    bases: dict[str, Basis] = {}
    sizes: dict[str, list[int | None]] = {"ours": [], "svd": []}

    def run_ours(_: int) -> None:
        sizes["ours"].append(peak_growth(lambda: bases.update(ours=compute_basis(matrix))))

    def run_svd(_: int) -> None:
        sizes["svd"].append(peak_growth(lambda: bases.update(svd=by_svd(matrix))))

    series = interleave({"ours": run_ours, "svd": run_svd}, repetitions, setting.say)
    x = 10 * torch.randn(64, matrix.shape[1], generator=torch.Generator().manual_seed(1))
    ranks = bases["ours"].ranks(_ENERGIES)
    truth = residuals(x, by_float64(matrix), ranks).double()
    worst, other_worst = (float((residuals(x, bases[side], ranks) / truth - 1).abs().max()) for side in ("ours", "svd"))
    assert worst < 1e-5, f"{name}: SPS differ from the float64 reference's by {worst:.1e}"
    times = ratio(series["svd"], series["ours"])
    section.rows.append(Row(name, _seconds(series["ours"]), _seconds(series["svd"]), times, target))
    size = matrix.numel() * 4
    section.raw[name] = {**{side: each.wall for side, each in series.items()}, "peak_growth": sizes, "matrix_bytes": size}
    energies = ", ".join(f"{energy:.0%}" for energy in _ENERGIES)
    words = f"{name}: SPS at {energies} of the spectrum agrees with a float64 reference (QR, then SVD) within {worst:.1e}; that"
    words += f" of the float32 svd within {other_worst:.1e}."
    section.notes.append(f"{words} Ratio by processor time: {times.cpu:.2f}.")
    section.notes.append(_parts(matrix, name))
    own, other = sizes["ours"][-1], sizes["svd"][-1]
    if own is not None and other is not None:
        peak: Ratio = summary([1 + own / size])
        label = f"{name}: peak memory over the float32 matrix alone"
        bound = 1.5 if target is not None else None  # on a small matrix the fixed parts would be what is measured
        section.rows.append(Row(label, _megabytes(own + size), _megabytes(other + size), peak, bound, at_most=True))


def _parts(matrix: torch.Tensor, name: str) -> str:
    """Where ours spends its time: the eigenvectors alone, of a matrix of the same size."""
    width = matrix.shape[1]
    part = matrix[: 2 * width].double()
    gram = part.T @ part
    begun = time.perf_counter()
    torch.linalg.eigh(gram)
    return f"{name}: {time.perf_counter() - begun:.1f} s of ours are the eigenvectors (float64), the rest is the Gram matrix."


def _seconds(series: Series) -> str:
    return f"{series.median:.2f} s"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


@torch.inference_mode()
def run(setting: Setting) -> Section:
    """The embedded model's matrix, and one of the size of an 8B reader's."""
    section = Section("Basis: eigenvectors of the Gram matrix against torch.linalg.svd")
    embedding = setting.loaded.model.get_input_embeddings().weight
    compare(section, setting, embedding, "49,152 x 576 (the embedded model)", 1 if setting.quick else 5, None)
    rows, width = (16_384, 1024) if setting.quick else (128_256, 4096)
    compare(section, setting, synthetic(rows, width), f"{rows:,} x {width:,} (synthetic)", 1, 3.0)
    section.notes.append(_BOUND)
    return section
