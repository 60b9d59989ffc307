"""Where the paper and the authors' release say different things, each point changed alone, and the whole of both.

The starting point is the paper's column: embedding, not centred, 95 % of singular values, choice among final summaries. Every
row says what it reads (EM, F1), how that differs from the starting point on the same questions, and how often both choose the
same candidate. Rows that need another run say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis import output, stored
from analysis.about import sentence
from analysis.load import Pool
from analysis.stats import Estimate, bootstrap_table, holm
from analysis.table1 import Choice, choose, exact_p
from xcompress.settings import MethodSettings, Settings

PAPER = MethodSettings("paper", gate="none")
_PLAIN = ("embedding", False, "values")  # the paper's subspace as (matrix, centred, energy of)
# Its three points changed alone, then together.
_SUBSPACES = {
    "matrix: q_proj of block L-1": ("q_proj", False, "values"),
    "centring: column mean removed": ("embedding", True, "values"),
    "95 % of squared singular values": ("embedding", False, "squares"),
    "all three: PCA of q_proj": ("q_proj", True, "squares"),
}
_TOKENS = {"first token left out of pooling": {"first_token": False}, "after a start token": {"start_token": True}}


@dataclass(frozen=True)
class Difference:
    """One point of difference.

    Attributes:
        point: what was changed.
        against: the row it is compared with.
        em, f1: of what it reads, per cent.
        em_difference, f1_difference: to ``against`` on the same questions, points.
        em_p: exact test of the EM difference, Holm over the table.
        same: share of questions in which it reads the same candidate; None where candidates differ.
        compressor_tokens: a question.
    """

    point: str
    against: str
    em: Estimate
    f1: Estimate
    em_difference: Estimate
    f1_difference: Estimate
    em_p: float | None
    same: float | None
    compressor_tokens: float | None


def differences(pool: Pool, settings: Settings) -> list[Difference]:
    """All points, in the order of the table."""
    plain, gated = "the paper's SPS, no gate", "the paper's SPS and gate"
    rows: list[tuple[str, str, Choice]] = [(plain, plain, _choice(pool, settings, _PLAIN))]
    rows += [(point, plain, _choice(pool, settings, subspace)) for point, subspace in _SUBSPACES.items()]
    rows += [(f"tokens: {rule}", plain, _choice(pool, settings, _PLAIN, **change)) for rule, change in _TOKENS.items()]
    rows += [(gated, gated, _choice(pool, settings, _PLAIN, gate="paper"))]
    rows += [("gate: rolling", gated, _choice(pool, settings, _PLAIN, gate="release"))]
    rows += [
        (
            "candidates, gate and subspace: the release's, post-hoc over sampled summaries",
            gated,
            _choice(pool, settings, _SUBSPACES["all three: PCA of q_proj"], gate="release"),
        )
    ]
    method = settings.method
    found = choose(pool, settings)[method.name]
    if method.policy != "stepwise":
        nothing = np.full(len(pool.questions), np.nan)
        found = Choice(nothing, nothing, nothing, nothing, reason="not in this run: method=xcompress_release")
    rows += [(f"choice in every round ({method.name if method.policy == 'stepwise' else 'xcompress_release'})", gated, found)]
    return _estimates(rows, pool, settings)


def _choice(pool: Pool, settings: Settings, subspace: tuple[str, bool, str], **changes: Any) -> Choice:
    """The choice of the paper's variant with these changes; one that was not scored says so."""
    nothing = np.full(len(pool.questions), np.nan)
    names = [
        name
        for name in pool.axes["subspace"]
        if (entry := settings.scoring.subspaces[name]).rows == "all"
        and (entry.matrix, entry.center, entry.energy_of) == subspace
    ]
    if not names:
        wanted = f"matrix: {subspace[0]}, center: {str(subspace[1]).lower()}, energy_of: {subspace[2]}"
        return Choice(nothing, nothing, nothing, nothing, reason=f"not scored: scoring.subspaces has no {{{wanted}}}")
    method = replace(PAPER, subspace=names[0], **changes)
    if method.start_token and method.start_token not in pool.axes["start_token"]:
        return Choice(nothing, nothing, nothing, nothing, reason="the tokenizer has no start token, or it was not scored")
    return choose(pool, replace(settings, method=method))[method.name]


