"""The study over all published data sets, from a handful of figures written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import findings, study
from analysis.stats import within_group_pearson
from xcompress.config import ROOT
from xcompress.schema import UsageError

VARIANTS = ["first_token=True", "first_token=False", "subspace=q_proj", "pooling=mean"]


def publish(folder: Path, questions: int, seed: int, unlabelled: int = 0, rivals: bool = True) -> dict[str, Any]:
    """Figures of a data set: 3 candidates a question; CompAct is 0, lowest SPS is 1, the oracle the best."""
    generator = np.random.default_rng(seed)
    em = generator.choice([0.0, 100.0], (questions, 3))
    sps = generator.random((questions, 3))
    sps[:, 1] -= 2
    variants = generator.random((questions, 3, 4))
    records = []
    for at in range(questions):
        for k in range(3):
            chosen = ["compact"] * (k == 0) + ["lowest_sps", "xcompress", "shortest"] * (k == 1)
            chosen += ["oracle"] * (k == int(em[at].argmax())) + [
                "lowest_ppl",
                "longest",
                *(["lowest_longppl"] if rivals else []),
            ] * (k == 2)
            chosen += ["compressor", "question", "confidence", "majority"] * (k == 0)
            known = at >= unlabelled
            records.append(
                {
                    "question_id": f"q{at}", "candidate": k, "em": em[at, k] if known else None,
                    "f1": em[at, k] if known else None, "tokens": 5.0 + k + at % 3, "nll": 1.0 + k,
                    "longppl": None if k else 2.0,
                    "sps": sps[at, k], "first_token": int(at % 4), "compressor_tokens": 50.0, "chosen_by": chosen,
                    "variants": variants[at, k].tolist(),
                }
            )  # fmt: skip
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(records).replace_schema_metadata({"variants": json.dumps(VARIANTS)})
    pq.write_table(table, folder / "numbers.parquet")
    return {"em": em[unlabelled:], "sps": sps[unlabelled:], "variants": variants[unlabelled:]}


def alike(found: Any, expected: Any, place: str = "") -> None:
    """The same record; numbers to nine digits, since the last ones are the processor's."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            alike(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for at, value in enumerate(expected):
            alike(found[at], value, f"{place}[{at}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9), place
    else:
        assert found == expected, place


def test_pooled_figures_are_those_of_all_questions(tmp_path: Path) -> None:
    """Two data sets: every pooled mean is over the questions of both; mini and other methods' folders are left out."""
    one, two = publish(tmp_path / "hotpotqa", 30, 1), publish(tmp_path / "nq", 50, 2, unlabelled=7)
    publish(tmp_path / "mini", 9, 3)
    publish(tmp_path / "nq-xcompress_release", 9, 4)
    study.main(tmp_path)
    found = json.loads((tmp_path / "study.json").read_text(), parse_constant=pytest.fail)
    assert found["datasets"] == {"hotpotqa": 30, "nq": 43}
    em = np.concatenate([one["em"], two["em"]])
    rows = {(row["dataset"], row["selector"]): row for row in found["selection"]}
    pooled = rows["all", "lowest_sps"]
    assert pooled["em"]["value"] == pytest.approx(em[:, 1].mean()) and pooled["em"]["n"] == 73
    assert pooled["em_difference"]["value"] == pytest.approx((em[:, 1] - em[:, 0]).mean())
    assert rows["nq", "random"]["em"]["value"] == pytest.approx(two["em"].mean())
    headroom = em.max(1).mean() - em[:, 0].mean()
    assert pooled["em_share"]["value"] == pytest.approx((em[:, 1] - em[:, 0]).mean() / headroom)
    against = {(row["dataset"], row["against"], row["metric"]): row for row in found["comparisons"]}
    assert against["all", "lowest_ppl", "em"]["value"] == pytest.approx((em[:, 1] - em[:, 2]).mean())
    r = {(c["dataset"], c["metric"], c["quality"], c["form"]): c for c in found["correlations"]}
    x = -np.concatenate([one["sps"], two["sps"]]).ravel()
    expected = within_group_pearson(x, em.ravel(), np.repeat(np.arange(73), 3), seed=0, resamples=200)
    assert r["all", "sps", "em", "within"]["value"] == pytest.approx(expected.value)
    assert r["all", "longppl", "em", "within"]["value"] is None and r["all", "longppl", "em", "within"]["reason"]
    scores = np.concatenate([one["variants"], two["variants"]])[:, :, 2]
    picked = em[np.arange(73), scores.argmin(1)]
    variant = next(row for row in found["variants"] if row["variant"] == "subspace=q_proj")
    assert variant["compact"]["value"] == pytest.approx((picked - em[:, 0]).mean())
    text = (tmp_path / "study.md").read_text()
    assert "nq (n = 43)" in text and "all (n = 73)" in text and "lowest SPS" in text
    before = (tmp_path / "study.json").read_bytes()
    study.main(tmp_path)
    assert (tmp_path / "study.json").read_bytes() == before


def test_a_selector_that_one_data_set_lacks(tmp_path: Path) -> None:
    """Its pooled figure rests on the other data set, and says so by its n; it never reads a wrong candidate."""
    one, _ = publish(tmp_path / "hotpotqa", 30, 1), publish(tmp_path / "nq", 20, 2, rivals=False)
    found = {(row["dataset"], row["selector"]): row for row in study.selection(study.load(tmp_path))}
    assert found["nq", "lowest_longppl"]["em_difference"]["reason"] == "not run"
    pooled = found["all", "lowest_longppl"]["em_difference"]
    assert pooled["n"] == 30 and pooled["value"] == pytest.approx((one["em"][:, 2] - one["em"][:, 0]).mean())


def test_nothing_published(tmp_path: Path) -> None:
    """One sentence."""
    with pytest.raises(UsageError, match=r"numbers\.parquet; publish runs first"):
        study.load(tmp_path)


@pytest.mark.skipif(not (ROOT / "results" / "smollm2_135m" / "study.json").is_file(), reason="no study is published")
def test_pages_say_what_the_tables_say() -> None:
    """Findings, results page and headline are what their templates and the published tables give, figure by figure."""
    for path, text in findings.pages(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is stale: run `python -m analysis.findings`"


@pytest.mark.skipif(not (ROOT / "results" / "smollm2_135m" / "study.json").is_file(), reason="no study is published")
def test_the_study_comes_from_the_published_figures(tmp_path: Path) -> None:
    """One command makes the tables over all data sets again from what is in the repository."""
    folder = ROOT / "results" / "smollm2_135m"
    record = study.study(folder)
    alike(record, json.loads((folder / "study.json").read_text(), parse_constant=pytest.fail))
    for name, n in record["datasets"].items():
        rows = json.loads((folder / name / "table1.json").read_text())["rows"]
        table = {row["method"]: row for row in rows}
        for row in (r for r in record["selection"] if r["dataset"] == name):
            if row["em"]["value"] is None:
                continue
            assert row["em"]["value"] == pytest.approx(table[row["selector"]]["em"]) and row["em"]["n"] == n


@pytest.mark.skipif(not (ROOT / "results" / "readers.json").is_file(), reason="no study is published")
def test_what_the_pages_say_in_words_holds_in_the_tables() -> None:
    """Every sentence of the findings that is no figure; where one fails, the page must be written anew."""
    results = ROOT / "results"
    smollm2, gemma = (findings.Figures(results / name).study for name in findings.READERS)
    both = json.loads((results / "readers.json").read_text(encoding="utf-8"))

    def find(rows: list[dict[str, Any]], **wanted: str) -> dict[str, Any]:
        (row,) = [r for r in rows if r.get("dataset") == "all" and all(r[key] == value for key, value in wanted.items())]
        return row

    for record in (smollm2, gemma):
        chosen, against = record["selection"], record["comparisons"]
        assert find(chosen, selector="lowest_sps")["em_difference"]["low"] <= 0, "lowest SPS reads no better than CompAct"
        assert all(find(against, against=name, metric="em")["low"] <= 0 for name in ("random", "shortest"))
        assert find(chosen, selector="oracle")["em_difference"]["low"] > 0
        shares = [row["em_share"] for row in chosen if row["dataset"] == "all" and row["em_share"] is not None]
        assert all(share["low"] is None or share["low"] <= 0 for share in shares), "no share is above none"

    def r(record: dict[str, Any], metric: str, quality: str = "em", form: str = "within") -> dict[str, Any]:
        return find(record["correlations"], metric=metric, quality=quality, form=form)

    assert r(smollm2, "sps")["low"] > 0 and r(smollm2, "sps-nll")["low"] > 0, "SPS goes with EM, more than PPL does"
    assert r(smollm2, "tokens")["value"] >= r(smollm2, "sps")["value"], "brevity at least as much"
    assert all(r(gemma, "sps", quality)["low"] <= 0 <= r(gemma, "sps", quality)["high"] for quality in ("em", "f1"))
    assert r(gemma, "nll", form="partial")["low"] > 0, "its PPL does, once length is held fixed"
    found = [row["value"] for row in smollm2["correlations"] + gemma["correlations"] if row["dataset"] == "all"]
    assert max(value for value in found if value is not None) < 0.5, "nothing near the paper's"
    explained = {
        name: find(rec["explained"], variant="first_token=True")["share"] for name, rec in (("s", smollm2), ("g", gemma))
    }
    assert explained["s"] > 0.9 > 0.5 > explained["g"], "the collapse onto the first token is SmolLM2's alone"

    same = {name: find(both["agreement"], score=name)["same"]["value"] for name in ("sps", "nll")}
    assert same["sps"] < 40 and same["nll"] > 60, "the readers' SPS hardly agree, their PPL nearly does"
    for reader in findings.READERS:
        for metric in ("em", "f1"):
            own = {
                c: find(both["exchanged"], reader=reader, metric=metric, choice=c)
                for c in ("lowest_sps", "lowest_ppl", "oracle")
            }
            assert own["lowest_sps"]["low"] <= 0, "no reader reads its own SPS choice distinguishably better"
            assert own["oracle"]["low"] > 0, "which summary is right depends on who reads it"
            assert (own["lowest_ppl"]["low"] > 0) == (reader == "gemma3_270m")


def test_no_figure_is_written_by_hand() -> None:
    """The templates hold no decimal figure of ours: only the paper's, and what defines the set-up."""
    for name in ("findings", "results", "headline"):
        text = (findings.TEMPLATES / f"{name}.md.jinja").read_text(encoding="utf-8")
        plain = re.sub(r"\{[{%].*?[%}]\}", "", text)
        assert set(re.findall(r"[+-]?\d+\.\d+", plain)) <= {"+3.6", "0.56", "0.65", "0.50", "0.75"}, name
