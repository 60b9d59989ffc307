"""xcompress/engines/sampling.py and derive_seed: exact distributions, independence of neighbours, stable values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import RepetitionPenaltyLogitsProcessor

from xcompress.engines import sampling
from xcompress.engines.base import Draw, derive_seed
from xcompress.engines.sampling import choose, penalise, uniforms

Floats = npt.NDArray[np.float64]
quick = settings(max_examples=100, deadline=None, database=None, derandomize=True)
pytestmark = pytest.mark.usefixtures("one_thread")


def nucleus(logits: Sequence[float], temperature: float, top_p: float) -> Floats:
    """Exact probabilities: tokens by falling probability until their sum reaches ``top_p``, then rescaled."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    kept, mass = np.zeros_like(probabilities), 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        kept[token] = probabilities[token]
        mass += probabilities[token]
        if mass >= top_p:
            break
    return kept / kept.sum()


def draw_many(logits: Sequence[float], draw: Draw, uniform: Floats) -> npt.NDArray[np.int64]:
    """One draw for each number in ``uniform``, all in one batch."""
    rows = torch.tensor(logits, dtype=torch.float32).expand(len(uniform), -1)
    return choose(rows, [draw] * len(uniform), torch.from_numpy(uniform)).numpy()


LOGITS = [2.0, -1.0, 0.5, 1.7, 0.0, -3.0, 1.1, 0.4]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.0, 0.8), (0.7, 0.9), (2.0, 0.95), (0.3, 0.5)])
def test_distribution(temperature: float, top_p: float) -> None:
    """20,000 draws with derived seeds follow the exact nucleus probabilities (chi-square), and nothing outside is drawn."""
    draws = [Draw(temperature, top_p, derive_seed(7, question, 1, 1)) for question in range(20_000)]
    uniform = np.array([uniforms(draw, 1)[0] for draw in draws])
    counts = np.bincount(draw_many(LOGITS, draws[0], uniform), minlength=len(LOGITS))
    expected = nucleus(LOGITS, temperature, top_p)
    inside = expected > 0
    assert counts[~inside].sum() == 0
    if inside.sum() > 1:
        assert stats.chisquare(counts[inside], expected[inside] * counts.sum()).pvalue > 1e-3


def test_no_cut_is_the_plain_softmax() -> None:
    """top_p = 1: the share of an even grid of numbers that each token gets is its softmax probability."""
    grid = (np.arange(100_000) + 0.5) / 100_000
    shares = np.bincount(draw_many(LOGITS, Draw(1.0, 1.0), grid), minlength=len(LOGITS)) / len(grid)
    np.testing.assert_allclose(shares, torch.tensor(LOGITS).double().softmax(-1).numpy(), atol=2e-5)


@quick
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True),
    st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    st.floats(0.01, 1.0),
)
def test_kept_set_is_minimal_and_shares_are_exact(values: list[int], temperature: float, top_p: float) -> None:
    """The numbers from 0 to 1 are divided among exactly the tokens of the smallest set that reaches top_p."""
    logits = [value / 8 for value in values]
    grid = (np.arange(4_000) + 0.5) / 4_000
    shares = np.bincount(draw_many(logits, Draw(temperature, top_p), grid), minlength=len(logits)) / len(grid)
    full = np.sort(nucleus(logits, temperature, 1.0))[::-1].cumsum()
    if np.abs(full[:-1] - top_p).min(initial=1.0) < 1e-6:
        return  # whether the sum reaches top_p is then a matter of rounding
    np.testing.assert_allclose(shares, nucleus(logits, temperature, top_p), atol=1e-3)


def test_ends_of_the_unit_interval() -> None:
    """0 gives the first token (by id) inside, the largest number below 1 the last one; impossible tokens are never drawn."""
    ends = np.array([0.0, np.nextafter(1.0, 0.0)])
    assert draw_many(LOGITS, Draw(1.0, 1.0), ends).tolist() == [0, len(LOGITS) - 1]
    assert draw_many([1.0, -np.inf, 0.0, -np.inf], Draw(1.0, 1.0), ends).tolist() == [0, 2]
    assert draw_many([-np.inf, 0.0, 2.0, -9.0], Draw(1.0, 0.99), ends).tolist() == [1, 2]


def test_near_ties_leave_other_boundaries_where_they_are() -> None:
    """Two nearly equal tokens that change rank under rounding: every draw but those next to their own boundary is the same."""
    one, other = [1.0, 2.0, 2.0 + 1e-6, 0.5, 1.5], [1.0, 2.0 + 1e-6, 2.0, 0.5, 1.5]
    grid = (np.arange(4_000) + 0.5) / 4_000
    assert (draw_many(one, Draw(1.0, 0.95), grid) != draw_many(other, Draw(1.0, 0.95), grid)).sum() <= 1


