"""Arithmetic rates of scoring and prefill as a share of the fastest matrix product that this machine was seen to compute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.scoring import scoring_settings
from benchmarks.table import Row, Section
from benchmarks.timing import Ratio, Series, Spent, interleave, operators, summary
from benchmarks.workload import Setting, prompts, texts
from xcompress.checkpoint import Loaded
from xcompress.engines.hf import HFEngine
from xcompress.products import use_onednn
from xcompress.reader import TextScorer

_SIDE = 2048  # of the square matrices


def block_flops(loaded: Loaded, lengths: Sequence[int], before: int = 0) -> float:
    """Multiplications and additions of the blocks for texts of these lengths: 2 a weight and token, and causal attention.

    A token at position t attends to t + 1 keys: 2 x 2 x heads x head size x (t + 1). ``before`` tokens of each text are there.
    """
    config = loaded.text_config
    weights = sum(parameter.numel() for block in loaded.blocks for parameter in block.parameters() if parameter.ndim == 2)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = sum((length * (length + 1)) // 2 - (before * (before + 1)) // 2 for length in lengths)
    attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * size * pairs
    return float(2.0 * weights * sum(length - before for length in lengths) + attention)


def head_flops(loaded: Loaded, rows: int) -> float:
    """Of the output head for so many tokens."""
    return 2.0 * float(loaded.text_config.vocab_size * loaded.text_config.hidden_size) * rows


def projection_flops(scorer: TextScorer, texts: int) -> float:
    """Of the coefficients in every basis, for all layers, poolings and token rules."""
    vectors = len(scorer.rules) * 2 * len(scorer.axes["layer"]) * len(scorer.axes["pooling"])
    shapes = [scorer.bases[names[0]].vectors.shape for names in scorer.same_basis.values()]
    return 2.0 * texts * vectors * sum(shape[0] * shape[1] for shape in shapes)


@torch.inference_mode()
def run(setting: Setting) -> Section:
    """Peak, scoring and prefill in turn; then what scoring's time goes into."""
    section = Section("Arithmetic rate, as a share of this machine's matrix-product peak (float32)")
    loaded = setting.loaded
    count, repetitions = (16, 2) if setting.quick else (96, 5)
    everything = texts(loaded.tokenizer, count)
    lengths = [len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in everything]
    with tempfile.TemporaryDirectory() as cache:
        scorer = TextScorer(loaded, scoring_settings(), Path(cache))
    long = prompts(loaded.tokenizer, 1 if setting.quick else 4, 800)
    engine = HFEngine(loaded)
    left, layer = torch.randn(_SIDE, _SIDE), torch.nn.Linear(_SIDE, _SIDE, bias=False).requires_grad_(False)
    onednn = use_onednn(layer) > 0

    def mkl(_: int) -> None:
        for _ in range(4):
            torch.mm(left, layer.weight)

    def dnn(_: int) -> None:
        for _ in range(4):
            layer(left)

    def score(_: int) -> None:
        scorer.score(everything)

    def prefill(_: int) -> None:
        engine.token_logprobs([(prompt[:-1], prompt[-1:]) for prompt in long])

    sides: dict[str, Callable[[int], Spent | None]] = {"product": mkl, "scoring": score, "prefill": prefill}
    if onednn:
        sides["product by oneDNN"] = dnn
    for side in sides.values():
        side(0)
    series = interleave(sides, repetitions, setting.say)
    # Prefill computes all but each prompt's last token, and one row of logits a prompt.
    done = {
        "product": 4 * 2.0 * _SIDE**3,
        "product by oneDNN": 4 * 2.0 * _SIDE**3,
        "scoring": block_flops(loaded, lengths)
        + head_flops(loaded, sum(lengths) - len(lengths))
        + projection_flops(scorer, count),
        "prefill": block_flops(loaded, [len(prompt) - 1 for prompt in long]) + head_flops(loaded, len(long)),
    }
    products = [name for name in sides if name.startswith("product")]
    peak = min(products, key=lambda name: min(series[name].wall))
    section.raw["flops"] = done
    section.raw["seconds"] = {name: each.wall for name, each in series.items()}
    for name, words in (
        ("scoring", f"scoring of {count} texts of {np.median(lengths):.0f} tokens (median)"),
        ("prefill", f"prefill of {len(long)} prompts of {np.mean([len(prompt) for prompt in long]):.0f} tokens (mean)"),
    ):
        share = _share(series[name], done[name], series[peak], done[peak])
        row = Row(words, _giga(series[name], done[name]), f"{_giga(series[peak], done[peak])} ({peak})", share, 0.6)
        section.rows.append(row)
    both = ", ".join(f"{name} {_giga(series[name], done[name])}" for name in products)
    section.notes.append(
        f"peak: {_SIDE} x {_SIDE} matrices, the faster library ({both}), {setting.threads} threads, median of {repetitions}"
        " in turn with the rest. FLOP counted: 2 a weight and token, causal attention, output head; scoring also the"
        f" projections ({done['scoring'] / 1e9:,.0f} GFLOP, of which {projection_flops(scorer, count) / done['scoring']:.0%})."
    )
    section.tables.append(operators("scoring", lambda: scorer.score(everything)))
    section.tables.append(operators("prefill", lambda: prefill(0)))
    return section


def _share(own: Series, own_flops: float, peak: Series, peak_flops: float) -> Ratio:
    shares = [(own_flops / a.wall) / (peak_flops / b.wall) for a, b in zip(own.spent, peak.spent, strict=True)]
    cpu = [(own_flops / a.cpu) / (peak_flops / b.cpu) for a, b in zip(own.spent, peak.spent, strict=True)]
    return summary(shares, cpu)


def _giga(series: Series, flops: float) -> str:
    return f"{flops / series.median / 1e9:,.0f} GFLOP/s"
