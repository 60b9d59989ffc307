"""Selection regret, the table of paper against release, and the rolling gate, on the hand-worked pool."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pools import EM, F1, NAN, RATIO, pool, settings

from analysis import differences, regret
from analysis.load import Pool, Quality
from analysis.stats import bootstrap_ratio
from analysis.table1 import choose, gate_decisions
from xcompress.selectors import RollingGate


def test_shares_of_the_headroom_by_hand(tmp_path: Path) -> None:
    """Lowest SPS reads EM 100, 100, 100, CompAct 0, 100, 0: all of the headroom; shortest reads 0, 0, 0: less than none."""
    s = settings()
    found = {(r.name, r.metric): r for r in regret.regrets(pool(), s, choose(pool(), s))}
    assert found["lowest_sps", "em"].regret.value == 0 and found["lowest_sps", "em"].of_initial.value == 1
    assert found["compact", "em"].regret.value == pytest.approx(100 - EM[:, 0].mean())
    assert found["compact", "em"].of_initial.reason == "the reference"
    random, best = EM.mean(), 100.0
    expected = (EM[:, 0].mean() - random) / (best - random)
    assert found["compact", "em"].of_random.value == pytest.approx(expected)
    assert found["random", "f1"].regret.value == pytest.approx(100 - F1.mean())
    assert {"oracle", "raw_passages", "closed_book"}.isdisjoint(name for name, _ in found)
    regret.write(pool(), s, tmp_path)
    rows = json.loads((tmp_path / "regret.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert len(rows) == len(found) and (tmp_path / "regret.svg").stat().st_size > 1000
    bare = replace(pool(), rival_tokens={"longppl": 0.0, "question": 0.0})
    missing = next(r for r in regret.regrets(bare, s, choose(bare, s)) if r.name == "lowest_longppl")
    assert missing.of_random.value is None and missing.regret.reason.startswith("not computed")


def test_no_headroom_no_labels_is_not_a_number() -> None:
    """Where every candidate is equally good, or nothing is labelled, the share is n/a and says why."""
    s = settings()
    flat = pool(quality=Quality(EM * 0, F1 * 0, EM * 0))
    found = regret.regrets(flat, s, choose(flat, s))
    assert all(r.of_initial.value is None and r.of_initial.reason for r in found)
    assert {r.regret.value for r in found} == {0.0}
    none = pool(labelled=np.zeros(3, bool), quality=Quality(EM * NAN, F1 * NAN, EM * NAN))
    assert all(r.regret.value is None and "gold" in r.regret.reason for r in regret.regrets(none, s, choose(none, s)))


def test_ratio_bootstrap_against_plain_resampling() -> None:
    """Value and bounds as a plain loop over resamples gives them; unstable and empty cases have reasons."""
    generator = np.random.default_rng(3)
    over, under = generator.normal(1, 1, 80), generator.normal(3, 1, 80)
    found = bootstrap_ratio(over, under, seed=1, resamples=4000)
    ratios = []
    for _ in range(4000):
        drawn = generator.integers(0, 80, 80)
        ratios.append(over[drawn].mean() / under[drawn].mean())
    assert found.value == pytest.approx(over.mean() / under.mean())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])), abs=0.02)
    assert found == bootstrap_ratio(over, under, seed=1, resamples=4000)
    assert found != bootstrap_ratio(over, under, seed=2, resamples=4000)
    assert bootstrap_ratio([1.0], [0.0], seed=0).reason == "nothing to take a share of"
    assert bootstrap_ratio([1.0], [2.0], seed=0).low is None
    shaky = bootstrap_ratio([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], seed=0)
    assert shaky.value == 1 and shaky.low is None and "too many" in shaky.reason
    assert bootstrap_ratio([], [], seed=0).value is None
    with pytest.raises(ValueError, match="NaN"):
        bootstrap_ratio([NAN], [1.0], seed=0)


def many(base: Pool, copies: int) -> Pool:
    """The pool's questions repeated."""

    def repeat(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return np.concatenate([values] * copies)

    quality = Quality(repeat(EM), repeat(F1), repeat(EM))
    flat = Quality(repeat(EM[:, 0]), repeat(F1[:, 0]), repeat(EM[:, 0]))
    changed = {
        name: repeat(getattr(base, name))
        for name in ("labelled", "tokens", "first_token", "nll", "longppl", "question_nll", "answer_nll", "compressor_nll",
                     "reading_tokens", "sps", "ratio", "compressor_tokens")
    }  # fmt: skip
    texts = {name: list(getattr(base, name)) * copies for name in ("questions", "summaries", "predictions")}
    return replace(base, quality=quality, raw=flat, closed=flat, **changed, **texts)


def test_the_rolling_gate_by_hand() -> None:
    """Pool of 3, quantile 0.5: three fill it; then one at or below the median replaces the least, one above it the most."""
    gate = RollingGate(0.5, 3)
    assert [gate.skips(r) for r in (0.2, 0.4, 0.6)] == [False] * 3
    assert gate.skips(0.5) and sorted(gate.pool) == [0.2, 0.4, 0.5]
    assert not gate.skips(0.4) and sorted(gate.pool) == [0.4, 0.4, 0.5]
    assert not gate.skips(None) and not gate.skips(NAN) and sorted(gate.pool) == [0.4, 0.4, 0.5]
    assert RollingGate(0.5, 3, gate.pool).skips(0.45)
    big = many(pool(), 20)
    method = replace(settings().method, gate="release", gate_pool=50)
    decided = gate_decisions(big, method)
    assert decided is not None and not decided[:50].any() and decided[50:].any()
    again = RollingGate(0.3, 50)
    assert decided.tolist() == [again.skips(r) for r in np.tile(RATIO, 20)]


def test_points_of_difference(tmp_path: Path) -> None:
    """What was scored is compared with the paper's variant on the same questions; what was not says what to set."""
    big = many(pool(), 20)
    s = settings()
    found = {row.point: row for row in differences.differences(big, s)}
    plain = found["the paper's SPS, no gate"]
    assert plain.em.value == 100.0 and plain.em_difference.reason == "the reference" and plain.same == 1
    assert "not scored" in found["matrix: q_proj of block L-1"].em.reason
    assert "start token" in found["tokens: after a start token"].em.reason
    left_out = found["tokens: first token left out of pooling"]  # no such scores here: falls back to the initial summary
    assert left_out.em.value == pytest.approx(EM[:, 0].mean()) and left_out.em_difference.value == pytest.approx(
        EM[:, 0].mean() - 100
    )
    rolling, gated = found["gate: rolling"], found["the paper's SPS and gate"]
    assert rolling.em.value is not None and gated.em.value is not None
    assert rolling.compressor_tokens is not None and gated.compressor_tokens is not None
    assert found["choice in every round (xcompress_release)"].em.reason == "not in this run: method=xcompress_release"
    differences.write(big, s, tmp_path)
    rows = json.loads((tmp_path / "differences.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert [row["point"] for row in rows] == list(found)
