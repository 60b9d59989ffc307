"""Table 1 on a pool small enough to work out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from pools import EM, F1, NAN, pool, settings

from analysis.load import Quality
from analysis.stats import bootstrap_mean, paired_bootstrap
from analysis.table1 import choose, paper_cells, table, write


def test_every_selector_picks_what_it_says() -> None:
    """Ties to the lowest index, blank and NaN never win, an all-NaN pool falls back to the initial summary and is counted."""
    choices = choose(pool(), settings())
    picks = {name: choice.picks.tolist() for name, choice in choices.items() if choice.picks is not None}
    assert picks == {
        "compact": [0, 0, 0],
        "shortest": [0, 2, 0],  # candidate 1 of question 2 is blank
        "longest": [1, 0, 2],
        "lowest_ppl": [2, 0, 0],
        "lowest_longppl": [0, 0, 0],  # no key token anywhere: falls back, counted
        "compressor": [1, 2, 0],
        "question": [2, 0, 1],
        "confidence": [0, 2, 0],
        "majority": [1, 2, 0],  # "The B!" and "b" are one answer; blank ones are no vote
        "lowest_sps": [1, 0, 2],
        "xcompress": [1, 0, 2],  # threshold: 70th percentile of .2 .4 .6 .8 = 0.62; only question 2 (0.9) is skipped
        "oracle": [1, 0, 2],
    }
    assert choices["lowest_ppl"].fallbacks == 1 and choices["lowest_longppl"].fallbacks == 3
    assert choices["xcompress"].skipped == 1
    assert choices["random"].em.tolist() == pytest.approx([100 / 3] * 3)


def test_costs_are_what_each_method_would_have_spent() -> None:
    """A gated method does not pay for the sampling it skips; choosing pays for the whole pool; random for one candidate."""
    choices = choose(pool(), settings())
    assert choices["compact"].compressor_tokens.tolist() == [100, 100, 200]
    assert choices["lowest_sps"].compressor_tokens.tolist() == [330, 370, 630]
    assert choices["xcompress"].compressor_tokens.tolist() == [330, 100, 630]
    assert choices["random"].compressor_tokens.tolist() == pytest.approx([110, 370 / 3, 210])
    assert choices["raw_passages"].compressor_tokens.tolist() == [0, 0, 0]
    selection = {name: round(choice.selection_tokens, 6) for name, choice in choices.items()}
    assert selection["compact"] == selection["random"] == selection["shortest"] == selection["compressor"] == 0
    assert selection["lowest_sps"] == selection["lowest_ppl"] == round((21 + 14 + 17) / 3, 6)
    assert selection["xcompress"] == round((21 + 8 + 17) / 3, 6)  # the skipped question scores its initial summary alone
    assert selection["lowest_longppl"] == 500 and selection["question"] == 90
    assert selection["confidence"] == selection["majority"] == 120


def test_without_the_initial_summary_only_sampled_ones_compete() -> None:
    """method.include_initial=false: candidate 0 is never chosen (but the gate may keep it) nor paid for without a gate."""
    choices = choose(pool(), settings("method.include_initial=false"))
    assert choices["lowest_sps"].picks.tolist() == [1, 2, 2]  # type: ignore[union-attr]
    assert choices["lowest_sps"].compressor_tokens.tolist() == [230, 270, 430]
    assert choices["xcompress"].picks.tolist() == [1, 0, 2]  # type: ignore[union-attr]
    assert choices["xcompress"].compressor_tokens.tolist() == [330, 100, 630]


def test_rows_hold_the_bootstrap_of_their_choice() -> None:
    """Means, intervals and paired differences are those of the statistics module on the chosen values."""
    s = settings()
    rows = {row.name: row for row in table(pool(), s, choose(pool(), s))}
    chosen = np.array([100.0, 100.0, 100.0])
    assert rows["lowest_sps"].em == bootstrap_mean(chosen, seed=0, resamples=500)
    assert rows["lowest_sps"].em_difference == paired_bootstrap(chosen, EM[:, 0], seed=0, resamples=500)
    assert rows["lowest_sps"].em_p == 1.0  # McNemar 0.5, times the cells of the table
    assert rows["compact"].em_difference.value is None and rows["compact"].em_p is None
    assert rows["compact"].em.value == pytest.approx(100 / 3)
    assert set(rows["xcompress"].verdicts) == {"em", "f1"} and not rows["lowest_sps"].verdicts


def test_unlabelled_questions_leave_every_mean(tmp_path: Path) -> None:
    """n is the number of labelled questions; with none at all each cell says why it is empty."""
    s = settings()
    em = EM.copy()
    em[1] = NAN
    partly = pool(labelled=np.array([True, False, True]), quality=Quality(em, em, em))
    rows = {row.name: row for row in table(partly, s, choose(partly, s))}
    assert rows["compact"].em.n == 2 and rows["compact"].em.value == 0.0
    nothing = pool(labelled=np.zeros(3, bool), quality=Quality(EM * NAN, EM * NAN, EM * NAN))
    empty = table(nothing, s, choose(nothing, s))
    assert all(row.em.value is None and row.em.reason for row in empty)
    assert next(row for row in empty if row.name == "xcompress").verdicts["em"][0] == "NOT RUN"
    write(nothing, s, tmp_path)
    assert "no question has a gold answer" in (tmp_path / "table1.md").read_text()


def test_one_question_has_no_interval() -> None:
    """n = 1: a value, no interval, an inconclusive verdict."""
    s = settings("method.gate=none")
    small = pool()
    small = dataclasses.replace(
        small,
        **{
            name: getattr(small, name)[:1]
            for name in (
                *("questions", "labelled", "tokens", "first_token", "nll", "longppl", "question_nll", "answer_nll"),
                *("compressor_nll", "reading_tokens", "sps", "ratio", "compressor_tokens", "predictions", "summaries"),
            )
        },
        quality=Quality(EM[:1], F1[:1], EM[:1]),
        raw=Quality(EM[:1, 0], F1[:1, 0], EM[:1, 0]),
        closed=Quality(EM[:1, 0], F1[:1, 0], EM[:1, 0]),
    )
    rows = {row.name: row for row in table(small, s, choose(small, s))}
    assert rows["lowest_sps"].em.value == 100.0 and rows["lowest_sps"].em.low is None
    assert rows["xcompress"].verdicts["em"][0] == "INCONCLUSIVE"


def test_no_calibration_is_said() -> None:
    """The gated row is empty with the setting that mends it."""
    s = settings()
    bare = pool(calibration_ratio=np.zeros((0, 1, 2)))
    rows = {row.name: row for row in table(bare, s, choose(bare, s))}
    assert rows["xcompress"].em.value is None and "calibration" in rows["xcompress"].em.reason
    assert rows["xcompress"].verdicts["em"][0] == "NOT RUN"


def test_paper_cells_and_verdicts() -> None:
    """A reader and data set of the paper get its figures and a verdict on the cell; others on the claim, which says so."""
    paper = settings("reader.name=llama3_8b", "dataset.name=hotpotqa")
    assert paper_cells(paper) == {"compact": [34.0, 43.2], "xcompress": [37.6, 47.9]}
    rows = {row.name: row for row in table(pool(), paper, choose(pool(), paper))}
    assert rows["compact"].paper == [34.0, 43.2] and rows["xcompress"].paper == [37.6, 47.9]
    assert "paper +3.60" in rows["xcompress"].verdicts["em"][1]
    own = {row.name: row for row in table(pool(), settings(), choose(pool(), settings()))}
    assert own["xcompress"].paper is None
    assert "about the claim, not a cell" in own["xcompress"].verdicts["em"][1]


def test_files_are_strict_and_complete(tmp_path: Path) -> None:
    """JSON without NaN, one CSV line a row, the note and the verdicts in the Markdown."""
    rows = write(pool(), settings(), tmp_path)
    stored = json.loads((tmp_path / "table1.json").read_text(), parse_constant=pytest.fail)
    assert len(stored["rows"]) == len(rows) == 15
    assert len((tmp_path / "table1.csv").read_text().splitlines()) == 16
    markdown = (tmp_path / "table1.md").read_text()
    assert stored["note"] in markdown and "CompAct (initial)" in markdown and "1 of 3 questions" in markdown


def test_the_exact_test_guards_a_verdict() -> None:
    """Four gains and no loss of 40: the bootstrap interval excludes 0, McNemar (p = 0.125) does not, so INCONCLUSIVE."""
    s = settings("method.gate=none", "reader.name=llama3_8b", "dataset.name=hotpotqa")
    n = 40
    em = np.zeros((n, 3))
    em[:4, 1] = 100.0
    sps = np.full((n, 3, 1, 2, 1, 5, 5, 8), NAN)
    sps[:, :, 0, 0, 0, 2, 0, 5] = [2.0, 1.0, 3.0]
    base = pool()
    wide = pool(
        questions=[base.questions[0]] * n,
        labelled=np.ones(n, bool),
        quality=Quality(em, em, em),
        raw=Quality(em[:, 0], em[:, 0], em[:, 0]),
        closed=Quality(em[:, 0], em[:, 0], em[:, 0]),
        sps=sps,
        summaries=[["s"] * 3] * n,
        predictions=[["a", "b", "c"]] * n,
        **{
            name: np.ones((n, 3))
            for name in (
                *("tokens", "first_token", "nll", "longppl", "question_nll", "answer_nll", "compressor_nll"),
                *("reading_tokens", "compressor_tokens"),
            )
        },
        ratio=np.ones((n, 3, 1, 2)),
    )
    row = next(row for row in table(wide, s, choose(wide, s)) if row.name == "xcompress")
    assert row.em_difference.low is not None and row.em_difference.low > 0
    assert row.verdicts["em"][0] == "INCONCLUSIVE" and "the test does not" in row.verdicts["em"][1]
    assert "not the paper's cell: the compressor is smollm2_135m, the method is another variant" in row.verdicts["em"][1]


def test_an_all_unusable_pool_falls_back_to_the_initial_summary() -> None:
    """Also where the initial summary does not compete (method.include_initial=false)."""
    choices = choose(pool(), settings("method.include_initial=false"))
    assert choices["lowest_longppl"].picks.tolist() == [0, 0, 0]  # type: ignore[union-attr]
