"""Scoring: SPS at every variant, NLL and ratio of real-length texts, against a plain loop and lm-evaluation-harness."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.external import Absent, External
from benchmarks.memory import peak_growth
from benchmarks.table import Row, Section
from benchmarks.timing import Ratio, Series, Spent, interleave, ratio, summary
from benchmarks.workload import Setting, texts
from xcompress.config import compose, to_settings
from xcompress.forward import POOLINGS
from xcompress.reader import Score, TextScorer
from xcompress.settings import ScoringSettings

_BATCH_SIZES = (8, 16, 32, 64)  # of the harness; the fastest is the one compared
_LMEVAL = "pip install 'lm-eval[hf]' in an environment of its own, then XCOMPRESS_LMEVAL_PYTHON=ENVIRONMENT/bin/python"


class PlainLoop:
    """What a script does that follows the authors' release: one text at a time, all hidden states, PCA on the CPU, then PPL.

    The subspace is a PCA of block L-1's query projection (rows as samples) that holds 95 % of the variance; the vector is the
    maximum over the tokens of the penultimate state; NLL is a second pass. transformers does the rest as it comes.
    """

    def __init__(self, setting: Setting) -> None:
        self.model = setting.stock()
        self.tokenizer = setting.loaded.tokenizer
        weight = self.model.model.layers[-2].self_attn.q_proj.weight.detach().double().numpy()
        self.mean = weight.mean(0)
        _, values, components = np.linalg.svd(weight - self.mean, full_matrices=False)
        share = np.cumsum(values**2) / np.sum(values**2)
        self.components = components[: int(np.searchsorted(share, 0.95)) + 1]

    @torch.no_grad()
    def score(self, text: str) -> tuple[float, float | None, float]:
        """SPS, NLL (None for a single token) and concentration ratio."""
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        states = self.model(ids, output_hidden_states=True).hidden_states[-2][0]
        x = states.max(0).values.double().numpy()
        centred = x - self.mean
        sps = float(np.linalg.norm(centred - centred @ self.components.T @ self.components))
        concentration = float(states.mean(0).norm() / states.max(0).values.abs().sum())
        nll = float(self.model(ids, labels=ids).loss) if ids.shape[1] > 1 else None
        return sps, nll, concentration


def scoring_settings() -> ScoringSettings:
    """The program's own defaults: all subspaces, energies and token rules."""
    return to_settings(compose(["experiment=laptop"])).scoring


def check(ours: Sequence[Score | None], plain: Sequence[tuple[float, float | None, float]], scorer: TextScorer) -> list[float]:
    """Largest relative difference of SPS, of the ratio, and absolute difference of NLL, between the two.

    Raises:
        AssertionError: SPS or the ratio differ by more than 1e-5, or NLL by more than 1e-3: the comparison would be worthless.
    """
    axes = scorer.axes
    place = (0, 0, axes["subspace"].index("q_proj"), scorer.blocks - 1, POOLINGS.index("max"), axes["energy"].index(0.95))
    worst = [0.0, 0.0, 0.0]
    for score, (sps, nll, concentration) in zip(ours, plain, strict=True):
        assert score is not None
        found = (abs(score.sps[place] / sps - 1), abs(score.ratio[0, 0] / concentration - 1))
        worst = [max(worst[0], found[0]), max(worst[1], found[1]), worst[2]]
        if nll is not None and score.nll is not None:
            worst[2] = max(worst[2], abs(score.nll - nll))
    assert worst[0] < 1e-5 and worst[1] < 1e-5, f"SPS and ratio differ by {worst[0]:.1e} and {worst[1]:.1e}"
    assert worst[2] < 1e-3, f"NLL differs by {worst[2]:.1e}"
    return [float(value) for value in worst]


def run(setting: Setting) -> Section:
    """The whole comparison. Each repetition takes another part of the texts, so the spread is over texts too."""
    section = Section("Scoring: SPS at all variants, NLL and ratio")
    count, parts = (24, 2) if setting.quick else (200, 4)
    loaded = setting.loaded
    everything = texts(loaded.tokenizer, count)
    portion = [everything[at::parts] for at in range(parts)]
    with tempfile.TemporaryDirectory() as cache:
        scorer = TextScorer(loaded, scoring_settings(), Path(cache))
    plain = PlainLoop(setting)
    ids = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in everything]
    lengths = [len(each) for each in ids]
    section.raw["tokens"] = lengths
    ours: dict[int, Sequence[Score | None]] = {}
    theirs: dict[int, list[tuple[float, float | None, float]]] = {}

    def run_ours(part: int) -> None:
        ours[part] = scorer.score(portion[part])

    def run_plain(part: int) -> None:
        theirs[part] = [plain.score(text) for text in portion[part]]

    for text in everything[:3]:  # warm
        plain.score(text)
    scorer.score(everything[:8])
    sides: dict[str, Callable[[int], Spent | None]] = {"ours": run_ours, "plain loop": run_plain}
    series = interleave(sides, parts, setting.say)
    flat_ours = [score for part in range(parts) for score in ours[part]]
    flat_plain = [score for part in range(parts) for score in theirs[part]]
    worst = check(flat_ours, flat_plain, scorer)
    section.raw["plain loop"] = {name: each.wall for name, each in series.items()}
    found = ratio(series["plain loop"], series["ours"])
    variants = int(np.prod([len(values) for values in scorer.axes.values()]))
    what = f"{count} texts of {np.median(lengths):.0f} tokens (median)"
    section.rows.append(
        Row(f"{what}, against the plain loop", _rate(series["ours"], lengths), _rate(series["plain loop"], lengths), found, 4.0)
    )
    section.notes.append(
        f"ours gives {variants:,} SPS variants a text, the loop one. Largest differences where both have a value: SPS"
        f" {worst[0]:.1e} and ratio {worst[1]:.1e} (relative), NLL {worst[2]:.1e} nats. Ratio by"
        f" processor time: {found.cpu:.2f}."
    )
    _harness(setting, section, scorer, everything, ids, what)
    _memory(section, setting, scorer, plain.model, everything, ids)
    return section


