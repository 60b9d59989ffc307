"""Do two engines give the same answers? ``python tests/compare_engines.py`` prints it for transformers and vLLM.

The embedded model in float32, greedy, 32 prompts of the mini data set: 16 that ask for a summary (chat template) and 16 that
ask a question (plain text). For a prompt whose tokens differ the place is named and how far apart the model's two most likely
tokens are there: rounding can only turn those that are nearly equal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from xcompress.checkpoint import Loaded
from xcompress.config import settings_of
from xcompress.engines.base import Draw, Engine, Request
from xcompress.prompts import COMPRESSOR_PARTS, READER_PARTS, chat_ids, fill, format_passages, load_template
from xcompress.schema import Question
from xcompress.show_prompt import choose

COUNT = 32
NEW_TOKENS = 48
SUMMARIES = (
    "Paris is the capital of France.",
    "The bridge was built in 1894; it has two towers and crosses the Thames.",
    "No.",
)


def requests_of(tokenizer: Any, count: int = COUNT) -> list[Request]:
    """The prompts, chat and plain in turn."""
    settings = settings_of(["experiment=laptop"])
    summarise = load_template(settings.compressor.prompt_file, COMPRESSOR_PARTS)
    ask = load_template(settings.reader.prompt_file, READER_PARTS)
    found = []
    for at in range(count):
        question: Question = choose(settings, at + 1, None)
        passages = question.passages[:5]
        if at % 2 == 0:
            text = format_passages(summarise, passages)
            user = fill(summarise["first"], question=question.question, passages=text, summary="", evaluation="")
            found.append(Request(chat_ids(tokenizer, summarise["system"], user, True), (Draw(),), NEW_TOKENS))
        else:
            text = format_passages(ask, passages[:2])
            user = fill(ask["with_context"], demos="", context=text, question=question.question)
            found.append(Request(chat_ids(tokenizer, ask["system"], user, False), (Draw(),), NEW_TOKENS))
    return found


@dataclass(frozen=True)
class Difference:
    """A prompt whose continuations part.

    Attributes:
        prompt: its number.
        at: the first new token that differs.
        margin: logit of the model's first choice there minus that of its second.
        logit_gap: logit of the one engine's token minus that of the other's.
    """

    prompt: int
    at: int
    margin: float
    logit_gap: float


@torch.inference_mode()
def differences(
    requests: Sequence[Request], mine: Sequence[Sequence[int]], other: Sequence[Sequence[int]], loaded: Loaded
) -> list[Difference]:
    """Where two lists of continuations part, judged by the model's own uncached forward pass."""
    found = []
    for number, (request, left, right) in enumerate(zip(requests, mine, other, strict=True)):
        if list(left) == list(right):
            continue
        at = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
        ids = torch.tensor([[*request.prompt, *left[:at]]])
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        top = logits.topk(2).values
        tokens = [list(side[at : at + 1]) or [min(loaded.tokenizer.eos_token_id, len(logits) - 1)] for side in (left, right)]
        gap = float(logits[tokens[0][0]] - logits[tokens[1][0]])
        found.append(Difference(number, at, float(top[0] - top[1]), gap))
    return found


@dataclass(frozen=True)
class Comparison:
    """How two engines agree: ``prompts`` greedy continuations, of which ``equal`` have the same ids; ``largest_nll`` is the
    largest difference of a continuation's mean NLL (nats a token) under both, each scoring the first engine's text."""

    prompts: int
    equal: int
    differing: list[Difference]
    largest_nll: float
    tokens: int


def compare(reference: Engine, other: Engine, loaded: Loaded) -> Comparison:
    """Greedy continuations and log-probabilities of both engines."""
    requests = requests_of(loaded.tokenizer)
    mine = [result[0].tokens for result in reference.generate(requests)]
    theirs = [result[0].tokens for result in other.generate(requests)]
    pairs = [(request.prompt, tokens) for request, tokens in zip(requests, mine, strict=True) if tokens]
    both = zip(reference.token_logprobs(pairs), other.token_logprobs(pairs), strict=True)
    nll = [abs(sum(a) - sum(b)) / len(a) for a, b in both]
    differing = differences(requests, mine, theirs, loaded)
    return Comparison(len(requests), len(requests) - len(differing), differing, max(nll), sum(map(len, mine)))


def main() -> None:
    """Print the comparison as JSON."""
    from xcompress.checkpoint import load
    from xcompress.embedded import smollm2_135m
    from xcompress.engines.hf import HFEngine
    from xcompress.engines.vllm import open_engine

    folder = Path(smollm2_135m())
    other = open_engine(folder, "float32", "cpu", max_context=2048)
    loaded = load(folder, "float32", "cpu", keep=2)
    print(json.dumps(asdict(compare(HFEngine(loaded, max_context=2048), other, loaded)), indent=1))


if __name__ == "__main__":
    main()
