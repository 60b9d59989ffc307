"""xcompress/engines/vllm.py with the real vLLM (its CPU build), against the transformers engine and plain forward passes."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compare_engines import SUMMARIES, compare, requests_of
from conftest import FAMILIES, STARTS, save_tiny
from safetensors.torch import load_file, save_file

from xcompress import checkpoint
from xcompress.checkpoint import Loaded, load
from xcompress.config import ROOT
from xcompress.embedded import smollm2_135m
from xcompress.engines.base import Draw, Engine, Generation, Request
from xcompress.engines.hf import HFEngine
from xcompress.engines.vllm import VLLMEngine, open_engine
from xcompress.forward import run as run_forward
from xcompress.prompts import chat_ids, encode, start_token
from xcompress.schema import UsageError

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder() -> Path:
    """The embedded model."""
    return Path(smollm2_135m())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VLLMEngine]:
    """vLLM with the embedded model; the other models of this file stay beside it."""
    opened = VLLMEngine(folder, "float32", "cpu", 2048, OPTIONS)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> HFEngine:
    """transformers with the same model."""
    return HFEngine(load(folder, "float32", "cpu"), max_context=2048)


OPTIONS: dict[str, Any] = {
    "gpu_memory_utilization": 0.9,
    "cache_gb": 1.0,
    "prefill_tokens": None,
    "max_num_seqs": 64,
    "tensor_parallel_size": 1,
    "quantization": None,
    "prefix_caching": True,
    "enforce_eager": True,
}
SMALL = {**OPTIONS, "cache_gb": 0.25, "max_num_seqs": 16}


def tokens(results: list[list[Generation]]) -> list[list[tuple[int, ...]]]:
    return [[generation.tokens for generation in result] for result in results]


# ---- the same answers


def test_same_answers(engine: VLLMEngine, reference: HFEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy in float32: the same ids for 30 of 32 prompts at least, and where not, the model was undecided; the same NLL."""
    assert isinstance(engine, Engine) and engine.reproducible
    found = compare(reference, engine, reference.loaded)
    with capsys.disabled():
        print(f"\n{json.dumps(dataclasses.asdict(found))}")
    assert found.prompts == 32 and found.tokens > 500
    assert found.equal >= 30
    assert all(abs(difference.logit_gap) < 1e-2 for difference in found.differing), "only near-ties may turn"
    assert found.largest_nll < 1e-3


def test_nll_is_the_forward_pass(engine: VLLMEngine, reference: HFEngine) -> None:
    """Prompt log-probabilities against the pass that scores SPS and PPL: 1e-3 a token."""
    loaded = reference.loaded
    texts = [encode(loaded.tokenizer, text) for text in SUMMARIES]
    found = engine.token_logprobs([(ids[:1], ids[1:]) for ids in texts])
    for at, forward in run_forward(loaded, texts, 4096):
        assert found[at] == pytest.approx(forward.token_logprobs.tolist(), abs=1e-3)
    assert engine.loglikelihood([(texts[0][:1], texts[0][1:])]) == pytest.approx([sum(found[0])], abs=1e-3)
    assert engine.token_logprobs([]) == [] and engine.generate([]) == []


def test_a_text_may_fill_the_window(engine: VLLMEngine, reference: HFEngine) -> None:
    """The longest pair that the length check lets through, with one and with several scored tokens."""
    ids = tuple(range(100, 100 + engine.max_context))
    for cut in (1, 5):
        pairs = [(ids[:-cut], ids[-cut:])]
        assert engine.token_logprobs(pairs)[0] == pytest.approx(reference.token_logprobs(pairs)[0], abs=1e-3)
    with pytest.raises(UsageError, match=r"exceed the model's 2048"):
        engine.token_logprobs([(ids, (5,))])


def test_seeds_and_order(engine: VLLMEngine) -> None:
    """Seeded draws repeat, whatever runs beside them: together, reversed, one by one; greedy and seeded in one batch."""
    draws = (Draw(), Draw(0.7, 0.95, 2**62 + 11), Draw(0.7, 0.95, 12), Draw(1.0, 1.0, 13))
    requests = [dataclasses.replace(request, draws=draws, max_new_tokens=24) for request in requests_of(engine.tokenizer, 4)]
    first = tokens(engine.generate(requests))
    assert tokens(engine.generate(requests)) == first
    assert tokens(engine.generate(requests[::-1]))[::-1] == first
    single = [[engine.generate([dataclasses.replace(r, draws=(draw,))])[0][0].tokens for draw in draws] for r in requests[:2]]
    assert single == first[:2]
    assert all(len(set(result)) >= 3 for result in first), "seeds differ"
    other = [dataclasses.replace(request, draws=(Draw(0.7, 0.95, 999),)) for request in requests]
    assert [result[0] for result in tokens(engine.generate(other))] != [result[1] for result in first]