def _rate(series: Series, lengths: Sequence[int]) -> str:
    return f"{series.total:.1f} s ({sum(lengths) / series.total:,.0f} tokens/s)"


def _harness(
    setting: Setting, section: Section, scorer: TextScorer, everything: list[str], ids: list[list[int]], what: str
) -> None:
    """NLL alone by lm-evaluation-harness, at the batch size that serves it best."""
    label = f"{what}, against lm-evaluation-harness (NLL alone)"
    python = setting.pythons.get("lm-evaluation-harness")
    try:
        if not python:
            raise Absent("no interpreter was named")
        worker = External(python, "lm_evaluation_harness.py", {"model": str(setting.folder), "threads": setting.threads})
    except Absent as error:
        section.rows.append(Row(label, "", f"not compared ({error})", None, 1.0))
        section.notes.append(f"lm-evaluation-harness was not compared; {_LMEVAL}.")
        return
    try:
        few = ids[::4]
        speeds = {size: worker.timed({"texts": few, "batch_size": size})[0].wall for size in _BATCH_SIZES}
        best = min(speeds, key=lambda size: speeds[size])
        setting.say(f"lm-evaluation-harness {worker.about['version']}: batch size {best} is its fastest of {speeds}")
        sums: list[float] = []
        ours: list[Score | None] = []

        def run_ours(_: int) -> None:
            ours[:] = scorer.score(everything)

        def run_harness(_: int) -> Spent:
            spent, answer = worker.timed({"texts": ids, "batch_size": best})
            sums[:] = answer["logprob_sums"]
            return spent

        series = interleave({"ours": run_ours, "harness": run_harness}, 1 if setting.quick else 3, setting.say)
        worst = 0.0
        for score, total in zip(ours, sums, strict=True):
            if score is not None and score.nll is not None:
                worst = max(worst, abs(score.nll + total / score.scored_tokens))
        assert worst < 1e-3, f"the harness's NLL differs by {worst:.1e}"
        found = ratio(series["harness"], series["ours"])
        section.rows.append(Row(label, f"{series['ours'].median:.1f} s", f"{series['harness'].median:.1f} s", found, 1.0))
        section.raw["harness"] = {name: each.wall for name, each in series.items()}
        section.notes.append(
            f"lm-evaluation-harness {worker.about['version']}, batch size {best} (its fastest of"
            f" {', '.join(map(str, _BATCH_SIZES))}); NLL agrees within {worst:.1e} nats. Ratio by processor"
            f" time: {found.cpu:.2f}."
        )
    finally:
        worker.close()


def _memory(
    section: Section, setting: Setting, scorer: TextScorer, stock: Any, everything: list[str], ids: list[list[int]]
) -> None:
    """Peak growth of one full batch, against the same batch through the stock model and through its blocks alone."""
    longest = sorted(range(len(ids)), key=lambda at: -len(ids[at]))
    width = len(ids[longest[0]])
    chosen = longest[: max(1, scorer.size.tokens // width)]
    padded = torch.tensor([[*ids[at], *[0] * (width - len(ids[at]))] for at in chosen])
    mask = torch.tensor([[1] * len(ids[at]) + [0] * (width - len(ids[at])) for at in chosen])

    @torch.inference_mode()
    def forward() -> Any:
        return stock(padded, attention_mask=mask, use_cache=False).logits

    @torch.inference_mode()
    def blocks() -> Any:
        return stock.model(padded, attention_mask=mask, use_cache=False).last_hidden_state

    batch = [everything[at] for at in chosen]
    sizes = {}
    for name, call in {"ours": lambda: scorer.score(batch), "forward": forward, "blocks": blocks}.items():
        call()  # what a first call allocates for good is not the peak of a pass
        sizes[name] = peak_growth(call)
    section.raw["memory"] = sizes
    ours, plain, bare = (sizes[name] for name in ("ours", "forward", "blocks"))
    label = f"peak memory of one batch of {padded.numel():,} tokens, against a plain forward pass"
    if not ours or not plain or not bare:
        section.rows.append(Row(label, "", "not measurable here", None, 1.3, at_most=True))
        return
    share = ours / plain
    section.rows.append(
        Row(label, f"{ours / 1e6:.0f} MB", f"{plain / 1e6:.0f} MB", Ratio(share, share, share, 1, share), 1.3, at_most=True)
    )
    beside = summary([ours / bare])
    section.rows.append(Row("the same, against the model's blocks without logits", "", f"{bare / 1e6:.0f} MB", beside))
