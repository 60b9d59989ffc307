"""Bases and residuals against float64 references: torch.linalg.svd, scikit-learn's PCA, and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from xcompress.spectrum import Basis, check_orthonormal, compute_basis, residuals

LEVELS = (0.5, 0.9, 0.95, 0.999, 1.0)


def matrix(rows: int = 300, width: int = 24, seed: int = 0) -> torch.Tensor:
    """A float32 matrix with a decaying spectrum and a column mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(3, 0.05, width)
    return torch.randn(rows, width, generator=generator) * scale @ torch.linalg.qr(
        torch.randn(width, width, generator=generator)
    )[0] + torch.randn(width, generator=generator)


def loop_sps(x: torch.Tensor, vectors: torch.Tensor, rank: int) -> float:
    """||(I - P) x|| with the projector written out, float64."""
    kept = vectors[:, :rank].double()
    projector = kept @ kept.T
    return float((x.double() - projector @ x.double()).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sps_equals_float64_svd(dtype: torch.dtype) -> None:
    """Every rank's residual equals the one from a thin float64 SVD of the same (rounded) matrix."""
    embedding = matrix().to(dtype)
    basis = compute_basis(embedding)
    _, values, right = torch.linalg.svd(embedding.double(), full_matrices=False)
    torch.testing.assert_close(basis.values, values, rtol=1e-7, atol=1e-7)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)) * 10
    ranks = [0, 1, 7, 23]
    got = residuals(x, basis, ranks)
    for row in range(5):
        for at, rank in enumerate(ranks):
            assert float(got[row, at]) == pytest.approx(loop_sps(x[row], right.T, rank), rel=1e-5)


def test_rank_is_the_smallest_that_reaches_the_energy() -> None:
    """Counted by a plain loop, of singular values and of squares."""
    for energy_of in ("values", "squares"):
        basis = compute_basis(matrix(), energy_of=energy_of)  # type: ignore[arg-type]
        weights = [float(v) ** (1 if energy_of == "values" else 2) for v in basis.values]
        for level in LEVELS:
            total, rank = 0.0, 0
            while total < level * sum(weights) * (1 - 1e-12) and rank < len(weights):
                total += weights[rank]
                rank += 1
            assert basis.rank(level) == rank


def test_known_ranks() -> None:
    """Singular values 4, 3, 2, 1: 40 % is one value, 70 % two; of squares, 16/30 and 25/30."""
    basis = Basis(torch.eye(4), torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64), None, 4)
    assert basis.ranks([0.4, 0.41, 0.7, 0.9, 1.0]) == [1, 2, 2, 3, 4]
    squares = Basis(basis.vectors, basis.values, None, 4, "squares")
    assert squares.ranks([0.5, 0.83, 0.84]) == [1, 2, 3]


def test_centred_basis_equals_scikit_learn() -> None:
    """PCA of the release: column mean removed, explained variance, residual of the reconstruction."""
    weights = matrix(200, 16, seed=3)
    basis = compute_basis(weights, center=True, energy_of="squares")
    pca = PCA(svd_solver="full").fit(weights.double().numpy())
    explained = (basis.values.square() / basis.values.square().sum()).numpy()
    assert explained == pytest.approx(pca.explained_variance_ratio_, abs=1e-6)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    for level in (0.5, 0.9, 0.95):
        reference = PCA(n_components=level, svd_solver="full").fit(weights.double().numpy())
        rank = basis.rank(level)
        assert rank == reference.n_components_
        back = reference.inverse_transform(reference.transform(x.double().numpy()))
        expected = torch.from_numpy(x.double().numpy() - back).norm(dim=-1)
        torch.testing.assert_close(residuals(x, basis, [rank])[:, 0].double(), expected, rtol=1e-5, atol=1e-6)


def test_vectors_of_the_row_space_have_no_residual() -> None:
    """A matrix of rank 3 in 10 dimensions: its rows lie in the span of the first 3 vectors, others do not."""
    generator = torch.Generator().manual_seed(2)
    low = torch.randn(40, 3, generator=generator) @ torch.randn(3, 10, generator=generator)
    basis = compute_basis(low)
    assert float(residuals(low, basis, [3]).max()) < 1e-4
    assert float(residuals(torch.randn(1, 10, generator=generator), basis, [3])) > 0.1


def test_a_truncated_basis_adds_what_lies_outside() -> None:
    """With R < D columns the part outside the span still counts."""
    full = compute_basis(matrix())
    short = Basis(full.vectors[:, :8].contiguous(), full.values[:8], None, full.rows)
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(residuals(x, short, [2, 8]), residuals(x, full, [2, 8]), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 100.0))
def test_residuals_fall_with_rank_and_scale_with_the_vector(seed: int, factor: float) -> None:
    """0 <= SPS_r+1 <= SPS_r <= ||x||, and SPS(a x) = a SPS(x)."""
    basis = compute_basis(matrix(60, 12, seed=seed % 17))
    x = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    values = residuals(x, basis, list(range(13)))
    assert float(values[0]) == pytest.approx(float(x.norm()), rel=1e-5)
    assert float(values[-1]) == 0.0
    assert bool((values[1:] <= values[:-1]).all())
    torch.testing.assert_close(residuals(x * factor, basis, [5]), values[5:6] * factor, rtol=1e-4, atol=1e-5)


def test_huge_dimensions_do_not_drown_small_residuals() -> None:
    """An attention sink (one coordinate of 1e4) inside the span leaves a small residual outside it exact to 1e-3."""
    basis = Basis(torch.eye(4), torch.ones(4, dtype=torch.float64), None, 4)
    assert float(residuals(torch.tensor([1e4, 0.0, 0.0, 1e-2]), basis, [2])) == pytest.approx(1e-2, rel=1e-5)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.zeros(5, 3), "all zero"),
        (torch.tensor([[1.0, math.nan], [0.0, 1.0]]), "non-finite"),
        (torch.zeros(3), "2-D"),
        (torch.empty(5, 3, device="meta"), "with data"),
    ],
)
def test_placeholders_are_refused(bad: torch.Tensor, words: str) -> None:
    """A weight that was never loaded is not decomposed."""
    with pytest.raises(ValueError, match=words):
        compute_basis(bad)


def test_orthonormality_is_checked() -> None:
    """A damaged basis is refused."""
    good = compute_basis(matrix())
    check_orthonormal(good)
    broken = good.vectors.clone()
    broken[3, 2] += 0.01
    with pytest.raises(ValueError, match="orthonormal"):
        check_orthonormal(Basis(broken, good.values, None, good.rows))
    with pytest.raises(ValueError, match="energy"):
        good.rank(0.0)