def test_stop_rules_and_penalty(engine: VLLMEngine, reference: HFEngine) -> None:
    """Stop texts, stop tokens, limits, a repetition penalty: text, reason and log-probability as transformers gives them."""
    prompts = [request.prompt for request in requests_of(engine.tokenizer, 6)]
    requests = [
        *(Request(prompt, (Draw(),), 20, stop=(".", "\n")) for prompt in prompts),
        *(Request(prompt, (Draw(),), 12, repetition_penalty=1.3) for prompt in prompts),
        Request(prompts[0], (Draw(),), 1),
        Request(chat_ids(engine.tokenizer, "", "Say yes.", True), (Draw(),), 60),
    ]
    progress: list[int] = []
    mine, theirs = engine.generate(requests, progress.append), reference.generate(requests)
    for got, expected in zip(mine, theirs, strict=True):
        assert dataclasses.replace(got[0], logprob_sum=0.0) == dataclasses.replace(expected[0], logprob_sum=0.0)
        assert got[0].logprob_sum == pytest.approx(expected[0].logprob_sum, abs=1e-2)
    assert {result[0].finish_reason for result in mine} == {"stop", "length"}
    assert sum(progress) >= sum(len(result[0].tokens) for result in mine)
    assert not any("." in result[0].text for result in mine[:6])


def test_what_cannot_be_done_is_refused(engine: VLLMEngine) -> None:
    """Before anything is computed: too long, no prompt, beams, temperatures that vLLM would change."""
    with pytest.raises(UsageError, match=r"exceed the model's 2048"):
        engine.generate([Request((5,), (Draw(),), 4), Request((5,) * 2000, (Draw(),), 100)])
    with pytest.raises(UsageError, match="cannot do the beam search"):
        engine.generate([Request((5,), (), 4, beams=2)])
    with pytest.raises(UsageError, match=r"temperatures of 0\.01 to 2\.0, not 0\.001"):
        engine.generate([Request((5,), (Draw(0.001),), 4)])
    with pytest.raises(ValueError, match="at least one token"):
        engine.token_logprobs([((), (5,))])
    assert engine.generate([Request((5,), (Draw(),), 1)]), "the engine goes on"


