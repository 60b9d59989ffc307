"""Correlations, ablations and the specification curve on a pool small enough to work out by hand."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pools import COST, EM, F1, NAN, SPS, TOKENS, pool, settings

from analysis import ablations, correlation, publish, specification, table1, verdicts
from analysis.load import Quality
from analysis.stats import Estimate, clustered_pearson
from analysis.table1 import choose
from xcompress.schema import UsageError
from xcompress.selectors import lowest


def test_correlations_drop_missing_scores_and_turn_the_sign() -> None:
    """Pooled r of minus SPS with EM over the eight scored candidates; the blank one is dropped and counted."""
    cells = {(c.metric, c.quality, c.form): c for c in correlation.correlations(pool(), settings())}
    assert len(cells) == 6 * 2 * 4
    keep = np.isfinite(SPS)
    expected = np.corrcoef(-SPS[keep], EM[keep])[0, 1]
    pooled = cells["sps", "em", "pooled"].estimate
    assert pooled.value == pytest.approx(expected) and pooled.n == 8 and pooled.dropped == 1
    rows = np.repeat(np.arange(3), 3)[keep.ravel()]
    again = clustered_pearson(-SPS[keep], EM[keep], rows, seed=0, resamples=500)
    assert (pooled.low, pooled.high) == (again.low, again.high)
    assert cells["tokens", "em", "partial"].estimate.reason == "the control itself"
    centred = [(SPS[q] - SPS[q][np.isfinite(SPS[q])].mean(), EM[q] - EM[q][np.isfinite(SPS[q])].mean()) for q in range(3)]
    x = np.concatenate([-a[np.isfinite(a)] for a, _ in centred])
    y = np.concatenate([b[np.isfinite(a)] for a, b in centred])
    assert cells["sps", "em", "within"].estimate.value == pytest.approx(np.corrcoef(x, y)[0, 1])


def test_undefined_correlations_say_why(tmp_path: Path) -> None:
    """EM constant, or nothing labelled: n/a with a reason, strict JSON."""
    zero = pool(quality=Quality(EM * 0, F1, EM))
    cells = [c for c in correlation.correlations(zero, settings()) if c.quality == "em" and c.form != "partial"]
    assert cells and all(c.estimate.value is None and c.estimate.reason for c in cells)
    correlation.write(zero, settings(), tmp_path)
    json.loads((tmp_path / "correlation.json").read_text(), parse_constant=pytest.fail)
    assert "n/a" in (tmp_path / "correlation.md").read_text()
    none = pool(labelled=np.zeros(3, bool), quality=Quality(EM * NAN, F1 * NAN, EM * NAN))
    assert all(c.estimate.value is None for c in correlation.correlations(none, settings()))


def test_variance_explained() -> None:
    """SPS that is a function of the first token alone: share 1 for it; a line in length: share 1 for length."""
    base = pool()
    by_token = pool(sps=base.sps * 0 + base.first_token[:, :, None, None, None, None, None, None])
    shares = correlation.explained(by_token, settings())
    assert shares["first token"] == pytest.approx(1)
    by_length = pool(sps=base.sps * 0 + base.tokens[:, :, None, None, None, None, None, None])
    shares = correlation.explained(by_length, settings())
    assert shares["length"] == pytest.approx(1) and shares["question"] is not None and shares["question"] < 0.9


def test_k_is_the_exact_expectation_over_subsets() -> None:
    """Every k, with and without the initial summary, against enumeration of all subsets."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        scores = generator.choice([1.0, 2.0, 3.0, 4.0, NAN], 5)
        values = generator.choice([0.0, 50.0, 100.0], 5)
        for k in range(1, 5):
            for with_initial in (False, True):
                outcomes = []
                for subset in itertools.combinations(range(1, 5), k):
                    drawn = [0, *subset] if with_initial else list(subset)
                    position, bare = lowest(scores[drawn])
                    blind = values[drawn].mean() if not with_initial else values[0]
                    outcomes.append(blind if bare else values[drawn[position]])
                assert ablations._expected(scores, values, k, with_initial) == pytest.approx(np.mean(outcomes))


