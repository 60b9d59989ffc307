"""Table 1: every selector on the same pool, against CompAct, with intervals, cost and the paper's cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from analysis import figures, output, stored
from analysis.about import sentence
from analysis.load import Floats, Pool
from analysis.own_selectors import own_scores
from analysis.stats import (
    Estimate,
    bootstrap_table,
    holm,
    mcnemar_exact,
    minimum_detectable_difference,
    paired_permutation,
    verdict,
)
from xcompress.answers import normalize
from xcompress.selectors import RollingGate, gate_skips, majority, oracle, pick
from xcompress.settings import MethodSettings, Settings
from xcompress.store import write_atomically, write_json

PAPER = Path(__file__).parent / "paper" / "table1.yaml"
HEADINGS = (
    "method",
    "n",
    "EM",
    "F1",
    "EM minus CompAct",
    "F1 minus CompAct",
    "summary tokens",
    "compressor tokens",
    "selection tokens",
    "paper EM / F1",
)
_COSTS = (
    "Compressor tokens: prompt and new tokens of every trajectory a method needs, each prompt counted once a trajectory (an"
    " engine that shares prefixes computes fewer). Selection tokens: reader tokens of the choice itself. Means a question."
)


@dataclass(frozen=True)
class Choice:
    """What a method reads: per question EM, F1, summary tokens and compressor tokens (expectations for the random choice).

    ``selection_tokens`` are reader tokens a question that the choice itself takes, beside reading what was chosen.

    ``picks`` are candidate indices [Q], or None where the method picks none. ``reason`` says why a method could not run.
    """

    em: Floats
    f1: Floats
    summary_tokens: Floats
    compressor_tokens: Floats
    selection_tokens: float = 0.0
    picks: np.ndarray[Any, Any] | None = None
    fallbacks: int = 0
    skipped: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table. Estimates are in per cent; differences are to CompAct."""

    name: str
    label: str
    em: Estimate
    f1: Estimate
    em_difference: Estimate
    f1_difference: Estimate
    em_p: float | None
    f1_p: float | None
    summary_tokens: float | None
    compressor_tokens: float | None
    selection_tokens: float | None
    fallbacks: int
    skipped: int | None
    paper: list[float] | None
    verdicts: dict[str, list[str]] = field(default_factory=dict)


def choose(pool: Pool, settings: Settings) -> dict[str, Choice]:
    """The choice of every method, in the table's order."""
    method = settings.method
    start = 0 if method.include_initial or settings.generation.candidates == 0 else 1
    members = np.arange(start, pool.quality.em.shape[1])
    everything = pool.compressor_tokens.sum(1) if method.include_initial else pool.compressor_tokens[:, members].sum(1)
    rows = np.arange(len(pool.questions))

    def picked(
        picks: Any, cost: Floats, fallbacks: int = 0, skipped: int | None = None, selection_tokens: float = 0.0
    ) -> Choice:
        picks = np.asarray(picks)
        em, f1, tokens = pool.quality.em[rows, picks], pool.quality.f1[rows, picks], pool.tokens[rows, picks]
        return Choice(em, f1, tokens, cost, selection_tokens, picks, fallbacks, skipped)

    def by(scores: Floats, selection_tokens: float = 0.0) -> Choice:
        found = [pick(row, method.include_initial) for row in scores]
        return picked([at for at, _ in found], everything, sum(bare for _, bare in found), None, selection_tokens)

    nothing = np.zeros(len(rows))
    blank = np.where(pool.tokens > 0, pool.tokens, np.nan)  # a blank summary is not "the shortest"
    best = [
        members[oracle(list(f), list(e))] if np.isfinite(f).all() else 0
        for f, e in zip(pool.quality.f1[:, members], pool.quality.em[:, members], strict=True)
    ]
    sps = pool.view(method)
    scoring = float(np.nansum(pool.tokens[:, members], 1).mean())  # every summary once through the reader
    reading = float(np.nansum(pool.reading_tokens[:, members], 1).mean())
    rival = pool.rival_tokens
    votes = [  # a blank summary has no vote
        majority([normalize(answers[k]) if summaries[k].strip() else "" for k in members])
        for answers, summaries in zip(pool.predictions, pool.summaries, strict=True)
    ]
    choices = {
        "closed_book": Choice(pool.closed.em, pool.closed.f1, nothing, nothing),
        "raw_passages": Choice(pool.raw.em, pool.raw.f1, nothing * np.nan, nothing),
        "compact": picked(rows * 0, pool.compressor_tokens[:, 0]),
        "random": Choice(
            pool.quality.em[:, members].mean(1),
            pool.quality.f1[:, members].mean(1),
            pool.tokens[:, members].mean(1),
            pool.compressor_tokens[:, members].mean(1),
        ),
        "shortest": by(blank),
        "longest": by(-blank),
        "lowest_ppl": by(pool.nll, scoring),
        "lowest_longppl": by(pool.longppl, rival["longppl"]) if rival["longppl"] else _not_computed(len(rows)),
        "compressor": by(pool.compressor_nll),
        "question": by(pool.question_nll, rival["question"]) if rival["question"] else _not_computed(len(rows)),
        "confidence": by(pool.answer_nll, reading),
        "majority": picked(members[votes], everything, selection_tokens=reading),
        "lowest_sps": by(sps, scoring),
    }
    choices |= {name: by(scores, scoring) for name, scores in own_scores(pool, settings).items()}
    choices[method.name] = _gated(pool, settings, choices["lowest_sps"], picked)
    choices["oracle"] = picked(best, everything)
    return choices


