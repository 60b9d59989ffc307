"""Does a metric track answer quality? Four forms of correlation, since each answers another question.

* pooled: over all candidates of all questions; mixes "which summary" with "which question".
* within: both sides minus their question's mean; the form that selection depends on.
* binned: Pearson of the bin means of deciles of the metric; averages noise away, so any monotone trend comes near 1.
* partial: pooled, given the summary's token count (a maximum over more tokens is larger).

The sign is turned so that positive means "the metric prefers better summaries" (all metrics prefer the lowest value).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from analysis import figures, output, stored
from analysis.about import sentence
from analysis.load import Floats, Pool
from analysis.stats import (
    Estimate,
    binned_pearson,
    clustered_pearson,
    partial_pearson,
    within_group_pearson,
)
from xcompress.settings import Settings
from xcompress.store import write_atomically

PAPER = Path(__file__).parent / "paper" / "correlations.yaml"
FORMS = ("pooled", "within", "binned", "partial")


@dataclass(frozen=True)
class Cell:
    """One correlation. ``paper`` is the paper's figure for this data set, if known (its form is not)."""

    metric: str
    quality: str
    form: str
    estimate: Estimate
    paper: float | None


def metrics(pool: Pool, settings: Settings) -> dict[str, Floats]:
    """Metric values [Q, K + 1] by name; lower is what the metric prefers. Blank summaries have none."""
    return {
        "ppl": pool.nll,  # ranked as NLL: the same order, no overflow
        "longppl": pool.longppl,
        "sps": pool.view(settings.method),
        "question": pool.question_nll,
        "confidence": pool.answer_nll,
        "tokens": np.where(pool.tokens > 0, pool.tokens, np.nan),
    }


def correlations(pool: Pool, settings: Settings) -> list[Cell]:
    """All cells: metric x EM and F1 x form. Undefined ones carry their reason; they are never 0."""
    paper: dict[str, Any] = yaml.safe_load(PAPER.read_text(encoding="utf-8")).get(settings.dataset.name, {})
    groups = np.repeat(np.arange(len(pool.questions)), pool.quality.em.shape[1])
    known = np.repeat(pool.labelled, pool.quality.em.shape[1])
    length = np.where(pool.tokens > 0, pool.tokens, np.nan).ravel()[known]
    options: Any = {
        "seed": settings.seed,
        "level": settings.statistics.level,
        "resamples": settings.statistics.resamples,
    }
    cells = []
    for metric, values in metrics(pool, settings).items():
        x = -values.ravel()[known]
        for quality, y in (("em", pool.quality.em.ravel()[known]), ("f1", pool.quality.f1.ravel()[known])):
            for form in FORMS:
                if form == "pooled":
                    estimate = clustered_pearson(x, y, groups[known], **options)
                elif form == "within":
                    estimate = within_group_pearson(x, y, groups[known], **options)
                elif form == "binned":
                    estimate = binned_pearson(x, y, groups[known], **options)
                elif metric == "tokens":
                    estimate = Estimate(None, None, None, 0, "the control itself")
                else:
                    estimate = partial_pearson(x, y, length, groups[known], **options)
                cells.append(Cell(metric, quality, form, estimate, paper.get(metric, {}).get(quality)))
    return cells


def explained(pool: Pool, settings: Settings) -> dict[str, float | None]:
    """Share of the variance of SPS that is explained by the first token's identity, by length, and by the question.

    R^2 of a one-way analysis of variance (first token, question) or of a straight line (length), over all candidates. A share
    near 1 for the first token means that SPS says what the summary's first word is. Groups of one row explain themselves, so
    shares are adjusted for the number of groups (adjusted R^2; may be below 0).
    """
    sps = pool.view(settings.method)
    keep = np.isfinite(sps)
    values = sps[keep]
    rows = np.broadcast_to(np.arange(len(sps))[:, None], sps.shape)[keep]
    return {
        "first token": adjusted_share(values, pool.first_token[keep]),
        "length": _line(values, pool.tokens[keep]),
        "question": adjusted_share(values, rows),
    }


def adjusted_share(values: Floats, labels: np.ndarray[Any, Any]) -> float | None:
    """Adjusted R^2 of the means of groups of equal labels; None where nothing varies or every group is one row."""
    _, codes = np.unique(labels, return_inverse=True)
    groups, n = int(codes.max(initial=-1)) + 1, len(values)
    if n - groups < 1 or groups < 2 or not values.std() > 0:
        return None
    means = np.bincount(codes, values) / np.bincount(codes)
    residual = float(((values - means[codes]) ** 2).sum())
    total = float(((values - values.mean()) ** 2).sum())
    return 1 - residual / (n - groups) / (total / (n - 1))


def _line(values: Floats, x: Floats) -> float | None:
    """Adjusted R^2 of a straight line."""
    if len(values) < 3 or not values.std() > 0 or not x.std() > 0:
        return None
    r = float(np.corrcoef(values, x)[0, 1])
    return 1 - (1 - r * r) * (len(values) - 1) / (len(values) - 2)


def write(pool: Pool, settings: Settings, folder: Path) -> list[Cell]:
    """``correlation.{csv,md,json,svg}`` and what explains the variance of SPS."""
    note = sentence(pool, settings)
    cells = correlations(pool, settings)
    shares = explained(pool, settings)
    records = [
        {
            "metric": cell.metric,
            "quality": cell.quality,
            "form": cell.form,
            **output.flat("r", cell.estimate),
            "questions": cell.estimate.groups,
            "questions_without_variation": cell.estimate.groups_left_out,
            "dropped": cell.estimate.dropped,
            "paper": cell.paper,
        }
        for cell in cells
    ]
    headings = ["metric", "quality", *FORMS, "paper (form not stated)"]
    rows = []
    for metric in dict.fromkeys(cell.metric for cell in cells):
        for quality in ("em", "f1"):
            found = [cell for cell in cells if (cell.metric, cell.quality) == (metric, quality)]
            paper = "-" if found[0].paper is None else f"{found[0].paper:+.3f}"
            rows.append([metric, quality.upper(), *(output.cell(cell.estimate, True, 2) for cell in found), paper])
    within = next(cell.estimate for cell in cells if cell.form == "within" and cell.metric == "sps" and cell.quality == "em")
    lines = [
        "# Correlation with answer quality",
        "",
        note,
        "",
        "Pearson's r with intervals (bootstrap over questions); positive: the metric prefers better summaries. pooled: over all"
        " candidates; within: after subtracting each question's mean, the form that selection depends on; binned: of the means"
        " of deciles of the metric; partial: pooled, given the summary's length.",
        "",
        output.markdown(headings, rows),
        f"Within questions, SPS and EM vary together in {within.groups or 0} questions ({within.n} candidates);"
        f" {within.groups_left_out} questions without variation say nothing and are left out.",
        "",
        "Share of the variance of SPS (adjusted R^2 over all candidates) explained by:",
        "",
        output.markdown(["", "share"], [[name, "n/a" if v is None else f"{v:.3f}"] for name, v in shares.items()]),
    ]
    about = {"note": note, "sps_variance_explained": shares}
    output.write_table(folder, "correlation", records, "\n".join(lines), about)
    write_atomically(folder / "correlation.svg", figures.correlation(cells, settings))
    return cells


if __name__ == "__main__":
    stored.command(write)
