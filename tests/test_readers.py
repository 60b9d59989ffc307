"""Two readers on the same candidates, from figures written by hand, against plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_study import alike, publish

from analysis import readers
from analysis.stats import within_group_pearson
from xcompress.config import ROOT
from xcompress.schema import UsageError


def two(tmp_path: Path, candidates: str = "smol-1/00000-a") -> tuple[Path, Path]:
    """Figures of two readers; the second also read NQ, and one question of HotpotQA has no labels there."""
    for reader, seed, unlabelled, shards in (("one", 1, 0, "smol-1/00000-a"), ("two", 2, 1, candidates)):
        publish(tmp_path / reader / "hotpotqa", 30, seed, unlabelled)
        (tmp_path / reader / "hotpotqa" / "provenance.json").write_text(json.dumps({"shards": {"candidates": [shards]}}))
    publish(tmp_path / "two" / "nq", 20, 3)
    return tmp_path / "one", tmp_path / "two"


def test_each_figure_is_what_a_loop_finds(tmp_path: Path) -> None:
    """Questions that both readers have, each reader on its own and on the other's choice, agreement of choice and order."""
    first, second = two(tmp_path)
    both = readers.pair(first, second)
    assert both.names == ("one", "two") and [len(study.dataset) for study in both.studies] == [29, 29]
    one, other = both.studies
    record = readers.compare(first, second)
    assert record["datasets"] == {"hotpotqa": 29}
    rows = {(row["reader"], row["choice"], row["metric"], row["dataset"]): row for row in record["exchanged"]}
    gain = []
    for q in range(29):
        best_one, best_two = int(one.columns["em"][q].argmax()), int(other.columns["em"][q].argmax())
        gain.append(one.columns["em"][q, best_one] - one.columns["em"][q, best_two])
    assert rows["one", "oracle", "em", "hotpotqa"]["value"] == pytest.approx(np.mean(gain)) and np.mean(gain) > 0
    assert rows["one", "lowest_sps", "em", "all"]["value"] == 0, "both chose candidate 1 everywhere"
    same = {(row["score"], row["dataset"]): row for row in record["agreement"]}
    assert same["sps", "all"]["same"]["value"] == 100 and same["sps", "all"]["same"]["n"] == 29
    a, b = one.variants["first_token=False"], other.variants["first_token=False"]
    share = np.mean([a[q].argmin() == b[q].argmin() for q in range(29)]) * 100
    assert same["first_token=False", "all"]["same"]["value"] == pytest.approx(share)
    expected = within_group_pearson(a.ravel(), b.ravel(), np.repeat(np.arange(29), 3), seed=0, resamples=200)
    assert same["first_token=False", "hotpotqa"]["r"]["value"] == pytest.approx(expected.value)
    assert ("start_token=True", "all") not in same, "no reader has a start token here"
    assert same["em", "all"]["same"] is None
    readers.main(tmp_path, "one", "two")
    text = (tmp_path / "readers.md").read_text()
    assert "hotpotqa (n = 29)" in text and "blind choices: 33.3" in text and "nq" not in text.split("\n")[4:]
    assert json.loads((tmp_path / "readers.json").read_text(), parse_constant=pytest.fail)["readers"] == ["one", "two"]


def test_other_candidates_are_refused(tmp_path: Path) -> None:
    """Figures of two pools say nothing about readers."""
    with pytest.raises(UsageError, match="read different candidates of hotpotqa; run both readers with the same compressor"):
        readers.pair(*two(tmp_path, candidates="smol-1/00000-b"))


def test_nothing_in_common(tmp_path: Path) -> None:
    _, second = two(tmp_path)
    publish(tmp_path / "three" / "musique", 20, 4)
    with pytest.raises(UsageError, match="no data set in common"):
        readers.pair(tmp_path / "three", second)


@pytest.mark.skipif(not (ROOT / "results" / "readers.json").is_file(), reason="no second reader is published")
def test_the_published_comparison_comes_from_the_published_figures() -> None:
    """One command makes it again from what is in the repository."""
    results = ROOT / "results"
    record = readers.compare(results / "smollm2_135m", results / "gemma3_270m")
    alike(record, json.loads((results / "readers.json").read_text(), parse_constant=pytest.fail))
