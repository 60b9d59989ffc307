"""``python -m benchmarks.paper_scale``: FLOPs, bytes and time a question of each stage at the paper's scale, by arithmetic.

Nothing is measured here; ``docs/paper_scale.md`` shows the output, and the assumptions are the constants below.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.output import markdown

PASSAGES, PASSAGE_TOKENS = 30, 140
ROUND_PROMPT, ROUND_OUTPUT, ROUNDS = 1100, 150, 6
SUMMARY, QUESTION, CANDIDATES = 150, 30, 6  # the greedy summary and K = 5
READ_RAW, READ_CLOSED, READ_SUMMARY, ANSWER = 4500, 320, 450, 8
TOGETHER = 64  # rows of a decoding step
PASS = 16_384  # tokens of a prefill or scoring pass
PEAK_FLOPS, PEAK_BYTES = 312e12, 2.0e12  # an A100 with 80 GB, bfloat16
COMPUTE_SHARE, MEMORY_SHARE = 0.4, 0.6
QUESTIONS = 2500  # five data sets of 500
BASES = 5  # distinct matrices decomposed for SPS: embedding and query projection, plain and centred, and the output head


@dataclass(frozen=True)
class Shape:
    """A model's published dimensions; weights in bfloat16."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    bases: int = BASES

    @property
    def block_weights(self) -> int:
        """Of all blocks: query, key, value and output projections and the three matrices of the gated MLP."""
        attention = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def head_weights(self) -> int:
        return self.width * self.vocabulary

    @property
    def weight_bytes(self) -> int:
        return 2 * (self.block_weights + self.head_weights)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    def attention(self, tokens: int, before: int = 0) -> float:
        """FLOPs of ``tokens`` tokens that attend to themselves, causally, and to ``before`` tokens before them."""
        pairs = tokens * before + tokens * (tokens + 1) / 2
        return 4.0 * self.layers * self.heads * self.head_size * pairs


COMPACT = Shape("CompAct-7B (Mistral 7B)", 32, 4096, 14_336, 32, 8, 128, 32_000)
LLAMA = Shape("LLaMA 3.1 8B", 32, 4096, 14_336, 32, 8, 128, 128_256)
# Its output head is its embedding, so that basis is left out.
GEMMA = Shape("Gemma 3 12B", 48, 3840, 15_360, 16, 8, 256, 262_208, BASES - 1)


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes moved between memory and processor, of one question."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def seconds(self) -> float:
        """Whichever takes longer, at the stated shares of the peaks."""
        return max(self.flops / (COMPUTE_SHARE * PEAK_FLOPS), self.bytes / (MEMORY_SHARE * PEAK_BYTES))


def prefill(model: Shape, tokens: int, texts: int = 1, before: int = 0, scored: bool = False) -> Work:
    """``texts`` texts of ``tokens`` tokens after ``before`` that are in the cache; ``scored``: every token reaches the head."""
    total = tokens * texts
    head = total if scored else texts
    flops = 2.0 * (model.block_weights * total + model.head_weights * head) + texts * model.attention(tokens, before)
    return Work(flops, model.weight_bytes * total / PASS + total * model.cache_bytes)


def decode(model: Shape, prompt: int, new: int, texts: int) -> Work:
    """``new`` tokens for each of ``texts`` texts after a prompt: weights once a step of TOGETHER rows, the cache every step."""
    context = prompt + new / 2
    flops = 2.0 * (model.block_weights + model.head_weights) + 4.0 * model.layers * model.heads * model.head_size * context
    moved = model.weight_bytes / TOGETHER + context * model.cache_bytes
    return Work(flops * new * texts, moved * new * texts)


def projections(model: Shape, texts: int, passes: int) -> Work:
    """SPS of all layers, five poolings, with and without the first token, in every basis (float32)."""
    vectors = texts * passes * 2 * (model.layers + 2) * 5
    return Work(2.0 * vectors * model.bases * model.width**2, 4.0 * vectors * model.width)


