"""Generation: K candidates a prompt, against transformers' own ``generate`` and vLLM's engine on the same CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.external import Absent, External
from benchmarks.table import Row, Section
from benchmarks.timing import Ratio, Series, Spent, interleave, operators, ratio
from benchmarks.workload import Setting, prompts
from xcompress.engines.base import Draw, Request, derive_seed
from xcompress.engines.hf import HFEngine
from xcompress.engines.sampling import choose, uniforms

_DRAWS, _TEMPERATURE, _TOP_P = 5, 0.7, 0.95  # the defaults of configs/config.yaml
_NEW_TOKENS = 80  # the embedded compressor's limit
_PROMPT_TOKENS = 800
_VLLM = "pip install vllm (CPU build) in an environment of its own, then XCOMPRESS_VLLM_PYTHON=ENVIRONMENT/bin/python"


class Stock:
    """transformers as a user calls it: ``generate(num_return_sequences=5)``, prompt by prompt or all prompts at once."""

    def __init__(self, setting: Setting) -> None:
        self.model = setting.stock()
        self.pad = setting.loaded.tokenizer.pad_token_id or 0

    def draw(self, batch: Sequence[Sequence[int]]) -> None:
        """Sampled continuations of full length; several prompts are padded on the left."""
        torch.manual_seed(0)
        self._generate(batch, do_sample=True, temperature=_TEMPERATURE, top_p=_TOP_P, top_k=0, num_return_sequences=_DRAWS)

    def greedy(self, prompt: Sequence[int]) -> list[int]:
        """The greedy continuation."""
        return self._generate([prompt], do_sample=False)[0]

    def with_draws(self, prompt: Sequence[int], draws: Sequence[Draw]) -> list[list[int]]:
        """Continuations in which the given draws choose each token: K copies of the prompt, as num_return_sequences makes."""
        numbers = [uniforms(draw, _NEW_TOKENS) for draw in draws]
        step = 0

        def force(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            nonlocal step
            uniform = torch.tensor([float(each[step]) for each in numbers])
            step += 1
            chosen = choose(logits.float(), draws, uniform)
            return torch.full_like(logits, float("-inf")).scatter(1, chosen[:, None], 0.0)

        return self._generate([prompt] * len(draws), do_sample=False, logits_processor=[force])

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Sequence[int]], **how: Any) -> list[list[int]]:
        width = max(map(len, batch))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + list(prompt) for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        found = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=_NEW_TOKENS, eos_token_id=None, pad_token_id=self.pad, **how
        )
        rows: list[list[int]] = found[:, width:].tolist()
        return rows


def ours(engine: HFEngine, batch: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Tokens of each draw of each prompt."""
    requests = [Request(tuple(prompt), tuple(_draws(at)), _NEW_TOKENS) for at, prompt in enumerate(batch)]
    return [[list(generation.tokens) for generation in each] for each in engine.generate(requests)]


def _draws(prompt: int) -> list[Draw]:
    return [Draw(_TEMPERATURE, _TOP_P, derive_seed(0, prompt, number)) for number in range(1, _DRAWS + 1)]


def agreement(engine: HFEngine, stock: Stock, prompt: Sequence[int]) -> tuple[int, int]:
    """Tokens compared, and how many sequences part: the greedy one and all draws under the same seeds.

    Raises:
        AssertionError: the greedy tokens differ, or more than one draw does (a floating-point tie can part one).
    """
    greedy = engine.generate([Request(tuple(prompt), (Draw(),), _NEW_TOKENS)])[0][0]
    assert list(greedy.tokens) == stock.greedy(prompt), "greedy tokens differ from transformers' own"
    drawn = ours(engine, [prompt])[0]
    theirs = stock.with_draws(prompt, _draws(0))
    parted = sum(a != b for a, b in zip(drawn, theirs, strict=True))
    assert parted <= 1, f"{parted} of {_DRAWS} seeded draws differ from those of transformers' own logits"
    return (1 + _DRAWS) * _NEW_TOKENS, parted