# ---- families


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function: family name to the folder of a tiny checkpoint whose attention heads vLLM's kernels take."""
    root = tmp_path_factory.mktemp("wide")

    def made(family: str) -> Path:
        if not (root / family).exists():
            save_tiny(family, root / family, wide=True)
        return root / family

    return made


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_cache", checkpoint._cache.copy())


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, wide: Callable[[str], Path], own_cache: None) -> None:
    """Greedy ids, reading with a stop text, and log-probabilities; one start token exactly, in chat and plain prompts."""
    path = wide(family)
    loaded: Loaded = load(path, "float32", "cpu", keep=9)
    prompts = [
        chat_ids(loaded.tokenizer, "Be brief.", "What stands by the river?", chat=True),
        chat_ids(loaded.tokenizer, "", "The old mill stands by the river. " * 3, chat=False),
        chat_ids(loaded.tokenizer, "", "x", chat=False),
    ]
    start = start_token(loaded.tokenizer)
    assert (start is not None) == STARTS[family]
    assert all(prompt.count(1) == (start is not None) for prompt in prompts)
    requests = [Request(prompt, (Draw(),), 12) for prompt in prompts]
    requests.append(Request(prompts[1], (Draw(),), 12, stop=("e", "a")))
    vllm, hf = VLLMEngine(path, "float32", "cpu", None, SMALL), HFEngine(loaded)
    try:
        assert vllm.max_context == hf.max_context == 512
        expected = hf.generate(requests)
        assert tokens(vllm.generate(requests)) == tokens(expected)
        pairs = [(prompt, result[0].tokens) for prompt, result in zip(prompts, expected, strict=False) if result[0].tokens]
        pairs.append((prompts[1][:1], prompts[1][1:]))
        for mine, theirs in zip(vllm.token_logprobs(pairs), hf.token_logprobs(pairs), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
    finally:
        vllm.close()


def test_nothing_comes_from_the_generation_file(wide: Callable[[str], Path], tmp_path: Path, own_cache: None) -> None:
    """A checkpoint whose own file asks for penalty, top-k and temperature: only its stop tokens count."""
    path = tmp_path / "own"
    save_tiny("llama", path, wide=True)
    own = {"repetition_penalty": 1.9, "top_k": 1, "temperature": 0.1, "do_sample": True, "eos_token_id": [0, 77]}
    (path / "generation_config.json").write_text(json.dumps(own), encoding="utf-8")
    draws = (Draw(), Draw(0.9, 0.95, 1), Draw(0.9, 0.95, 2))
    request = Request((1, *b"The old mill"), draws, 16)
    plain = VLLMEngine(wide("llama"), "float32", "cpu", None, SMALL)
    told = VLLMEngine(path, "float32", "cpu", None, SMALL)
    try:
        (mine,), (expected,) = told.generate([request]), plain.generate([request])
        assert told.stop_ids == {0, 77}
        for got, other in zip(mine, expected, strict=True):
            end = other.tokens.index(77) if 77 in other.tokens else len(other.tokens)
            assert got.tokens == other.tokens[:end]
        assert len({generation.tokens for generation in mine}) == 3, "top_k=1 would make them one"
    finally:
        plain.close()
        told.close()


def test_missing_weight_stops(tmp_path: Path) -> None:
    """A linear layer's tensor that is not in the checkpoint is named; vLLM itself would run without it."""
    path = tmp_path / "broken"
    save_tiny("llama", path, wide=True)
    name = "model.layers.1.mlp.down_proj.weight"
    kept = {key: value for key, value in load_file(path / "model.safetensors").items() if key != name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks 1 weights that the model needs \(model\.layers\.1\.mlp\.down_proj"):
        VLLMEngine(path, "float32", "cpu", None, SMALL)


# ---- the process


def test_memory_is_given_back(wide: Callable[[str], Path], own_cache: None) -> None:
    """Loading a model ends the process of the one before; the same model is not started twice."""
    first = open_engine(wide("llama"), "float32", "cpu", cache_gb=0.25)
    assert open_engine(wide("llama"), "float32", "cpu", cache_gb=0.25) is first
    assert open_engine(wide("llama"), "auto", "cpu", cache_gb=0.25) is first
    number = first._process.process.pid
    held = int(Path(f"/proc/{number}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert held > 2**28
    del first
    load(wide("qwen3"), "float32", "cpu")
    gc.collect()
    assert not Path(f"/proc/{number}").exists()


def test_half_precision_and_a_killed_process(wide: Callable[[str], Path]) -> None:
    """bfloat16 runs, and says that it cannot promise to repeat. A process that ends in between is a sentence."""
    engine = VLLMEngine(wide("llama"), "bfloat16", "cpu", None, SMALL)
    assert not engine.reproducible
    ((generation,),) = engine.generate([Request((1, 50, 60), (Draw(0.7, 0.9, 3),), 8)])
    assert generation.tokens and math.isfinite(generation.logprob_sum)
    os.kill(engine._process.process.pid, signal.SIGKILL)
    with pytest.raises(UsageError, match=r"vLLM: the process was killed by signal 9; it may have run out of memory"):
        engine.generate([Request((5,), (Draw(),), 4)])


def test_a_killed_run_leaves_no_process(wide: Callable[[str], Path]) -> None:
    """SIGKILL in the middle of generating: vLLM's process ends by itself."""
    code = (
        "import sys; from pathlib import Path; from xcompress.engines.vllm import open_engine\n"
        "from xcompress.engines.base import Draw, Request\n"
        f"engine = open_engine(Path({str(wide('llama'))!r}), 'float32', 'cpu', cache_gb=0.25)\n"
        "print(engine._process.process.pid, flush=True)\n"
        "while True: engine.generate([Request((5,), (Draw(1.0, 1.0, n),), 400) for n in range(30)])\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    number = int(asking.stdout.readline())
    asking.kill()
    asking.wait()
    asking.stdout.close()
    for _ in range(100):
        if not Path(f"/proc/{number}").exists():
            return
        signal.sigtimedwait([], 0.1)
    pytest.fail("it is still there")


def test_too_little_memory_is_a_sentence(wide: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"see engine\.gpu_memory_utilization, engine\.cache_gb and engine\.max_context"):
        VLLMEngine(wide("llama"), "float32", "cpu", None, {**SMALL, "cache_gb": 0.0001})


def test_a_device_that_vllm_is_not_built_for(wide: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"built for cpu, but the model's device is cuda"):
        VLLMEngine(wide("llama"), "float32", "cuda", None, SMALL)


# ---- a whole run


@pytest.mark.timeout(1200)
def test_a_whole_run(tmp_path: Path) -> None:
    """scripts/run.py with vLLM: every stage, calibration, tables; the engine is ended before the reader scores."""
    command = [
        *(sys.executable, str(ROOT / "scripts" / "run.py"), "experiment=laptop", "engine=vllm", "limit=2"),
        *("dataset.calibration_limit=2", "generation.candidates=2", "compressor.max_rounds=1", "engine.max_context=2048"),
        *("statistics.resamples=200", f"run_root={tmp_path}"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    starts, loads = said.count("starting vLLM"), said.count("loading smollm2-135m-instruct")
    assert (starts, loads) == (2, 1), "the compressor; then the reader to score; then the reader for LongPPL and answers"
    (tables,) = (tmp_path / "tables").iterdir()
    provenance = json.loads((tables / "provenance.json").read_text(encoding="utf-8"))
    assert provenance["identities"]["answers"]["engine"] == {
        "_target_": "xcompress.engines.vllm.open_engine",
        "max_context": 2048,
        "quantization": None,
    }
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "starting vLLM" not in again.stdout + again.stderr