def _not_computed(questions: int) -> Choice:
    nothing = np.full(questions, np.nan)
    return Choice(nothing, nothing, nothing, nothing, reason="not computed: scoring.rivals=true and the score stage")


def gate_decisions(pool: Pool, method: MethodSettings) -> npt.NDArray[np.bool_] | None:
    """Which questions [Q] keep their initial summary; None where the gate cannot be set."""
    ratios = pool.initial_ratio(method)
    if method.gate == "none":
        return np.zeros(len(ratios), bool)
    if method.gate == "release":
        gate = RollingGate(method.gate_share, method.gate_pool)
        return np.array([gate.skips(ratio) for ratio in ratios])
    threshold = pool.threshold(method)
    return None if threshold is None else np.array([gate_skips(ratio, threshold) for ratio in ratios])


def _gated(pool: Pool, settings: Settings, ungated: Choice, picked: Callable[..., Choice]) -> Choice:
    """Gate, then the lowest SPS: a question the gate skips costs and reads its initial summary alone."""
    method = settings.method
    assert ungated.picks is not None
    nothing = np.full(len(pool.questions), np.nan)
    if method.policy == "stepwise":
        found = pool.stepwise
        if found is None:
            return Choice(nothing, nothing, nothing, nothing, reason="not computed: the stepwise stage")
        return Choice(
            found.quality.em,
            found.quality.f1,
            found.tokens,
            found.compressor_tokens,
            float(found.scored_tokens.mean()),
            skipped=int((~found.drawn).sum()),
        )
    skips = gate_decisions(pool, method)
    if skips is None:
        return Choice(
            nothing, nothing, nothing, nothing, reason="no calibration questions: set dataset.calibration_path or _holdout"
        )
    if method.gate == "none":
        return picked(ungated.picks, ungated.compressor_tokens, ungated.fallbacks, 0, ungated.selection_tokens)
    # Sampling follows the gate, so its cost always includes the initial summary.
    cost = np.where(skips, pool.compressor_tokens[:, 0], pool.compressor_tokens.sum(1))
    # The ratio comes with the initial summary's scoring pass; the others are scored only where they were sampled.
    scored = np.where(skips, pool.tokens[:, 0], np.nansum(pool.tokens, 1))
    picks = np.where(skips, 0, ungated.picks)
    return picked(picks, cost, ungated.fallbacks, int(skips.sum()), float(np.nanmean(scored)))


def labels(settings: Settings) -> dict[str, str]:
    """What the rows are called."""
    return {
        "closed_book": "closed book",
        "raw_passages": "raw passages",
        "compact": "CompAct (initial)",
        "random": "random candidate",
        "shortest": "shortest",
        "longest": "longest",
        "lowest_ppl": "lowest PPL",
        "lowest_longppl": "lowest LongPPL",
        "compressor": "compressor's likeliest",
        "question": "question likelihood",
        "confidence": "answer confidence",
        "majority": "majority answer",
        "lowest_sps": "lowest SPS",
        **{name: name.replace("_", " ") for name in settings.selectors},
        settings.method.name: _own_label(settings.method),
        "oracle": "oracle",
    }


def _own_label(method: MethodSettings) -> str:
    gate = {"paper": "gate + SPS", "release": "rolling gate + SPS", "none": "no gate"}[method.gate]
    return f"xCompress ({gate}{', stepwise' if method.policy == 'stepwise' else ''})"