def test_greedy() -> None:
    """Temperature 0 is the arg-max whatever the other values; a tiny top_p leaves only the arg-max."""
    uniform = np.random.default_rng(0).random(200)
    assert set(draw_many(LOGITS, Draw(0.0, 0.3, 5), uniform)) == {0}
    assert set(draw_many(LOGITS, Draw(5.0, 1e-9), uniform)) == {0}
    assert set(draw_many(LOGITS, Draw(0.01, 1.0), uniform)) == {0}


def test_temperature_flattens() -> None:
    """The share of the likeliest token falls as the temperature rises."""
    grid = (np.arange(2_000) + 0.5) / 2_000
    shares = [(draw_many(LOGITS, Draw(t, 1.0), grid) == 0).mean() for t in (0.2, 0.5, 1.0, 2.0, 10.0)]
    assert all(left > right + 0.02 for left, right in pairwise(shares))


def test_large_nucleus_is_sorted_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose nucleus exceeds the shortcut, mixed with rows whose nucleus does not, get what a full sort gives."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 3_000, generator=generator)
    logits[::2] *= 8  # peaked rows
    draws = [Draw(1.0, (0.9, 1.0, 0.97)[row % 3]) for row in range(60)]
    uniform = torch.rand(60, generator=generator, dtype=torch.float64)
    got = choose(logits, draws, uniform)
    ranks = (logits > logits.gather(1, got[:, None])).sum(-1)
    assert int(ranks.max()) > sampling._NUCLEUS > int(ranks.min())
    monkeypatch.setattr(sampling, "_NUCLEUS", 3_000)
    assert choose(logits, draws, uniform).tolist() == got.tolist()
    for row, draw in enumerate(draws):
        expected = nucleus(logits[row].tolist(), draw.temperature, draw.top_p)
        edges = np.concatenate([[0.0], expected.cumsum()])  # in the order of ids
        at = int(got[row])
        assert edges[at] - 1e-6 <= float(uniform[row]) <= edges[at + 1] + 1e-6


def test_rows_are_independent() -> None:
    """A row's token is the same alone, in a batch, in another order, and beside other kinds of rows."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 700, generator=generator) * 2
    kinds = [Draw(), Draw(1.0, 1.0), Draw(0.7, 0.9), Draw(1.3, 0.95)]
    draws = [kinds[row % 4] for row in range(12)]
    uniform = torch.rand(12, generator=generator, dtype=torch.float64)
    together = choose(logits, draws, uniform).tolist()
    assert [int(choose(logits[r : r + 1], [draws[r]], uniform[r : r + 1])) for r in range(12)] == together
    order = torch.randperm(12, generator=generator)
    assert choose(logits[order], [draws[r] for r in order.tolist()], uniform[order]).tolist() == [
        together[r] for r in order.tolist()
    ]


def test_uniforms_belong_to_the_seed() -> None:
    """Stable values in [0, 1); more of them begin with the same ones; temperature and top_p play no part."""
    values = uniforms(Draw(1.0, 1.0, 42), 1_000)
    assert values[:3].tolist() == [0.08607763073528474, 0.14155732377913233, 0.27009303504774695]
    assert values.min() >= 0 and values.max() < 1
    np.testing.assert_array_equal(uniforms(Draw(0.3, 0.5, 42), 10), values[:10])
    assert not np.isin(uniforms(Draw(1.0, 1.0, 43), 1_000), values).any()


def test_derive_seed() -> None:
    """A pinned value (old runs stay repeatable), 63 bits, no collisions over a grid, parts are kept apart."""
    assert derive_seed(0, "5a8b57f25542995d1e6f1371", 1, 2) == 3350322823139962222
    grid = [(seed, f"q{question}", k, r) for seed in range(4) for question in range(300) for k in range(6) for r in range(4)]
    seeds = {derive_seed(*parts) for parts in grid}
    assert len(seeds) == len(grid)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert derive_seed(0, "1", 23) != derive_seed(0, "12", 3) != derive_seed(0, "123") != derive_seed(1, "23")
    assert derive_seed(0, "a", 1) == derive_seed(0, "a", "1")


def test_penalty_is_that_of_transformers() -> None:
    """Each row has its own penalty; a neutral row is untouched to the bit."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 30, generator=generator)
    ids = torch.randint(0, 30, (4, 12), generator=generator)
    seen = torch.zeros(4, 30, dtype=torch.bool).scatter_(1, ids, True)
    penalties = [1.0, 1.1, 1.5, 0.8]
    got = penalise(logits, seen, torch.tensor(penalties))
    for row, penalty in enumerate(penalties):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids[row : row + 1], logits[row : row + 1].clone())
        torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-6, atol=0)
    assert torch.equal(got[0], logits[0])
