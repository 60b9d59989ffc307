"""What a table rests on, in one sentence."""

from __future__ import annotations

from analysis.load import Pool
from xcompress.settings import Settings


def sentence(pool: Pool, settings: Settings) -> str:
    """Reader, compressor, data set, n, K, seed, the SPS variant, the gate and the kind of intervals."""
    method = settings.method
    sps = (
        f"SPS: {method.subspace} basis, {method.energy:.1%} energy, {method.layer} layer, {method.pooling} pooling,"
        f" first token {'pooled' if method.first_token else 'left out'},"
        f" {'after a start token' if method.start_token else 'no start token'}"
    )
    threshold = pool.threshold(method) if method.gate == "paper" else None
    gate = "no gate"
    if method.gate == "release":
        gate = f"gate: rolling, the first {method.gate_pool} always sampled, then at or below quantile {method.gate_share}"
    elif threshold is not None:
        gate = (
            f"gate: ratio above {threshold:.4g} keeps the initial summary"
            f" (from {len(pool.calibration_ratio)} calibration questions)"
        )
    if method.policy == "stepwise":
        options = f"{method.beams} beams" if method.options == "beams" else "samples"
        gate += f"; chosen in every round among the greedy output and {options}"
    labelled = int(pool.labelled.sum())
    return (
        f"Reader {settings.reader.name}, compressor {settings.compressor.name}, data set {settings.dataset.name}"
        f" ({settings.dataset.split}); n = {labelled} labelled questions of {len(pool.questions)};"
        f" K = {settings.generation.candidates} sampled candidates; seed {settings.seed}. {sps}; {gate}."
        f" Per cent with {settings.statistics.level:.0%} intervals (bootstrap over questions,"
        f" {settings.statistics.resamples} resamples)."
    )
