"""analysis/stats.py against scipy, statsmodels, scikit-learn, plain loops, enumeration and closed forms."""

from __future__ import annotations

import gc
import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from sklearn.preprocessing import KBinsDiscretizer
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import zt_ind_solve_power

from analysis import stats
from analysis.stats import Estimate

Floats = npt.NDArray[np.float64]

quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def _cheap_garbage_collection() -> Iterator[None]:
    """statsmodels' multipletests collects garbage at each call, which is slow with many imported libraries."""
    gc.freeze()
    yield
    gc.unfreeze()


def make_pools(seed: int, groups: int = 60, size: int = 6, within: float = 0.4) -> tuple[Floats, Floats, Any]:
    """Candidates of questions: the group means agree perfectly, the rest correlates with `within`."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(groups), size)
    shared = generator.normal(size=groups)[labels]
    noise = generator.multivariate_normal([0, 0], [[1, within], [within, 1]], size=groups * size)
    return shared + noise[:, 0], shared + noise[:, 1], labels


X, Y, LABELS = make_pools(0)
CONTROL = X + np.random.default_rng(5).normal(size=X.size)
RANDOM_FUNCTIONS: dict[str, Callable[[int], object]] = {
    "bootstrap_mean": lambda seed: stats.bootstrap_mean(X, seed=seed, resamples=300),
    "paired_bootstrap": lambda seed: stats.paired_bootstrap(X, Y, seed=seed, resamples=300),
    "bootstrap_table": lambda seed: stats.bootstrap_table(np.stack([X, Y], axis=1), seed=seed, resamples=300),
    "paired_permutation": lambda seed: stats.paired_permutation(X, Y, seed=seed, permutations=1_000),
    "clustered_pearson": lambda seed: stats.clustered_pearson(X, Y, LABELS, seed=seed, resamples=300),
    "within_group_pearson": lambda seed: stats.within_group_pearson(X, Y, LABELS, seed=seed, resamples=300),
    "binned_pearson": lambda seed: stats.binned_pearson(X, Y, LABELS, seed=seed, resamples=300),
    "partial_pearson": lambda seed: stats.partial_pearson(X, Y, CONTROL, LABELS, seed=seed, resamples=300),
}


@pytest.mark.parametrize("name", RANDOM_FUNCTIONS)
def test_seed_decides_the_result_and_nothing_else_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = RANDOM_FUNCTIONS[name]
    np.random.seed(1)  # noqa: NPY002 - the global state must neither be read nor advanced
    state = repr(np.random.get_state())  # noqa: NPY002
    first = call(3)
    assert call(3) == first
    assert call(4) != first
    assert repr(np.random.get_state()) == state  # noqa: NPY002
    monkeypatch.setattr(stats, "CHUNK_CELLS", 2_000)
    again = call(3)  # the chunk size is about memory only (up to the order of sums in correlations)
    if isinstance(first, Estimate) and isinstance(again, Estimate):
        assert [again.low, again.high] == pytest.approx([first.low, first.high], abs=1e-12)
    else:
        assert again == first
    with pytest.raises(TypeError):
        call(None)  # type: ignore[arg-type]


# Bootstrap of means


def test_bootstrap_mean_agrees_with_a_plain_loop_over_the_same_draws() -> None:
    values = np.random.default_rng(0).gamma(1.0, size=23)
    generator = np.random.default_rng(9)
    means = [values[generator.integers(0, 23, size=23)].mean() for _ in range(500)]
    estimate = stats.bootstrap_mean(values, seed=9, level=0.9, resamples=500)
    assert estimate.n == 23
    assert estimate.value == pytest.approx(values.mean(), rel=1e-12)
    assert [estimate.low, estimate.high] == pytest.approx(list(np.percentile(means, [5, 95])), rel=1e-12)


def test_bootstrap_mean_agrees_with_scipy_up_to_sampling() -> None:
    values = np.random.default_rng(1).gamma(1.0, size=80)
    reference = scipy_stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=1)
    estimate = stats.bootstrap_mean(values, seed=2, resamples=20_000)
    tolerance = 0.1 * float(reference.standard_error)
    assert estimate.low == pytest.approx(reference.confidence_interval.low, abs=tolerance)
    assert estimate.high == pytest.approx(reference.confidence_interval.high, abs=tolerance)


def test_paired_bootstrap_agrees_with_scipy_paired() -> None:
    reference = scipy_stats.bootstrap(
        (X, Y), lambda a, b, axis: np.mean(a - b, axis=axis), paired=True, method="percentile", n_resamples=5_000, rng=1
    )
    estimate = stats.paired_bootstrap(X, Y, seed=2)
    assert estimate.value == pytest.approx(np.mean(X) - np.mean(Y), rel=1e-9)
    assert estimate.low == pytest.approx(reference.confidence_interval.low, abs=0.1 * float(reference.standard_error))
    assert estimate.high == pytest.approx(reference.confidence_interval.high, abs=0.1 * float(reference.standard_error))
    apart = stats.bootstrap_mean(X, seed=2)
    assert apart.high is not None and apart.low is not None and estimate.high is not None and estimate.low is not None
    assert estimate.high - estimate.low < apart.high - apart.low, "pairing removes what the sides share"


def test_bootstrap_table_is_bootstrap_mean_of_each_column_to_the_bit() -> None:
    matrix = np.random.default_rng(0).normal(size=(157, 5))
    means = stats.bootstrap_table(matrix, seed=8, resamples=700)
    assert means == [stats.bootstrap_mean(matrix[:, j], seed=8, resamples=700) for j in range(5)]
    against = stats.bootstrap_table(matrix, seed=8, resamples=700, reference=2)
    for j in (0, 1, 3, 4):
        assert against[j] == stats.paired_bootstrap(matrix[:, j], matrix[:, 2], seed=8, resamples=700)
    assert against[2].value is None and "reference" in against[2].reason


def test_bootstrap_of_few_questions() -> None:
    assert stats.bootstrap_mean([], seed=0) == Estimate(None, None, None, 0, "n = 0, at least 1 needed")
    one = stats.bootstrap_mean([40.0], seed=0)
    assert (one.value, one.low, one.high, one.n) == (40.0, None, None, 1) and "at least 2" in one.reason
    assert stats.bootstrap_mean([0.0, 100.0], seed=0) == Estimate(50.0, 0.0, 100.0, 2)
    assert stats.bootstrap_mean(np.zeros(20), seed=0) == Estimate(0.0, 0.0, 0.0, 20)
    assert [e.value for e in stats.bootstrap_table(np.empty((0, 3)), seed=0)] == [None] * 3


def test_interval_can_exclude_zero_where_the_exact_test_does_not() -> None:
    a, b = np.zeros(1_000), np.zeros(1_000)
    a[:4] = 1
    estimate = stats.paired_bootstrap(100 * a, 100 * b, seed=0)
    p_value = stats.mcnemar_exact(a, b)
    assert estimate.low is not None and estimate.low > 0
    assert p_value == 0.125
    assert stats.verdict(estimate, 1.0, None)[0] == "REPRODUCED"
    assert stats.verdict(estimate, 1.0, None, p_value=p_value)[0] == "INCONCLUSIVE"


def test_bootstrap_memory_does_not_grow_with_questions_times_resamples() -> None:
    values = np.random.default_rng(0).normal(size=10_000)
    tracemalloc.start()
    stats.bootstrap_mean(values, seed=0, resamples=1_000)  # in one piece: 80 MB per array
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.bootstrap_mean([1.0, math.nan], seed=0),
        lambda: stats.bootstrap_mean([1.0, math.inf], seed=0),
        lambda: stats.bootstrap_mean([[1.0], [2.0]], seed=0),
        lambda: stats.bootstrap_mean([1.0, 2.0], seed=0, level=95),
        lambda: stats.bootstrap_mean([1.0, 2.0], seed=0, resamples=0),
        lambda: stats.bootstrap_table(np.ones((3, 2)), seed=0, reference=2),
        lambda: stats.bootstrap_table(np.ones((3, 2)), seed=0, reference=-1),
        lambda: stats.paired_bootstrap([1.0, math.nan], [0.0, 0.0], seed=0),
        lambda: stats.paired_bootstrap([1.0, 2.0], [0.0], seed=0),
        lambda: stats.paired_permutation([1.0, 2.0], [0.0, math.nan], seed=0),
        lambda: stats.paired_permutation([1.0], [0.0], seed=0, permutations=0),
        lambda: stats.mcnemar_exact([0, 100], [0, 0]),
        lambda: stats.mcnemar_exact([0.5, 0.5], [0.5, 0.5]),
        lambda: stats.mcnemar_exact([0, 1], [0]),
        lambda: stats.holm([0.1, math.nan]),
        lambda: stats.holm([1.1]),
        lambda: stats.minimum_detectable_difference([1.0, 2.0], power=80),
        lambda: stats.drop_incomplete(),
        lambda: stats.drop_incomplete([1.0], [1.0, 2.0]),
        lambda: stats.pearson([1.0, 2.0, 3.0], [1.0, 2.0]),
        lambda: stats.pearson([1.0, 2.0, math.inf], [1.0, 2.0, 4.0]),
        lambda: stats.clustered_pearson(X, Y, LABELS[:-1], seed=0),
        lambda: stats.binned_pearson(X, Y, seed=0, bins=2),
        lambda: stats.verdict(Estimate(1, 0, 2, 9), math.nan, None),
        lambda: stats.expected_best_of_k([1.0], [1.0], 2),
        lambda: stats.expected_best_of_k([1.0], [1.0], 0),
        lambda: stats.expected_best_of_k([], [], 1),
        lambda: stats.expected_best_of_k([1.0, 2.0], [1.0], 1),
        lambda: stats.expected_best_of_k([1.0, 2.0], [1.0, math.nan], 1),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        call()


def test_drop_incomplete() -> None:
    table = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, 6.0], [7.0, 8.0]])
    (kept, scores, labels), dropped = stats.drop_incomplete(table, [1.0, 2.0, np.nan, 4.0], ["a", "b", "c", "d"])
    assert dropped == 2
    assert kept.tolist() == [[1.0, 2.0], [7.0, 8.0]] and scores.tolist() == [1.0, 4.0] and labels.tolist() == ["a", "d"]
    assert stats.drop_incomplete([])[1] == 0


# Tests


@quick
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=80))
def test_mcnemar_agrees_with_statsmodels(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs).T
    table = [[np.sum((a == i) & (b == j)) for j in (1, 0)] for i in (1, 0)]
    expected = mcnemar(table, exact=True).pvalue if (a != b).any() else 1.0
    assert stats.mcnemar_exact(a, b) == pytest.approx(expected, rel=1e-9)
    assert stats.mcnemar_exact(b, a) == stats.mcnemar_exact(a, b)


def test_mcnemar_edges() -> None:
    assert stats.mcnemar_exact([], []) is None
    assert stats.mcnemar_exact([1, 0], [1, 0]) == 1.0
    assert stats.mcnemar_exact([1] * 6, [0] * 6) == pytest.approx(2 / 64)


@quick
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_permutation_agrees_with_enumeration_also_on_ties_of_fractions(numerators: list[int]) -> None:
    observed = abs(sum(numerators))
    patterns = list(itertools.product((-1, 1), repeat=len(numerators)))
    hits = sum(abs(sum(s * v for s, v in zip(signs, numerators, strict=True))) >= observed for signs in patterns)
    a = np.array(numerators) * 100 / 7  # sums of sevenths tie in theory, not in floating point
    assert stats.paired_permutation(a, np.zeros(a.size), seed=0) == hits / len(patterns)


def test_permutation_agrees_with_scipy() -> None:
    generator = np.random.default_rng(3)
    for n, permutations in ((14, 10_000), (60, 40_000)):
        differences = generator.normal(0.3, 1, size=n)
        reference = scipy_stats.permutation_test(
            (differences,),
            lambda sample, axis: sample.mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=2**14 if n == 14 else permutations,
            rng=1,
        ).pvalue
        p = stats.paired_permutation(differences, np.zeros(n), seed=0, permutations=permutations)
        assert p == pytest.approx(reference, abs=1e-12 if n == 14 else 0.01)


def test_permutation_edges() -> None:
    assert stats.paired_permutation([], [], seed=0) is None
    assert stats.paired_permutation([5.0], [1.0], seed=0) == 1.0
    assert stats.paired_permutation(np.ones(30), np.ones(30), seed=0) == 1.0
    assert stats.paired_permutation(np.ones(40), np.zeros(40), seed=0, permutations=999) == 1 / 1000, "never 0"
    padded = [np.r_[X[:8], np.zeros(500)], np.r_[Y[:8], np.zeros(500)]]
    assert stats.paired_permutation(*padded, seed=0) == stats.paired_permutation(X[:8], Y[:8], seed=1)


def test_permutation_p_values_are_uniform_without_a_difference() -> None:
    generator = np.random.default_rng(0)
    p_values = [stats.paired_permutation(*generator.normal(size=(2, 25)), seed=i, permutations=199) for i in range(1_000)]
    assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(0.05, abs=0.02)


@quick
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12), st.randoms(use_true_random=False))
def test_holm_agrees_with_the_definition_and_with_statsmodels(p_values: list[float | None], shuffler: Any) -> None:
    adjusted = stats.holm(p_values)
    assert [p is None for p in adjusted] == [p is None for p in p_values]
    ranked = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    running = 0.0
    for rank, (p, i) in enumerate(ranked):
        running = max(running, min(1.0, (len(ranked) - rank) * p))
        assert adjusted[i] == pytest.approx(running, rel=1e-12)
    if ranked:
        defined = [p for p in p_values if p is not None]
        reference = multipletests(defined, method="holm")[1]
        assert [p for p in adjusted if p is not None] == pytest.approx(list(reference))
    order = list(range(len(p_values)))
    shuffler.shuffle(order)
    assert stats.holm([p_values[i] for i in order]) == [adjusted[i] for i in order]


def test_minimum_detectable_difference_agrees_with_statsmodels() -> None:
    differences = np.random.default_rng(0).normal(1, 30, size=200)
    effect = zt_ind_solve_power(nobs1=200, alpha=0.05, power=0.8, ratio=0)
    sd = differences.std(ddof=1)
    assert stats.minimum_detectable_difference(differences) == pytest.approx(effect * sd, rel=1e-4)
    assert stats.minimum_detectable_difference(differences, level=0.9, power=0.5) == pytest.approx(
        1.6448536 * sd / math.sqrt(200), rel=1e-6
    )
    for undefined in ([], [3.0], [0.0] * 50, [0.1] * 50):
        assert stats.minimum_detectable_difference(undefined) is None


def test_minimum_detectable_difference_is_detected_with_its_power() -> None:
    generator = np.random.default_rng(0)
    differences = generator.normal(size=100)
    differences = (differences - differences.mean()) / differences.std(ddof=1)
    detectable = stats.minimum_detectable_difference(differences)
    assert detectable is not None
    samples = generator.normal(detectable, 1, size=(4_000, 100))
    assert np.mean(scipy_stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.03)


# Correlations


def test_pearson_agrees_with_scipy() -> None:
    x, y = X.copy(), Y.copy()
    x[3], y[5], y[3] = np.nan, np.nan, np.nan
    complete = ~np.isnan(x) & ~np.isnan(y)
    reference = scipy_stats.pearsonr(x[complete], y[complete])
    low, high = reference.confidence_interval(0.9)
    assert stats.pearson(x, y, level=0.9) == Estimate(reference.statistic, low, high, X.size - 2, "", 2)


def test_pearson_edges() -> None:
    for n in (0, 1, 2):
        assert stats.pearson([1.0, 2.0][:n], [1.0, 3.0][:n]) == Estimate(None, None, None, n, f"n = {n}, at least 3 needed")
    three = stats.pearson([1.0, 2.0, 3.0, 9.0], [1.0, 3.0, 2.0, np.nan])
    assert three.value == pytest.approx(0.5)
    assert (three.low, three.high, three.n, three.dropped) == (None, None, 3, 1)
    assert "at least 4" in three.reason
    assert stats.pearson([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]).reason == "y is constant (all 0)"
    exact = stats.pearson(np.arange(9.0), -np.arange(9.0))
    assert [exact.value, exact.low, exact.high] == pytest.approx([-1, -1, -1])
    assert stats.pearson([0.1 + 0.2, 0.3, 0.3], [0.0, 1.0, 0.0]).value is None, "rounding is not variation"


def loop_bootstrap(statistic: Callable[[Any], float], groups: Any, seed: int, resamples: int) -> list[float]:
    """The slow way: gather the rows of the drawn groups and start from scratch."""
    generator, names = np.random.default_rng(seed), np.unique(groups)
    rows = [np.flatnonzero(groups == name) for name in names]
    samples = [
        statistic(np.concatenate([rows[g] for g in generator.integers(0, names.size, size=names.size)]))
        for _ in range(resamples)
    ]
    return [float(bound) for bound in np.percentile(samples, [2.5, 97.5])]


def center(values: Floats, groups: Any) -> Floats:
    return np.array([v - values[groups == g].mean() for v, g in zip(values, groups, strict=True)])


def ols_residuals(values: Floats, control: Floats) -> Floats:
    return np.asarray(sm.OLS(values, sm.add_constant(control)).fit().resid)


def check(estimate: Estimate, value: float, bounds: list[float], n: int, groups: int) -> None:
    assert estimate.reason == ""
    assert estimate.value == pytest.approx(value, abs=1e-9)
    assert [estimate.low, estimate.high] == pytest.approx(bounds, abs=1e-9)
    assert (estimate.n, estimate.groups) == (n, groups)


def corr(a: Floats, b: Floats) -> float:
    return float(np.corrcoef(a, b)[0, 1])


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_clustered_pearson_agrees_with_a_plain_loop(shift: float) -> None:
    rows = np.random.default_rng(1).permutation(X.size)[:200]  # groups of unequal size, in no order
    x, y, labels = X[rows] + shift, Y[rows] - shift, LABELS[rows].astype(str)
    bounds = loop_bootstrap(lambda i: corr(x[i], y[i]), labels, seed=4, resamples=200)
    estimate = stats.clustered_pearson(x, y, labels, seed=4, resamples=200)
    check(estimate, corr(x, y), bounds, 200, np.unique(labels).size)


def test_within_group_pearson_agrees_with_a_plain_loop() -> None:
    x, y = X.copy(), Y.copy()
    x[LABELS == 7], y[LABELS == 11] = 0.1, 100.0
    y[0] = np.nan
    used = (LABELS != 7) & (LABELS != 11) & ~np.isnan(y)
    labels = LABELS[used]
    a, b = center(x[used], labels), center(y[used], labels)
    bounds = loop_bootstrap(lambda i: corr(a[i], b[i]), labels, seed=4, resamples=200)
    estimate = stats.within_group_pearson(x, y, LABELS, seed=4, resamples=200)
    check(estimate, float(np.sum(a * b) / math.sqrt(np.sum(a**2) * np.sum(b**2))), bounds, int(used.sum()), 58)
    assert (estimate.dropped, estimate.groups_left_out) == (1, 2)
    dummies = (labels[:, None] == np.unique(labels)).astype(float)  # the same by regression on group dummies
    a, b = (np.asarray(sm.OLS(v[used], dummies).fit().resid) for v in (x, y))
    assert estimate.value == pytest.approx(corr(a, b), abs=1e-9)


def test_within_group_pearson_edges() -> None:
    assert stats.within_group_pearson([], [], [], seed=0).value is None
    constant = stats.within_group_pearson(X, np.zeros(X.size), LABELS, seed=0)
    assert (constant.value, constant.n, constant.groups_left_out) == (None, 0, 60)
    singles = stats.within_group_pearson(X, Y, np.arange(X.size), seed=0)
    assert singles.value is None and singles.groups_left_out == X.size
    two_rows = stats.within_group_pearson([1.0, 2.0], [1.0, 5.0], [0, 0], seed=0)
    assert two_rows.value is None and "2 rows in 1 groups" in two_rows.reason
    one_group = stats.within_group_pearson([1.0, 2.0, 3.0], [1.0, 5.0, 4.0], [0, 0, 0], seed=0)
    assert one_group.value == pytest.approx(corr(np.array([1.0, 2, 3]), np.array([1.0, 5, 4])))
    assert one_group.low is None and "1 group" in one_group.reason
    across = np.repeat([0.0, 50.0], 3)  # opposite signs within and across groups
    x = np.tile([1.0, 2.0, 3.0], 2)
    assert stats.within_group_pearson(x + across, across - x, [0, 0, 0, 1, 1, 1], seed=0).value == pytest.approx(-1)


@pytest.mark.parametrize("with_groups", [True, False])
def test_binned_pearson_agrees_with_a_plain_loop(with_groups: bool) -> None:
    edges = np.percentile(X, [10, 20, 30, 40, 50, 60, 70, 80, 90])
    bins = np.array([sum(v > edge for edge in edges) for v in X])
    assert bins.tolist() == (
        KBinsDiscretizer(10, encode="ordinal", strategy="quantile", quantile_method="linear")
        .fit_transform(X[:, None]).ravel().astype(int).tolist()
    )  # fmt: skip

    def of_bins(rows: Any) -> float:
        chosen = [rows[bins[rows] == b] for b in range(10)]
        means = np.array([[X[c].mean(), Y[c].mean()] for c in chosen if c.size])
        return corr(means[:, 0], means[:, 1])

    labels = LABELS if with_groups else np.arange(X.size)
    bounds = loop_bootstrap(of_bins, labels, seed=4, resamples=100)
    estimate = stats.binned_pearson(X, Y, LABELS if with_groups else None, seed=4, resamples=100)
    check(estimate, of_bins(np.arange(X.size)), bounds, X.size, np.unique(labels).size)


def test_binned_pearson_edges() -> None:
    two_values = stats.binned_pearson(np.tile([0.0, 1.0], 20), np.arange(40.0), seed=0)
    assert two_values.value is None and "fills 2 bins" in two_values.reason
    flat = stats.binned_pearson(np.repeat(np.arange(10.0), 2), np.tile([0.0, 1.0], 10), seed=0)
    assert flat.value is None and flat.reason
    on_edges, y = np.arange(11.0), np.random.default_rng(0).normal(size=11)  # edges 1, 2, ... 9: bins {0, 1}, {2}, ...
    expected = corr(np.r_[0.5, on_edges[2:]], np.r_[y[:2].mean(), y[2:]])
    assert stats.binned_pearson(on_edges, y, seed=0, resamples=50).value == pytest.approx(expected, abs=1e-9)
    three = stats.binned_pearson(on_edges[:9], y[:9], np.repeat([0, 1, 2], 3), seed=0, bins=3, resamples=900)
    undefined = int(three.reason.split("undefined in ")[1].split()[0])  # unless all three groups are drawn: 1 - 6 / 27
    assert undefined / 900 == pytest.approx(21 / 27, abs=0.06) and three.low is None
    many_ties = stats.binned_pearson(np.r_[np.zeros(60), np.arange(1.0, 41.0)], np.arange(100.0), seed=0)
    assert many_ties.value is not None, "empty bins are skipped"
    assert stats.binned_pearson([], [], seed=0).reason == "n = 0, at least 3 needed"
    weak = X + 4 * np.random.default_rng(0).normal(size=X.size)
    rows, binned = stats.pearson(X, weak).value, stats.binned_pearson(X, weak, seed=0).value
    assert rows is not None and binned is not None and binned > rows + 0.3, "bin means hide the noise of rows"


@pytest.mark.parametrize("with_groups", [True, False])
def test_partial_pearson_agrees_with_a_plain_loop(with_groups: bool) -> None:
    def of_rows(i: Any) -> float:
        return corr(ols_residuals(X[i], CONTROL[i]), ols_residuals(Y[i], CONTROL[i]))

    labels = LABELS if with_groups else np.arange(X.size)
    bounds = loop_bootstrap(of_rows, labels, seed=4, resamples=60)
    estimate = stats.partial_pearson(X, Y, CONTROL, LABELS if with_groups else None, seed=4, resamples=60)
    check(estimate, of_rows(np.arange(X.size)), bounds, X.size, np.unique(labels).size)
    xy, xc, yc = corr(X, Y), corr(X, CONTROL), corr(Y, CONTROL)
    assert estimate.value == pytest.approx((xy - xc * yc) / math.sqrt((1 - xc**2) * (1 - yc**2)), abs=1e-9)


def test_partial_pearson_edges() -> None:
    assert "at least 4" in stats.partial_pearson([1.0, 2, 3], [1.0, 3, 2], [1.0, 2, 4], seed=0).reason
    assert stats.partial_pearson(X, Y, np.full(X.size, 5.0), seed=0).reason == "control is constant (all 5)"
    linear = stats.partial_pearson(3 * CONTROL + 1, Y, CONTROL, LABELS, seed=0)
    assert linear.value is None and linear.reason
    missing = CONTROL.copy()
    missing[[4, 9]] = np.nan
    assert stats.partial_pearson(X, Y, missing, LABELS, seed=0, resamples=50).dropped == 2


def test_interval_is_withheld_when_many_resamples_are_undefined() -> None:
    rare = np.zeros(90)
    rare[0] = 1.0  # a resample without the first question has a constant side
    estimate = stats.clustered_pearson(np.arange(90.0), rare, np.repeat(np.arange(30), 3), seed=0, resamples=500)
    assert estimate.value is not None and estimate.low is None and estimate.high is None
    assert "undefined in" in estimate.reason and "of 500 resamples" in estimate.reason
    one = stats.clustered_pearson([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [0, 0, 0], seed=0)
    assert one.value == pytest.approx(0.5) and one.low is None and "1 group" in one.reason


CORRELATIONS: dict[str, Callable[[Floats, Floats, Any], Estimate]] = {
    "pearson": lambda x, y, g: stats.pearson(x, y),
    "clustered": lambda x, y, g: stats.clustered_pearson(x, y, g, seed=0, resamples=20),
    "within": lambda x, y, g: stats.within_group_pearson(x, y, g, seed=0, resamples=20),
    "binned": lambda x, y, g: stats.binned_pearson(x, y, g, seed=0, resamples=20),
    "partial": lambda x, y, g: stats.partial_pearson(x, y, x + np.cos(7 * y), g, seed=0, resamples=20),
}


@pytest.mark.parametrize("name", CORRELATIONS)
@quick
@given(seed=st.integers(0, 1_000), size=st.integers(1, 40), levels=st.sampled_from([2, 3, 1_000]), missing=st.booleans())
def test_correlations_never_give_nan_and_ignore_row_order(name: str, seed: int, size: int, levels: int, missing: bool) -> None:
    generator = np.random.default_rng(seed)
    x, y = generator.integers(0, levels, size=(2, size)) / 10
    groups = generator.integers(0, 8, size=size)
    if missing:
        x[generator.integers(0, size)] = np.nan
    estimate = CORRELATIONS[name](x, y, groups)
    if estimate.value is None:
        assert estimate.reason and estimate.low is None and estimate.high is None
    else:
        assert -1 <= estimate.value <= 1
        if estimate.low is None or estimate.high is None:
            assert estimate.low is None and estimate.high is None and estimate.reason
        else:
            assert -1 <= estimate.low <= estimate.high <= 1 and not estimate.reason
    assert estimate.dropped == int(missing)
    order = generator.permutation(size)
    shuffled = CORRELATIONS[name](x[order], y[order], groups[order])
    assert shuffled.n == estimate.n
    assert shuffled.value == pytest.approx(estimate.value, abs=1e-7)


# Verdicts


@pytest.mark.parametrize(
    ("difference", "paper", "p_value", "expected", "said"),
    [
        (Estimate(2.0, 0.5, 3.5, 400), 1.2, None, "REPRODUCED", "+2.00 [+0.50, +3.50] percentage points"),
        (Estimate(-2.0, -3.5, -0.5, 400), -1.2, None, "REPRODUCED", "(n = 400, paper -1.20): the interval excludes 0"),
        (Estimate(-2.0, -3.5, -0.5, 400), 1.2, None, "CONTRADICTED", "opposite"),
        (Estimate(2.0, 0.5, 3.5, 400), -1.2, None, "CONTRADICTED", "opposite"),
        (Estimate(1.0, -0.5, 2.5, 400), 1.2, None, "INCONCLUSIVE", "detectable difference: 2.10 percentage points"),
        (Estimate(1.0, 0.0, 2.5, 400), 1.2, None, "INCONCLUSIVE", "includes 0"),
        (Estimate(2.0, 0.5, 3.5, 400), 0.0, None, "INCONCLUSIVE", "has no sign"),
        (Estimate(2.0, 0.5, 3.5, 400), 1.2, 0.125, "INCONCLUSIVE", "p = 0.125"),
        (Estimate(2.0, 0.5, 3.5, 400), 1.2, 0.02, "REPRODUCED", "excludes 0"),
        (Estimate(2.0, None, None, 1, "n = 1, at least 2 needed for an interval"), 1.2, None, "INCONCLUSIVE", "n = 1"),
        (Estimate(None, None, None, 0, "n = 0, at least 1 needed"), 1.2, None, "NOT RUN", "n = 0"),
    ],
)  # fmt: skip
def test_verdict(difference: Estimate, paper: float, p_value: float | None, expected: str, said: str) -> None:
    label, sentence = stats.verdict(difference, paper, 2.1, p_value=p_value)
    assert label == expected
    assert said in sentence
    assert "nan" not in sentence.lower() and "None" not in sentence


def test_verdict_without_a_detectable_difference_says_so() -> None:
    assert stats.verdict(Estimate(0.0, 0.0, 0.0, 50), 1.0, None)[1].endswith("smallest detectable difference: undefined")


# Best of k


@quick
@given(
    st.lists(
        st.tuples(st.one_of(st.sampled_from([0.0, 1.0, math.nan]), st.floats(-9, 9)), st.floats(-100, 100)),
        min_size=1, max_size=9,
    ),
    st.data(),
)  # fmt: skip
def test_expected_best_of_k_agrees_with_enumeration(pool: list[tuple[float, float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(pool)))
    winners = []
    for subset in itertools.combinations(range(len(pool)), k):
        ranked = [i for i in subset if not math.isnan(pool[i][0])]
        if ranked:
            winners.append(pool[min(ranked, key=lambda i: (pool[i][0], i))][1])
        else:
            winners.append(sum(pool[i][1] for i in subset) / k)
    scores, values = np.array(pool).T
    assert stats.expected_best_of_k(scores, values, k) == pytest.approx(np.mean(winners), abs=1e-9)


def test_expected_best_of_k_closed_forms() -> None:
    generator = np.random.default_rng(0)
    scores, values = generator.normal(size=(2, 2_000))
    assert stats.expected_best_of_k(scores, values, 1) == pytest.approx(values.mean(), abs=1e-12)
    assert stats.expected_best_of_k(scores, values, 2_000) == values[scores.argmin()]
    ranks = np.arange(1.0, 2_001.0)  # the least of k ranks out of P has the mean (P + 1) / (k + 1)
    assert stats.expected_best_of_k(ranks, ranks, 600) == pytest.approx(2_001 / 601, rel=1e-12)
    assert stats.expected_best_of_k([1.0, 1.0], [10.0, 20.0], 2) == 10.0, "ties go to the lower index"
    assert stats.expected_best_of_k([np.nan, 5.0], [10.0, 20.0], 2) == 20.0
    assert stats.expected_best_of_k([np.nan, np.nan], [10.0, 20.0], 2) == 15.0


# Coverage by simulation


def paired_data(generator: np.random.Generator) -> Estimate:
    """F1 of two systems that answer 60 % of the questions alike; the true difference is 0.4 * (55 - 50) = 2."""

    def f1(right: float, wrong: float) -> Floats:
        outcome = generator.random(200)
        return np.where(outcome < right, 100.0, np.where(outcome < right + wrong, 0.0, generator.uniform(20, 80, 200)))

    a, b = f1(0.45, 0.35), f1(0.40, 0.40)
    a = np.where(generator.random(200) < 0.6, b, a)
    return stats.paired_bootstrap(a, b, seed=int(generator.integers(2**31)), resamples=1_000)


def clustered_data(generator: np.random.Generator, name: str) -> Estimate:
    x, y, labels = make_pools(int(generator.integers(2**31)), groups=300, size=6, within=-0.2)
    call = stats.clustered_pearson if name == "clustered" else stats.within_group_pearson
    return call(x, y, labels, seed=int(generator.integers(2**31)), resamples=400)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        (paired_data, 2.0),
        (lambda generator: clustered_data(generator, "clustered"), 0.4),  # (1 - 0.2) / (1 + 1)
        (lambda generator: clustered_data(generator, "within"), -0.2),
    ],
    ids=["paired_bootstrap", "clustered_pearson", "within_group_pearson"],
)
def test_interval_covers_the_truth(draw: Callable[[np.random.Generator], Estimate], truth: float) -> None:
    generator = np.random.default_rng(2026)
    covered = 0
    for _ in range(2_000):
        estimate = draw(generator)
        assert estimate.low is not None and estimate.high is not None
        covered += estimate.low <= truth <= estimate.high
    print(f"coverage {covered / 2_000:.4f}")
    assert 0.93 <= covered / 2_000 <= 0.97


@pytest.mark.slow
def test_fisher_interval_of_clustered_rows_covers_too_seldom() -> None:
    """Why the bootstrap is over questions: rows of one question are not independent."""
    covered = 0
    for seed in range(500):
        estimate = stats.pearson(*make_pools(seed, groups=150, size=6, within=-0.2)[:2])
        assert estimate.low is not None and estimate.high is not None
        covered += estimate.low <= 0.4 <= estimate.high
    print(f"coverage {covered / 500:.4f}")
    assert covered / 500 < 0.9


def test_within_correlation_difference() -> None:
    """Two within-group correlations subtracted; 0 for one metric twice; the interval excludes 0 when one is noise."""
    generator = np.random.default_rng(5)
    groups = np.repeat(np.arange(150), 5)
    y = generator.normal(size=groups.size)
    good, noise = y + generator.normal(size=y.size), generator.normal(size=y.size)
    found = stats.within_correlation_difference(good, noise, y, groups, seed=1, resamples=500)
    one = stats.within_group_pearson(good, y, groups, seed=1, resamples=500)
    other = stats.within_group_pearson(noise, y, groups, seed=1, resamples=500)
    assert found.value == pytest.approx(one.value - other.value)
    assert found.low is not None and found.low > 0
    same = stats.within_correlation_difference(good, good, y, groups, seed=1, resamples=200)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    flat = stats.within_correlation_difference(good, noise, np.zeros_like(y), groups, seed=1, resamples=200)
    assert flat.value is None and flat.groups_left_out == 150 and flat.reason