def run(setting: Setting) -> Section:
    """The whole comparison. Stop tokens are ignored on all sides, so all draw the same number of tokens."""
    section = Section(f"Generation: {_DRAWS} candidates of {_NEW_TOKENS} tokens a prompt of about {_PROMPT_TOKENS}")
    count, repetitions = (2, 1) if setting.quick else (4, 3)
    loaded = setting.loaded
    batch = prompts(loaded.tokenizer, count, _PROMPT_TOKENS)
    engine = HFEngine(loaded)
    engine.stop_ids = frozenset()
    stock = Stock(setting)
    section.raw["prompt_tokens"] = [len(prompt) for prompt in batch]
    compared, parted = agreement(engine, stock, batch[0])
    setting.say(f"{compared} tokens compared with transformers' own; {parted} of {1 + _DRAWS} sequences part")
    section.notes.append(
        f"token-identical: {compared} tokens of the greedy and {_DRAWS} seeded continuations of one prompt were compared with"
        f" those of transformers' own forward passes; {parted} sequences part (a floating-point tie)."
    )
    # One by one, each repetition takes another prompt of the batch; ours is given the same single prompt, then all of them.
    sides: dict[str, Callable[[int], Spent | None]] = {
        "ours, one prompt": lambda at: _nothing(ours(engine, [batch[at % count]])),
        "ours, all prompts": lambda _: _nothing(ours(engine, batch)),
        "generate, one prompt": lambda at: stock.draw([batch[at % count]]),
    }
    series = interleave(sides, repetitions, setting.say)
    # No target hangs on it, and it takes minutes: once, beside ours once more.
    at_once: dict[str, Callable[[int], Spent | None]] = {
        "ours, all prompts again": sides["ours, all prompts"],
        "generate, all prompts": lambda _: stock.draw(batch),
    }
    series |= interleave(at_once, 1, setting.say)
    section.raw["seconds"] = {name: each.wall for name, each in series.items()}
    section.raw["cpu_seconds"] = {name: [spent.cpu for spent in each.spent] for name, each in series.items()}
    one, all_ = series["ours, one prompt"], series["ours, all prompts"]
    alone, together = series["generate, one prompt"], series["generate, all prompts"]
    found = ratio(alone, one)
    section.rows.append(Row("one prompt, against generate(num_return_sequences=5)", _rate(one, 1), _rate(alone, 1), found, 6.0))
    best = _scaled(ratio(alone, all_), count)
    section.rows.append(
        Row(f"{count} prompts, against generate prompt by prompt", _rate(all_, count), _rate(alone, 1), best, 6.0)
    )
    section.rows.append(
        Row(
            f"{count} prompts, against generate on all at once",
            _rate(all_, count),
            _rate(together, count),
            ratio(together, series["ours, all prompts again"]),
        )
    )
    section.notes.append(f"by processor time: {found.cpu:.2f} and {best.cpu:.2f} (the first two rows).")
    section.notes.append(_bound(engine, batch[0], one.median))
    section.tables.append(operators("one prompt", lambda: ours(engine, batch[:1])))
    _vllm(setting, section, engine, batch)
    return section


def _bound(engine: HFEngine, prompt: Sequence[int], seconds: float) -> str:
    """Where the time of one prompt goes: its prefill, and steps that read every weight once."""
    prefill = min(_seconds(lambda: engine.generate([Request(tuple(prompt), (Draw(),), 1)])) for _ in range(3))
    step = (seconds - prefill) / (_NEW_TOKENS - 1)
    size = sum(parameter.numel() * parameter.element_size() for parameter in engine.loaded.model.parameters())
    memory = torch.ones(2**27)
    rate = memory.numel() * memory.element_size() / min(_seconds(lambda: memory.sum()) for _ in range(5))
    least = size / rate
    return (
        f"one prompt alone: {prefill:.2f} s are its prefill, then {1000 * step:.1f} ms a step of {_DRAWS} tokens. A step reads"
        f" all {size / 1e6:,.0f} MB of weights, which takes {1000 * least:.1f} ms at the rate that this machine reads memory"
        f" ({rate / 1e9:.1f} GB/s, measured): {least / step:.0%} of the step. Steps of more prompts share that reading."
    )


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _nothing(_: object) -> None:
    return None


def _scaled(found: Ratio, factor: float) -> Ratio:
    return Ratio(found.median * factor, found.low * factor, found.high * factor, found.n, found.cpu * factor)


def _rate(series: Series, count: int) -> str:
    return f"{series.median / count:.2f} s a prompt ({_DRAWS * _NEW_TOKENS * count / series.median:,.0f} new tokens/s)"


def _vllm(setting: Setting, section: Section, engine: HFEngine, batch: Sequence[Sequence[int]]) -> None:
    label = f"{len(batch)} prompts, against vLLM's CPU engine"
    python = setting.pythons.get("vLLM")
    try:
        if not python:
            raise Absent("no interpreter was named")
        about = {"model": str(setting.folder), "threads": setting.threads, "max_context": _PROMPT_TOKENS + _NEW_TOKENS + 8}
        worker = External(python, "vllm_engine.py", about)
    except Absent as error:
        section.rows.append(Row(label, "", f"not compared ({error})", None, 1.2))
        section.notes.append(f"vLLM was not compared; {_VLLM}.")
        return
    request: dict[str, Any] = {
        "prompts": [list(prompt) for prompt in batch],
        "draws": _DRAWS,
        "temperature": _TEMPERATURE,
        "top_p": _TOP_P,
        "new_tokens": _NEW_TOKENS,
    }
    try:
        worker.timed({**request, "seed": 99})  # compiles and warms
        greedy = worker.timed({**request, "prompts": request["prompts"][:1], "draws": 1, "temperature": 0.0, "seed": 0})[1]
        own = list(engine.generate([Request(tuple(batch[0]), (Draw(),), _NEW_TOKENS)])[0][0].tokens)
        same = sum(a == b for a, b in zip(own, greedy["tokens"][0][0], strict=True))
        sides: dict[str, Callable[[int], Spent | None]] = {
            "ours": lambda _: _nothing(ours(engine, batch)),
            "vLLM": lambda at: worker.timed({**request, "seed": at})[0],
        }
        series = interleave(sides, 1 if setting.quick else 3, setting.say)
        found = ratio(series["vLLM"], series["ours"])
        count = len(batch)
        section.rows.append(Row(label, _rate(series["ours"], count), _rate(series["vLLM"], count), found, 1.2))
        section.raw["vllm"] = {name: each.wall for name, each in series.items()}
        section.notes.append(
            f"vLLM {worker.about['version']}, float32, prefix cache emptied before each repetition, its model loaded and warm;"
            f" {same} of {_NEW_TOKENS} greedy tokens are the same."
        )
    finally:
        worker.close()