def _estimates(rows: list[tuple[str, str, Choice]], pool: Pool, settings: Settings) -> list[Difference]:
    """The rows' estimates; every interval comes from the same resampled questions."""
    by_name = {point: choice for point, _, choice in rows}
    known = pool.labelled
    options: Any = {
        "seed": settings.seed,
        "level": settings.statistics.level,
        "resamples": settings.statistics.resamples,
    }
    estimates: list[dict[str, Estimate]] = []
    p_values: list[float | None] = []
    for point, against, choice in rows:
        base = by_name[against]
        reason = choice.reason or base.reason or ("" if known.any() else "no question has a gold answer")
        row: dict[str, Estimate] = {}
        for metric in ("em", "f1"):
            if reason:
                row |= dict.fromkeys((metric, f"{metric}_difference"), Estimate(None, None, None, 0, reason))
                continue
            table = np.stack([getattr(base, metric)[known], getattr(choice, metric)[known]], 1)
            row[metric] = bootstrap_table(table, **options)[1]
            difference = bootstrap_table(table, **options, reference=0)[1]
            row[f"{metric}_difference"] = Estimate(None, None, None, 0, "the reference") if point == against else difference
        estimates.append(row)
        tested = not reason and point != against
        p_values.append(exact_p(choice.em[known], base.em[known], settings.seed) if tested else None)
    corrected = holm(p_values)
    return [
        Difference(
            point=point,
            against=against,
            em=row["em"],
            f1=row["f1"],
            em_difference=row["em_difference"],
            f1_difference=row["f1_difference"],
            em_p=p,
            same=_same(choice, by_name[against]),
            compressor_tokens=None if choice.reason else float(np.nanmean(choice.compressor_tokens)),
        )
        for (point, against, choice), row, p in zip(rows, estimates, corrected, strict=True)
    ]


def _same(choice: Choice, base: Choice) -> float | None:
    if choice.picks is None or base.picks is None or choice.reason or base.reason:
        return None
    return float((choice.picks == base.picks).mean())


def write(pool: Pool, settings: Settings, folder: Path) -> list[Difference]:
    """``differences.{csv,md,json}``."""
    note = sentence(pool, settings)
    found = differences(pool, settings)
    records = [
        {
            "point": row.point,
            "against": row.against,
            **output.flat("em", row.em),
            **output.flat("f1", row.f1),
            **output.flat("em_difference", row.em_difference),
            **output.flat("f1_difference", row.f1_difference),
            "em_p_holm": row.em_p,
            "same_candidate": row.same,
            "compressor_tokens": row.compressor_tokens,
        }
        for row in found
    ]
    headings = ["changed", "EM", "F1", "EM difference", "F1 difference", "p (EM, Holm)", "same candidate", "compressor tokens"]
    explained = (__doc__ or "").split("\n\n", 1)[1].strip().replace("\n", " ")
    lines = ["# Paper and release, point by point", "", note, "", explained, ""]
    for against in dict.fromkeys(row.against for row in found):
        lines += [f"## Against: {against}", ""]
        rows = [
            [
                row.point,
                output.cell(row.em),
                output.cell(row.f1),
                output.cell(row.em_difference, True),
                output.cell(row.f1_difference, True),
                "-" if row.em_p is None else f"{row.em_p:.2g}",
                "-" if row.same is None else f"{row.same:.0%}",
                "-" if row.compressor_tokens is None else f"{row.compressor_tokens:.0f}",
            ]
            for row in found
            if row.against == against
        ]
        lines += [output.markdown(headings, rows)]
    dtypes = f"scoring in {settings.method.scoring_dtype or settings.reader.dtype}"
    dtypes += f", reading in {settings.method.reading_dtype or settings.reader.dtype}"
    lines += [
        f"dtype: this run is {dtypes}. The release scores in float32 and reads in bfloat16: method.scoring_dtype and"
        " method.reading_dtype; another dtype is another run, whose answers are stored beside these.",
        "",
    ]
    output.write_table(folder, "differences", records, "\n".join(lines), {"note": note})
    return found


if __name__ == "__main__":
    stored.command(write)