def table(pool: Pool, settings: Settings, choices: dict[str, Choice]) -> list[Row]:
    """The rows of Table 1. Means are over labelled questions; resampled questions are the same for every row."""
    names = list(choices)
    known = pool.labelled
    reference = names.index("compact")
    level, resamples, seed = settings.statistics.level, settings.statistics.resamples, settings.seed
    estimates: dict[str, list[Estimate]] = {}
    p_values: dict[str, list[float | None]] = {}
    detectable: dict[str, list[float | None]] = {}
    for metric in ("em", "f1"):
        columns = {name: getattr(choice, metric)[known] for name, choice in choices.items()}
        usable = [name for name in names if not choices[name].reason and known.any()]
        if not usable:
            continue
        matrix = np.stack([columns[name] for name in usable], 1)
        own = bootstrap_table(matrix, seed=seed, level=level, resamples=resamples)
        against = bootstrap_table(matrix, seed=seed, level=level, resamples=resamples, reference=usable.index("compact"))
        estimates[metric] = [own[usable.index(n)] if n in usable else _absent(choices[n].reason) for n in names]
        estimates[metric + "_difference"] = [
            against[usable.index(n)] if n in usable else _absent(choices[n].reason) for n in names
        ]
        p_values[metric] = holm(
            [None if n not in usable or n == "compact" else exact_p(columns[n], columns["compact"], seed) for n in names]
        )
        detectable[metric] = [
            None if n not in usable else minimum_detectable_difference(columns[n] - columns["compact"], level=level)
            for n in names
        ]
    none = _absent("no question has a gold answer")
    cells = paper_cells(settings)
    rows = []
    for at, name in enumerate(names):
        get = {key: values[at] for key, values in estimates.items()}
        choice = choices[name]
        rows.append(
            Row(
                name=name,
                label=labels(settings)[name],
                em=get.get("em", none),
                f1=get.get("f1", none),
                em_difference=get.get("em_difference", none) if at != reference else _absent("the reference"),
                f1_difference=get.get("f1_difference", none) if at != reference else _absent("the reference"),
                em_p=p_values["em"][at] if p_values else None,
                f1_p=p_values["f1"][at] if p_values else None,
                summary_tokens=_mean(choice.summary_tokens),
                compressor_tokens=_mean(choice.compressor_tokens),
                selection_tokens=None if choice.reason else choice.selection_tokens,
                fallbacks=choice.fallbacks,
                skipped=choice.skipped,
                paper=cells.get({settings.method.name: "xcompress"}.get(name, name)),
                verdicts=_verdicts(
                    name,
                    settings,
                    get,
                    {m: values[at] for m, values in detectable.items()},
                    {m: values[at] for m, values in p_values.items()},
                    cells,
                ),
            )
        )
    return rows


def paper_cells(settings: Settings) -> dict[str, list[float]]:
    """The paper's [EM, F1] for this reader and data set by row name; empty where no cell is known."""
    paper: dict[str, Any] = yaml.safe_load(PAPER.read_text(encoding="utf-8"))
    cells: dict[str, list[float]] = paper.get(settings.reader.name, {}).get(settings.dataset.name, {})
    return cells


def differs_from_paper(settings: Settings) -> list[str]:
    """In what a run differs from the paper's cell of the same reader and data set; empty if it may speak of the cell."""
    differs = []
    if settings.compressor.name != "compact_7b":
        differs.append(f"the compressor is {settings.compressor.name}")
    if settings.method != MethodSettings("xcompress") or settings.generation.candidates != 5:
        differs.append("the method is another variant")
    if settings.limit is not None and settings.limit < 500:
        differs.append(f"only {settings.limit} questions are used")
    return differs


def _verdicts(
    name: str,
    settings: Settings,
    estimates: dict[str, Estimate],
    detectable: dict[str, float | None],
    p_values: dict[str, float | None],
    cells: dict[str, list[float]],
) -> dict[str, list[str]]:
    """Verdict and sentence per metric for the paper's claim "xCompress beats CompAct"; only that row has a paper difference.

    The exact test guards the interval: with few questions that differ, a bootstrap interval can exclude 0 where McNemar's test
    (Holm over the table) does not; that is INCONCLUSIVE.
    """
    if name != settings.method.name:
        return {}
    found = {}
    for index, metric in enumerate(("em", "f1")):
        estimate = estimates.get(f"{metric}_difference", _absent("no question has a gold answer"))
        # Without a cell of this reader and data set, the claim is that the difference is positive; its size is not compared.
        difference = cells["xcompress"][index] - cells["compact"][index] if cells else 1.0
        label, sentence = verdict(estimate, difference, detectable.get(metric), p_value=p_values.get(metric))
        differs = differs_from_paper(settings)
        if not cells:
            sentence = _claim_only(label, estimate, detectable.get(metric), p_values.get(metric), settings)
        elif differs:
            sentence += f"; this is about the claim, not the paper's cell: {', '.join(differs)}"
        found[metric] = [label, sentence]
    return found