def test_ablations_mark_the_default_and_vary_one_thing() -> None:
    """Each ablation has one default; it equals the ungated choice; costs of K and of the gate are those of the pool."""
    found = ablations.ablations(pool(), settings())
    by_name: dict[str, list[ablations.Setting]] = {}
    for setting in found:
        by_name.setdefault(setting.ablation, []).append(setting)
    for name, block in by_name.items():
        assert sum(setting.default for setting in block) == 1, name
    assert [s.value for s in by_name["layer"]] == ["0", "1", "2", "3", "normed"]
    default = next(s for s in by_name["pooling"] if s.default)
    assert default.value == "max" and default.em.value == 100.0
    mean = next(s for s in by_name["pooling"] if s.value == "mean")  # no scores there: falls back to the initial summary
    assert mean.em.value == pytest.approx(EM[:, 0].mean())
    one, two = by_name["K (and the initial summary)"]
    assert two.em.value == 100.0 and two.cost == pytest.approx(COST.sum(1).mean())
    assert one.cost == pytest.approx((COST[:, 0] + COST[:, 1:].mean(1)).mean())
    gate = {s.value: s for s in by_name["gate (share kept on calibration)"]}
    assert gate["0.0"].cost == pytest.approx(COST.sum(1).mean()) and gate["1.0"].cost == pytest.approx(COST[:, 0].mean())
    assert gate["1.0"].em.value == pytest.approx(EM[:, 0].mean()) and gate["0.3"].default


def test_specification_curve_counts_and_corrects(tmp_path: Path) -> None:
    """Only the scored variant stands; its difference and place are right; the rest is counted as undefined."""
    found = specification.curve(pool(), settings())
    assert len(found.variants) == 1 and found.undefined == 2 * 5 * 5 * 8 - 1 and found.default == 0
    assert found.differences[0] == pytest.approx(100 - EM[:, 0].mean())
    specification.write(pool(), settings(), tmp_path)
    assert "1 variants" in (tmp_path / "specification.md").read_text()


def test_the_best_of_many_useless_variants_is_not_significant() -> None:
    """2,000 variants of pure noise: some beat CompAct with an interval that excludes 0, yet the corrected p stays large."""
    generator = np.random.default_rng(1)
    questions, candidates = 60, 4
    base = pool()
    em = generator.choice([0.0, 100.0], (questions, candidates))
    axes = {**base.axes, "energy": [float(e) for e in np.linspace(0.01, 0.95, 40)]}
    shape = tuple(len(values) for values in axes.values())
    noise = pool(
        questions=[base.questions[0]] * questions,
        labelled=np.ones(questions, bool),
        quality=Quality(em, em, em),
        sps=generator.random((questions, candidates, *shape)),
        axes=axes,
    )
    found = specification.curve(noise, settings())
    assert len(found.variants) == 2000 and (found.low > 0).sum() > 5
    assert found.best_p is not None and found.best_p > 0.05
    real = em.copy()
    real[:, 0] = generator.choice([0.0, 100.0], questions, p=[0.9, 0.1])
    scores = generator.random((questions, candidates, *shape))
    scores[..., 0, 0, 0, 2, 0, 39] = -real  # one variant that knows
    true = pool(
        questions=[base.questions[0]] * questions,
        labelled=np.ones(questions, bool),
        quality=Quality(real, real, real),
        sps=scores,
        axes=axes,
    )
    knowing = specification.curve(true, settings())
    assert knowing.best_p is not None and knowing.best_p < 0.01 and knowing.variants[-1]["energy"] == pytest.approx(0.95)


def test_files_are_written(tmp_path: Path) -> None:
    """Every table in four forms, equal on a second call."""
    for module, name in ((correlation, "correlation"), (ablations, "ablations"), (specification, "specification")):
        module.write(pool(), settings(), tmp_path)
        first = {suffix: (tmp_path / f"{name}.{suffix}").read_bytes() for suffix in ("csv", "md", "json", "svg")}
        module.write(pool(), settings(), tmp_path)
        assert first == {suffix: (tmp_path / f"{name}.{suffix}").read_bytes() for suffix in first}
    assert TOKENS[1, 1] == 0  # the blank candidate that the tables above had to live with


