"""What the run says about each of the paper's claims, with what it rests on. Every claim is a difference with the paper's sign.

REPRODUCED: our interval excludes 0 on the paper's side. CONTRADICTED: on the other side. INCONCLUSIVE: neither, with the
smallest difference this n could have detected. NOT RUN: no figure, and why. A run whose reader or data set the paper did not
use speaks about the claim, not about the paper's figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from analysis import output, stored
from analysis.ablations import choice_by_sps, expected_quality
from analysis.about import sentence
from analysis.correlation import metrics
from analysis.load import Floats, Pool
from analysis.stats import (
    Estimate,
    minimum_detectable_difference,
    paired_bootstrap,
    within_correlation_difference,
    within_group_pearson,
)
from analysis.table1 import Choice, choose, exact_p
from xcompress.settings import Settings

PAPER = Path(__file__).parent / "paper" / "claims.yaml"


@dataclass(frozen=True)
class Verdict:
    """One claim: its label, our figure (positive: the paper's side), and whether it survives correction for all claims."""

    claim: str
    paper: str
    unit: str
    estimate: Estimate
    label: str
    detectable: float | None
    corrected: str


def verdicts(pool: Pool, settings: Settings, choices: Mapping[str, Choice]) -> list[Verdict]:
    """All claims of the paper that this run can speak to.

    ``corrected`` is the label at the level 1 - (1 - level) / m for m claims (Bonferroni).
    """
    level = settings.statistics.level
    claims = _claims(pool, settings, choices, level)
    strict = _claims(pool, settings, choices, 1 - (1 - level) / len(claims))
    alpha = 1 - level
    return [
        Verdict(
            claim=own.claim,
            paper=own.paper,
            unit=own.unit,
            estimate=own.estimate,
            label=label(own.estimate, own.p_value, alpha),
            detectable=own.detectable,
            corrected=label(corrected.estimate, corrected.p_value, alpha / len(claims)),
        )
        for own, corrected in zip(claims, strict, strict=True)
    ]


@dataclass(frozen=True)
class _Claim:
    """A claim with the paper's figure, our difference, the exact test's p-value (points) and the detectable difference."""

    claim: str
    paper: str
    unit: str
    estimate: Estimate
    p_value: float | None = None
    detectable: float | None = None


LEAST_QUESTIONS = 30  # with fewer that vary, a bootstrap over questions is far too narrow (see analysis/stats.py)


def label(estimate: Estimate, p_value: float | None = None, alpha: float = 0.05) -> str:
    """The verdict on a difference whose positive side is the paper's.

    An interval that excludes 0 decides only if the exact test does not object (p above ``alpha``) and, for a correlation, if
    at least ``LEAST_QUESTIONS`` questions vary.
    """
    if estimate.value is None:
        return "NOT RUN"
    if estimate.low is None or estimate.high is None or estimate.low <= 0 <= estimate.high:
        return "INCONCLUSIVE"
    if p_value is not None and p_value > alpha:
        return "INCONCLUSIVE"
    if estimate.groups is not None and estimate.groups < LEAST_QUESTIONS:
        return "INCONCLUSIVE"
    return "REPRODUCED" if estimate.low > 0 else "CONTRADICTED"


def _claims(pool: Pool, settings: Settings, choices: Mapping[str, Choice], level: float) -> list[_Claim]:
    known = pool.labelled
    options: Any = {"seed": settings.seed, "level": level, "resamples": settings.statistics.resamples}

    papers: dict[str, str] = yaml.safe_load(PAPER.read_text(encoding="utf-8"))

    def paired(claim: str, better: Floats, worse: Floats, reason: str = "") -> _Claim:
        paper = papers.get(claim, "implied")
        ours, theirs = better[known], worse[known]
        if reason or not len(ours):
            absent = Estimate(None, None, None, 0, reason or "no question has a gold answer")
            return _Claim(claim, paper, "points", absent)
        least = minimum_detectable_difference(ours - theirs, level=level)
        p_value = exact_p(ours, theirs, settings.seed)
        return _Claim(claim, paper, "points", paired_bootstrap(ours, theirs, **options), p_value, least)

    method = choices[settings.method.name]
    compact, ungated, chance = choices["compact"], choices["lowest_sps"], choices["random"]
    claims = [
        paired("xCompress beats CompAct (EM)", method.em, compact.em, method.reason),
        paired("xCompress beats CompAct (F1)", method.f1, compact.f1, method.reason),
        paired("lowest SPS beats lowest PPL (EM)", ungated.em, choices["lowest_ppl"].em),
        paired("lowest SPS beats lowest PPL (F1)", ungated.f1, choices["lowest_ppl"].f1),
        paired("lowest SPS beats a random candidate (EM)", ungated.em, chance.em),
        paired("lowest SPS beats a random candidate (F1)", ungated.f1, chance.f1),
    ]
    default, _ = choice_by_sps(pool, settings)
    for name, change in (
        ("max pooling beats mean pooling (EM)", {"pooling": "mean"}),
        ("max pooling beats the last token (EM)", {"pooling": "last"}),
        ("the penultimate layer beats the last (EM)", {"layer": "last"}),
    ):
        claims.append(paired(name, default, choice_by_sps(pool, settings, **change)[0]))
    most = settings.generation.candidates
    if most > 1:
        few, many = (expected_quality(pool, settings, pool.quality.em, k, with_initial=True) for k in (1, most))
        claims.append(paired(f"lowest SPS of {most} samples beats that of 1 (EM)", many, few))
    return claims + _correlation_claims(pool, settings, papers, options)


def _correlation_claims(pool: Pool, settings: Settings, papers: Mapping[str, str], options: Any) -> list[_Claim]:
    """SPS tracks quality, and better than PPL and LongPPL do, within questions."""
    values = metrics(pool, settings)
    groups = np.repeat(np.arange(len(pool.questions)), pool.quality.em.shape[1])
    known = np.repeat(pool.labelled, pool.quality.em.shape[1])
    claims: list[_Claim] = []
    for quality, y in (("EM", pool.quality.em), ("F1", pool.quality.f1)):
        x = -values["sps"].ravel()[known]
        target = y.ravel()[known]
        name = f"SPS tracks {quality} within a question"
        claims.append(_Claim(name, papers.get(name, "implied"), "r", within_group_pearson(x, target, groups[known], **options)))
        for other, rival_name in (("ppl", "PPL"), ("longppl", "LongPPL")):
            rival = -values[other].ravel()[known]
            estimate = (
                within_correlation_difference(x, rival, target, groups[known], **options)
                if np.isfinite(rival).any()
                else Estimate(None, None, None, 0, f"no {rival_name} (not computed, or no key token)")
            )
            claims.append(_Claim(f"SPS tracks {quality} better than {rival_name} within a question", "implied", "r", estimate))
    return claims


def write(pool: Pool, settings: Settings, folder: Path) -> list[Verdict]:
    """``verdicts.{csv,md,json}``."""
    note = sentence(pool, settings)
    found = verdicts(pool, settings, choose(pool, settings))
    records = [
        {
            "claim": verdict.claim,
            "label": verdict.label,
            "corrected": verdict.corrected,
            "unit": verdict.unit,
            **output.flat("difference", verdict.estimate),
            "questions": verdict.estimate.groups or verdict.estimate.n,
            "detectable": verdict.detectable,
            "paper": verdict.paper,
        }
        for verdict in found
    ]
    where = f"{settings.reader.name} reading {settings.dataset.name}, summaries by {settings.compressor.name}"
    about = {"note": note, "rests_on": where, "reader": settings.reader.name, "dataset": settings.dataset.name}
    output.write_table(folder, "verdicts", records, "\n".join(["# Verdicts", "", note, "", text(found, where)]), about)
    return list(found)


def text(found: Sequence[Verdict], where: str) -> str:
    """The verdicts as Markdown, with what they rest on."""
    rows = []
    for verdict in found:
        digits = 1 if verdict.unit == "points" else 2
        figure = output.cell(verdict.estimate, True, digits)
        n = verdict.estimate.groups or verdict.estimate.n
        least = f" (could detect {verdict.detectable:.1f})" if verdict.label == "INCONCLUSIVE" and verdict.detectable else ""
        if verdict.estimate.groups is not None and verdict.estimate.groups < LEAST_QUESTIONS:
            least = f" (only {n} questions vary, {LEAST_QUESTIONS} needed)"
        rows.append([verdict.claim, f"**{verdict.label}**", figure + least, str(n), verdict.corrected, verdict.paper])
    headings = ["claim", "verdict", "our difference (positive: the paper's side)", "questions", "corrected", "paper"]
    return (
        f"These rest on {where}, and speak about the claims, not about the paper's figures, wherever reader or data differ from"
        " the paper's. The fifth column repeats the verdict with intervals widened for the number of claims (Bonferroni).\n\n"
        + output.markdown(headings, rows)
    )


if __name__ == "__main__":
    stored.command(write)