def generation(trajectories: int) -> dict[str, Work]:
    """The compressor: the first round's prompt is shared by all trajectories, later ones hold their own summary."""
    prompts = prefill(COMPACT, ROUND_PROMPT) + prefill(COMPACT, ROUND_PROMPT, trajectories * (ROUNDS - 1))
    return {"prompts": prompts, "outputs": decode(COMPACT, ROUND_PROMPT, ROUND_OUTPUT, trajectories * ROUNDS)}


def reading(model: Shape) -> dict[str, Work]:
    """The reader's stages for one question."""
    passages = PASSAGES * PASSAGE_TOKENS
    texts = 2 + CANDIDATES
    prompts = prefill(model, READ_RAW) + prefill(model, READ_CLOSED) + prefill(model, READ_SUMMARY, CANDIDATES)
    return {
        "score, two passes": prefill(model, SUMMARY, 2 * CANDIDATES, scored=True),
        "SPS projections": projections(model, CANDIDATES, 2),
        "LongPPL": prefill(model, passages) + prefill(model, SUMMARY, CANDIDATES, passages, scored=True),
        "question likelihood": prefill(model, SUMMARY + QUESTION, CANDIDATES, scored=True),
        "read": prompts + decode(model, (READ_RAW + READ_CLOSED + CANDIDATES * READ_SUMMARY) // texts, ANSWER, texts),
    }


def lines(stages: dict[str, Work], whose: str) -> list[list[str]]:
    """Table rows of stages, and their sum."""
    rows = [
        [whose, name, *_cells(each), "memory" if each.bytes / PEAK_BYTES / MEMORY_SHARE >= each.seconds else "arithmetic"]
        for name, each in stages.items()
    ]
    seconds = sum(each.seconds for each in stages.values())
    whole = sum(stages.values(), Work(0, 0))
    cells = [f"{whole.flops / 1e12:,.0f}", f"{whole.bytes / 1e9:,.0f}", f"{seconds:.2f}", f"{seconds * QUESTIONS / 3600:.1f}"]
    return [*rows, [f"**{whose}**", "**sum**", *cells, ""]]


def _cells(work: Work) -> list[str]:
    hours = work.seconds * QUESTIONS / 3600
    return [f"{work.flops / 1e12:,.1f}", f"{work.bytes / 1e9:,.1f}", f"{work.seconds:.3f}", f"{hours:.2f}"]


def text() -> str:
    """The Markdown that ``docs/paper_scale.md`` holds."""
    rows = [line for model in (LLAMA, GEMMA) for line in lines(reading(model), model.name)]
    headings = ["model", "stage, one question", "TFLOP", "GB moved", "s", "hours for 2,500", "bound by"]
    whole = lines(generation(CANDIDATES), COMPACT.name)
    full = _seconds(generation(CANDIDATES))
    first = _seconds(generation(1))
    saved = 0.3 * (full - first)
    parts = [markdown(headings, [*whole, *rows])]
    facts = []
    for model in (LLAMA, GEMMA):
        stages = reading(model)
        choice = stages["score, two passes"].seconds / 2 + stages["SPS projections"].seconds / 2
        alone, gated = full + choice, full - saved + (1 - 0.3) * choice
        facts.append(f"{alone:.2f} to {gated:.2f} s a question with {model.name} ({1 - gated / alone:.0%})")
    small, large = _seconds(reading(LLAMA)), _seconds(reading(GEMMA))
    choosing = "; from ".join(facts)
    parts += [
        f"**Where the time goes.** The compressor's prompts and outputs take {full:.2f} s a question; all that is done with an"
        f"\n8B reader {small:.2f} s, with the 12B reader {large:.2f} s. SPS itself, at all layers and in all variants, is the"
        " smallest line.\n",
        "**What the gate saves.** It keeps the greedy summary of 30 % of the questions; their five other trajectories and the"
        f"\nscoring are then not computed. Choosing a summary falls from {choosing}."
        "\nAn evaluation keeps the whole pool, so that every gate can be judged from it; a deployed controller saves.\n",
    ]
    return "\n".join(parts)


def _seconds(stages: dict[str, Work]) -> float:
    return sum(each.seconds for each in stages.values())


if __name__ == "__main__":
    print(text(), end="")
