"""Spectrum Projection Score (AAAI 2026, arXiv 2508.05909): subspaces of a reader's weights and residuals outside them.

Mathematics on tensors only; no model, no file. With E = A S V^T (rows x D), V_r the first r right singular vectors and
P = V_r V_r^T, SPS(x) = ||x - P x||_2; lower is better. The right singular vectors come from the D x D Gram matrix in float64,
which needs no factor of the vocabulary's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from xcompress.products import product

EnergyOf = Literal["values", "squares"]
_CHUNK_ROWS = 8192
_STRIP = 256  # columns of the Gram matrix that are computed together


@dataclass(frozen=True)
class Basis:
    """Right singular vectors of a matrix, most important first.

    Attributes:
        vectors: [D, R] float32, orthonormal columns.
        values: [R] float64 singular values, descending.
        mean: [D] float32 column mean that was removed (PCA), or None.
        rows: rows of the matrix that entered.
        energy_of: what "95 %" is counted of: singular "values" (paper) or their "squares" (explained variance, release).
    """

    vectors: torch.Tensor
    values: torch.Tensor
    mean: torch.Tensor | None
    rows: int
    energy_of: EnergyOf = "values"

    def rank(self, energy: float) -> int:
        """The smallest r whose leading r singular values reach ``energy`` (0..1) of the total.

        Raises:
            ValueError: energy is not in (0, 1].
        """
        if not 0 < energy <= 1:
            raise ValueError(f"energy must lie in (0, 1], not {energy}")
        weights = self.values if self.energy_of == "values" else self.values.square()
        share = weights.cumsum(0) / weights.sum()
        return min(int((share < energy - 1e-12).sum()) + 1, len(weights))

    def ranks(self, energies: Sequence[float]) -> list[int]:
        """:meth:`rank` of each energy level."""
        return [self.rank(energy) for energy in energies]


def compute_basis(matrix: torch.Tensor, center: bool = False, energy_of: EnergyOf = "values") -> Basis:
    """Basis of the row space of ``matrix`` [rows, D] by the eigenvectors of its float64 Gram matrix.

    Args:
        matrix: any floating dtype and device; read in chunks, never copied whole.
        center: remove the column mean first (PCA).
        energy_of: see :class:`Basis`.

    Raises:
        ValueError: the matrix is not 2-D, holds non-finite values, or is all zero (a placeholder that was never loaded).
    """
    if matrix.ndim != 2 or matrix.is_meta:
        raise ValueError("the matrix must be a 2-D tensor with data")
    rows, width = matrix.shape
    gram = torch.zeros(width, width, dtype=torch.float64)
    total = torch.zeros(width, dtype=torch.float64)
    for start in range(0, rows, _CHUNK_ROWS):
        chunk = matrix[start : start + _CHUNK_ROWS].to("cpu", torch.float64)
        for left in range(0, width, _STRIP):  # the upper triangle: the Gram matrix is symmetric
            gram[left : left + _STRIP, left:].addmm_(chunk[:, left : left + _STRIP].T, chunk[:, left:])
        total += chunk.sum(0)
    if not torch.isfinite(gram).all():
        raise ValueError("the matrix holds non-finite values")
    if not bool(gram.any()):
        raise ValueError("the matrix is all zero: its weights were not loaded")
    mean = None
    if center:
        average = total / rows
        gram.addr_(average, average, alpha=-rows)
        mean = average.float()
    eigenvalues, vectors = torch.linalg.eigh(gram, UPLO="U")  # below the diagonal only the strips' own squares are filled
    del gram
    values = eigenvalues.flip(0).clamp_min(0).sqrt()
    basis = Basis(vectors.flip(1).float().contiguous(), values, mean, rows, energy_of)
    check_orthonormal(basis)
    return basis


def check_orthonormal(basis: Basis, tolerance: float = 1e-4) -> None:
    """Raise ValueError unless V^T V is the identity within ``tolerance`` (also asked of a basis read from a cache)."""
    squares = product(basis.vectors.T.contiguous(), basis.vectors)  # float32 is exact enough for the tolerance
    squares.diagonal().sub_(1)
    worst = float(squares.abs_().max())
    if not worst <= tolerance:
        raise ValueError(f"the basis is not orthonormal: V^T V differs from the identity by {worst:.2g}")


def residuals(x: torch.Tensor, basis: Basis, ranks: Sequence[int]) -> torch.Tensor:
    """SPS of vectors ``x`` [..., D] at each rank: [..., len(ranks)] float32.

    From coefficients c = V^T x the squared residual at every rank is a sum of c^2 over the columns from that rank on, plus what
    lies outside the span when the basis has fewer than D columns. Columns are summed once, between neighbouring ranks, in
    float64, and those few sums are then accumulated from the smallest up.
    """
    vectors = basis.vectors.to(x.device)
    x = x.float() if basis.mean is None else x.float() - basis.mean.to(x.device)
    squares = product(x, vectors).square()
    bounds = sorted(set(ranks))
    ends = [*bounds[1:], vectors.shape[1]]
    parts = [squares[..., start:end].sum(-1, dtype=torch.float64) for start, end in zip(bounds, ends, strict=True)]
    tail = torch.stack(parts, -1).flip(-1).cumsum(-1).flip(-1)
    if vectors.shape[1] < vectors.shape[0]:
        inside = squares.sum(-1, keepdim=True, dtype=torch.float64)
        tail = tail + (x.double().square().sum(-1, keepdim=True) - inside).clamp_min(0)
    return tail[..., [bounds.index(rank) for rank in ranks]].sqrt().float()