def _claim_only(label: str, estimate: Estimate, detectable: float | None, p_value: float | None, settings: Settings) -> str:
    cell = f"{settings.reader.name} on {settings.dataset.name}"
    where = f"the paper has no (known) cell for {cell}: this is about the claim, not a cell"
    if estimate.value is None:
        return f"not run: {estimate.reason}; {where}"
    interval = "" if estimate.low is None else f" [{estimate.low:+.1f}, {estimate.high:+.1f}]"
    test = "" if p_value is None else f", p = {p_value:.2g} (Holm over the table)"
    least = f"; n = {estimate.n} could have detected {detectable:.1f}" if label == "INCONCLUSIVE" and detectable else ""
    return f"difference to CompAct {estimate.value:+.1f}{interval} points{test}{least}; {where}"


def _absent(reason: str) -> Estimate:
    return Estimate(None, None, None, 0, reason)


def exact_p(values: Floats, reference: Floats, seed: int) -> float | None:
    """Exact McNemar where both sides are 0 or 100 (EM), else a paired permutation test."""
    if np.isin(values, (0.0, 100.0)).all() and np.isin(reference, (0.0, 100.0)).all():
        return mcnemar_exact(values / 100, reference / 100)
    return paired_permutation(values, reference, seed=seed)


def _mean(values: Floats) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def cells(row: Row) -> list[str]:
    """A row under :data:`HEADINGS`."""
    return [
        row.label,
        str(row.em.n),
        output.cell(row.em),
        output.cell(row.f1),
        output.cell(row.em_difference, signed=True),
        output.cell(row.f1_difference, signed=True),
        "-" if row.summary_tokens is None else f"{row.summary_tokens:.0f}",
        "-" if row.compressor_tokens is None else f"{row.compressor_tokens:.0f}",
        "-" if row.selection_tokens is None else f"{row.selection_tokens:.0f}",
        f"{row.paper[0]} / {row.paper[1]}" if row.paper else "-",
    ]


def _markdown(rows: Sequence[Row], note: str, settings: Settings) -> str:
    lines = [f"# Table 1: {settings.reader.name} on {settings.dataset.name}", "", note, ""]
    lines += [output.markdown(HEADINGS, [cells(row) for row in rows])]
    lines += ['Verdicts on "xCompress beats CompAct":', ""]
    lines += [f"- {metric}: **{label}**: {sentence}" for metric, label, sentence in spoken(rows)]
    lines += ["", _COSTS]
    skipped = [row for row in rows if row.skipped is not None]
    if skipped:
        lines += ["", f"The gate kept the initial summary of {skipped[0].skipped} of {skipped[0].em.n} questions."]
    return "\n".join(lines) + "\n"


def spoken(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Metric, label and sentence of every verdict."""
    return [(metric.upper(), *found) for row in rows for metric, found in row.verdicts.items()]  # type: ignore[misc]


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {"method": row.name, "label": row.label, "n": row.em.n}
    for key, estimate in (
        ("em", row.em),
        ("f1", row.f1),
        ("em_difference", row.em_difference),
        ("f1_difference", row.f1_difference),
    ):
        flat |= {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}
    flat |= {
        "em_p_holm": row.em_p,
        "f1_p_holm": row.f1_p,
        "summary_tokens": row.summary_tokens,
        "compressor_tokens": row.compressor_tokens,
        "selection_tokens": row.selection_tokens,
        "gate_skipped": row.skipped,
        "fallbacks": row.fallbacks,
        "paper_em": row.paper[0] if row.paper else None,
        "paper_f1": row.paper[1] if row.paper else None,
        "em_verdict": row.verdicts.get("em", [None])[0],
        "f1_verdict": row.verdicts.get("f1", [None])[0],
        "reason": row.em.reason,
    }
    return flat


def write(pool: Pool, settings: Settings, folder: Path) -> list[Row]:
    """``table1.{csv,md,json,svg}``."""
    rows = table(pool, settings, choose(pool, settings))
    note = sentence(pool, settings)
    about = {
        "reader": settings.reader.name,
        "compressor": settings.compressor.name,
        "dataset": settings.dataset.name,
        "method": asdict(settings.method),
        "note": note,
    }
    flat = [_flat(row) for row in rows]
    output.write_table(folder, "table1", flat, _markdown(rows, note, settings), about)
    full = [{**record, "verdicts": row.verdicts} for record, row in zip(flat, rows, strict=True)]
    write_json(folder / "table1.json", {**about, "rows": full})
    write_atomically(folder / "table1.svg", figures.differences(rows, settings))
    return rows


if __name__ == "__main__":
    stored.command(write)