def test_verdicts_take_the_papers_side(tmp_path: Path) -> None:
    """Intervals above 0 are REPRODUCED, below CONTRADICTED, else INCONCLUSIVE; no figure is NOT RUN."""
    s = settings()
    found = {v.claim: v for v in verdicts.verdicts(pool(), s, choose(pool(), s))}
    best = found["max pooling beats mean pooling (EM)"]  # 100, 100, 100 against 0, 100, 0
    assert best.estimate.value == pytest.approx(200 / 3) and best.label == "INCONCLUSIVE", "three questions"
    assert found["SPS tracks EM better than LongPPL within a question"].label == "NOT RUN"
    assert verdicts.label(Estimate(1.0, 0.1, 2.0, 9)) == "REPRODUCED"
    assert verdicts.label(Estimate(-1.0, -2.0, -0.1, 9)) == "CONTRADICTED"
    assert verdicts.label(Estimate(1.0, 0.0, 2.0, 9)) == verdicts.label(Estimate(1.0, None, None, 1)) == "INCONCLUSIVE"
    assert verdicts.label(Estimate(1.0, 0.1, 2.0, 9), p_value=0.2) == "INCONCLUSIVE", "the exact test objects"
    assert verdicts.label(Estimate(0.5, 0.1, 0.9, 20, groups=4)) == "INCONCLUSIVE", "four questions vary"
    assert verdicts.label(Estimate(0.5, 0.1, 0.9, 200, groups=40)) == "REPRODUCED"
    none = pool(labelled=np.zeros(3, bool), quality=Quality(EM * NAN, F1 * NAN, EM * NAN))
    assert {v.label for v in verdicts.verdicts(none, s, choose(none, s))} == {"NOT RUN"}
    verdicts.write(pool(), s, tmp_path)
    rows = json.loads((tmp_path / "verdicts.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert len(rows) == len(found) == 16


def test_publishing_copies_numbers_and_no_text(tmp_path: Path) -> None:
    """Tables, figures and records are copied below reader and data set; candidates stay; the summary has every run."""
    s = settings()
    folder = tmp_path / "run"
    verdicts.write(pool(), s, folder)
    table1.write(pool(), s, folder)
    table = json.loads((folder / "table1.json").read_text())
    (folder / "table1.json").write_text(json.dumps({**table, "reader": "llama3_8b", "dataset": "hotpotqa"}))
    texts = {name: ["secret"] for name in ("question", "summary", "prediction")}
    candidates = pa.table({"question_id": ["q"], "answers": [["secret"]], "em": [100.0], **texts})
    pq.write_table(candidates, folder / "candidates.parquet")
    (folder / "specification.csv").write_text("thousands of lines")
    (folder / "config.yaml").write_text("seed: 0\nrun_root: /home/somebody/runs\nlimit: 3\n")
    target = publish.publish(folder, tmp_path / "results")
    assert target == tmp_path / "results" / "llama3_8b" / "hotpotqa"
    tables = {f"{name}.{suffix}" for name in ("table1", "verdicts") for suffix in ("md", "csv", "json")}
    assert {path.name for path in target.iterdir()} == {*tables, "table1.svg", "config.yaml", "numbers.parquet"}
    assert pq.read_table(target / "numbers.parquet").to_pylist() == [{"question_id": "q", "em": 100.0}]
    assert (target / "config.yaml").read_text() == "seed: 0\nlimit: 3\n"
    summary = (tmp_path / "results" / "verdicts.md").read_text()
    assert "llama3_8b/hotpotqa" in summary and "max pooling beats mean pooling" in summary
    (cell,) = [line for line in summary.splitlines() if "| llama3_8b | hotpotqa | +3.6 |" in line]
    assert "INCONCLUSIVE" in cell, "three questions decide nothing"
    assert summary.count("no published run of this reader") == 2 * 5 and summary.count("not stated") >= 12
    release = tmp_path / "release"
    shutil.copytree(folder, release)
    other = {**table, "reader": "llama3_8b", "dataset": "hotpotqa"}
    other["method"] = {**other["method"], "name": "xcompress_release"}
    (release / "table1.json").write_text(json.dumps(other))
    assert publish.newest_of_each(tmp_path, tmp_path / "results") == [folder, release]
    assert publish.publish(release, tmp_path / "results").name == "hotpotqa-xcompress_release"
    with pytest.raises(UsageError, match=r"no table1\.json"):
        publish.publish(tmp_path, tmp_path / "results")
