"""xcompress/engines/openai.py: against the engine behind a small server, and against servers that fail."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tokenizer
from served import Faults, Served, listening
from test_pipeline import write_questions

from xcompress.checkpoint import Loaded
from xcompress.config import compose, run_config, settings_of, to_settings
from xcompress.engines import openai
from xcompress.engines.base import Draw, Engine, Request, RowErrors, naming, regrouping
from xcompress.engines.hf import HFEngine
from xcompress.engines.journal import Journal
from xcompress.engines.openai import OpenAIEngine, check, open_engine
from xcompress.pipeline import Run
from xcompress.schema import UsageError

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_PAUSE", 0.01)


@pytest.fixture
def faults(tiny: Tiny) -> Faults:
    """A server of the tiny Llama."""
    return Faults(Served(HFEngine(tiny("llama")), "llama", limit=400))


@pytest.fixture
def url(faults: Faults) -> Iterator[str]:
    with listening(faults) as address:
        yield address


@pytest.fixture
def opened(url: str, model_folder: Callable[[str], Path]) -> Callable[..., OpenAIEngine]:
    """A function: the engine on that server, with further settings."""
    return lambda **more: open_engine(model_folder("llama"), "float32", "cpu", **{"base_url": url, "attempts": 3, **more})


def prompt(number: int) -> tuple[int, ...]:
    return (1, *(5 + (number * 37 + at * 11) % 256 for at in range(20 + number)))


REQUESTS = [
    Request(prompt(0), (Draw(), Draw(0.15, 0.9, 2**62 + 1), Draw(0.15, 0.9, 2)), 12),
    Request(prompt(1), (Draw(),), 12, stop=("e", "a")),
    Request(prompt(2), (Draw(),), 9, repetition_penalty=1.4),
]


# ---- the contract


def test_same_answers(opened: Callable[..., OpenAIEngine], tiny: Tiny) -> None:
    """Texts, ids, reasons and log-probabilities are those of the engine behind the server; so are scores of pairs."""
    engine, behind = opened(), HFEngine(tiny("llama"))
    assert isinstance(engine, Engine) and not engine.reproducible
    assert engine.max_context == 400, "the server's limit is lower than the model's"
    counted: list[int] = []
    mine, theirs = engine.generate(REQUESTS, counted.append), behind.generate(REQUESTS)
    for got, expected in zip(mine, theirs, strict=True):
        assert [dataclasses.replace(g, logprob_sum=0) for g in got] == [dataclasses.replace(g, logprob_sum=0) for g in expected]
        assert [g.logprob_sum for g in got] == pytest.approx([g.logprob_sum for g in expected], abs=1e-3)
    assert len(counted) == 5
    pairs = [(prompt(0), prompt(3)[1:6]), (prompt(1), (77,)), (prompt(0)[:1], prompt(0)[1:])]
    for got_logprobs, logprobs in zip(engine.token_logprobs(pairs), behind.token_logprobs(pairs), strict=True):
        assert got_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert engine.loglikelihood(pairs) == pytest.approx(behind.loglikelihood(pairs), abs=1e-3)
    assert engine.generate([]) == [] and engine.token_logprobs([]) == []
    with pytest.raises(ValueError, match="at least one token"):
        engine.token_logprobs([((), (5,))])
    with pytest.raises(UsageError, match=r"exceed the model's 400"):
        engine.generate([Request((5,) * 390, (Draw(),), 12)])


def test_every_value_is_said(opened: Callable[..., OpenAIEngine], faults: Faults) -> None:
    """Nothing is left to the server or the model's own generation file; a seed for every sampled draw."""
    opened().generate(REQUESTS)
    for body in faults.bodies:
        assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "max_tokens"} <= set(body)
        assert body["n"] == 1 and isinstance(body["prompt"], list) and ("seed" in body) == (body["temperature"] > 0)


@pytest.mark.parametrize("prompts", ["ids", "text"])
def test_without_extensions(prompts: str, model_folder: Callable[[str], Path], tiny: Tiny) -> None:
    """A server that knows OpenAI's own fields alone, and may take text only: greedy texts and scores are the same."""
    behind = HFEngine(tiny("llama"))
    # Text must survive the way there and back: bytes that are no UTF-8 do not.
    text = tuple(behind.tokenizer("The old mill stands by the river.")["input_ids"])
    request = Request(text, (Draw(),), 12)
    with listening(Served(behind, "llama", extensions=False)) as url:
        more: dict[str, Any] = {"base_url": url, "prompts": prompts, "extensions": False}
        engine = open_engine(model_folder("llama"), "float32", "cpu", **more)
        ((got,),), ((expected,),) = engine.generate([request]), behind.generate([request])
        assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
        assert got.logprob_sum == pytest.approx(expected.logprob_sum, abs=1e-3)
        pairs = [(text[:5], text[5:])]
        assert engine.token_logprobs(pairs)[0] == pytest.approx(behind.token_logprobs(pairs)[0], abs=1e-4)
        with pytest.raises(UsageError, match="a repetition penalty is not part of OpenAI's protocol"):
            engine.generate([dataclasses.replace(request, repetition_penalty=1.2)])
        told = open_engine(model_folder("llama"), "float32", "cpu", base_url=url)
        with pytest.raises(RowErrors, match=r"HTTP 400: unknown fields \['ignore_eos'"):
            told.generate([request])


def test_another_tokenizer_is_noticed(tiny: Tiny, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A server that adds no start token to a text counts one token fewer: said at once."""
    served = Served(HFEngine(tiny("llama")), "llama", extensions=False)

    def without_start(path: str, body: Any, headers: dict[str, str]) -> Any:
        if body is not None:
            body = {**body, "prompt": make_tokenizer(False)(body["prompt"])["input_ids"]}
        return served(path, body, headers)

    with listening(without_start) as url:
        engine = open_engine(model_folder("llama"), "float32", "cpu", base_url=url, prompts="text", extensions=False)
        with pytest.raises(UsageError, match=r"counts 6 prompt tokens where the tokenizer .* gives 7"):
            engine.generate([Request((1, *range(50, 56)), (Draw(),), 4)])


# ---- failures


def test_attempts(opened: Callable[..., OpenAIEngine], faults: Faults, tiny: Tiny) -> None:
    """A request that fails twice is answered at the third attempt; one that is refused as wrong is not tried again."""
    faults.fault = lambda body, before: 503 if before < 2 else None
    got = opened().generate(REQUESTS[:1])
    assert [g.tokens for g in got[0]] == [g.tokens for g in HFEngine(tiny("llama")).generate(REQUESTS[:1])[0]]
    assert len(faults.bodies) == 9
    faults.bodies.clear()
    faults.fault = lambda body, before: 422
    with pytest.raises(RowErrors, match="HTTP 422: made to fail with 422"):
        opened().generate([dataclasses.replace(REQUESTS[0], max_new_tokens=5)])
    assert len(faults.bodies) == 3


def test_a_failed_row_loses_no_other(opened: Callable[..., OpenAIEngine], faults: Faults, tmp_path: Path) -> None:
    """The failed one is named; the others are in the journal and are not asked for again, in this process and in another."""
    faults.fault = lambda body, before: 500 if body["max_tokens"] == 9 else None
    engine = opened(journal=str(tmp_path))
    with pytest.raises(RowErrors) as caught, naming(["q0", "q1", "q2"]):
        engine.generate(REQUESTS)
    assert caught.value.rows == {2: "HTTP 500: made to fail with 500"} and caught.value.questions == ("q2",)
    assert len(faults.bodies) == 4 + 3
    faults.fault = lambda body, before: None
    faults.bodies.clear()
    again = opened(journal=str(tmp_path))
    assert again.generate(REQUESTS)[0][0].tokens
    assert [body["max_tokens"] for body in faults.bodies] == [9]
    assert opened().generate(REQUESTS) == again.generate(REQUESTS)
    assert len(faults.bodies) == 1 + 5
    (file,) = tmp_path.iterdir()
    assert "llama" in file.name and len(file.read_text().splitlines()) == 5


def test_row_errors_are_named() -> None:
    """By question, through groups of requests, and over a process boundary."""
    with pytest.raises(RowErrors) as caught, naming(["a", "b"]), regrouping(2):
        raise RowErrors({3: "x", 2: "y"})
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.questions == ("b",) and error.rows == {1: "y"}
    assert str(error) == "1 requests of the questions b failed: y"


def test_concurrency_is_bounded(opened: Callable[..., OpenAIEngine], faults: Faults) -> None:
    requests = [Request(prompt(0), (Draw(0.15, 1.0, seed),), 3) for seed in range(12)]
    opened(concurrency=3).generate(requests)
    assert 2 <= faults.most_at_a_time <= 3


def test_two_servers_share(tiny: Tiny, model_folder: Callable[[str], Path]) -> None:
    """Each model is looked for everywhere; draws of one prompt stay together; where one server fails, the other answers."""
    served = Served(HFEngine(tiny("llama")), "llama")
    first, second, other = Faults(served), Faults(served), Faults(Served(HFEngine(tiny("llama")), "something else"))
    with listening(first) as a, listening(second) as b, listening(other) as c:
        engine = open_engine(model_folder("llama"), "float32", "cpu", base_url=[a, b, c], attempts=2)
        engine.generate(REQUESTS)
        assert [len(first.bodies), len(second.bodies), len(other.bodies)] == [4, 1, 0]
        first.fault = lambda body, before: 503
        assert len(engine.generate(REQUESTS)) == 3
        assert len(second.bodies) == 1 + 5


def test_what_is_wrong_with_a_server(
    opened: Callable[..., OpenAIEngine], url: str, faults: Faults, tiny: Tiny, model_folder: Callable[[str], Path]
) -> None:
    """Nobody there, another model, a refused key, no log-probabilities, no JSON: one sentence each."""
    folder = model_folder("llama")

    def on(address: str, **more: Any) -> OpenAIEngine:
        return open_engine(folder, "float32", "cpu", base_url=address, attempts=2, **more)

    with pytest.raises(UsageError, match=r"no server answers at http://127\.0\.0\.1:9/v1 .*start one: vllm serve"):
        on("http://127.0.0.1:9/v1")
    with pytest.raises(UsageError, match=r"none of the servers has gpt2; they have llama \(engine\.served=\{gpt2: NAME\}"):
        open_engine(model_folder("gpt2"), "float32", "cpu", base_url=url)
    assert on(url, served={"llama": "llama"}).places == [(url, "llama")]
    engine = on(url)
    faults.fault = lambda body, before: 401
    with pytest.raises(UsageError, match=r"refuses every request \(HTTP 401.*engine\.api_key_variable"):
        engine.generate(REQUESTS)
    answers: dict[str, Any] = {
        "the server gives no log-probabilities": {"choices": [{"text": "x", "token_ids": [5]}]},
        "does not know vLLM's return_token_ids": {"choices": [{"text": "x", "logprobs": {"token_logprobs": [-1.0]}}]},
        "log-probabilities that are no numbers": {
            "choices": [
                {"text": "x", "token_ids": [5], "logprobs": {"token_logprobs": [float("nan")]}, "finish_reason": "stop"}
            ]
        },
        "an answer that is not understood": {"nothing": 1},
    }
    for why, content in answers.items():

        def odd(path: str, body: Any, headers: dict[str, str], content: Any = content) -> Any:
            return (200, content, {}) if body else (200, {"data": [{"id": "llama"}]}, {})

        with listening(odd) as address, pytest.raises(UsageError, match=why):
            on(address).generate([Request((1, 5), (Draw(),), 2)])
    with (
        listening(lambda path, body, headers: (200, b"<html>", {})) as address,
        pytest.raises(UsageError, match="is not the list"),
    ):
        on(address)
    with listening(faults) as address:
        gone = on(address)
    with pytest.raises(UsageError, match="no answer from http"):
        gone.generate(REQUESTS)


def test_the_key_is_sent_and_not_stored(
    url: str, faults: Faults, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    engine = open_engine(
        model_folder("llama"), "float32", "cpu", base_url=url, api_key_variable="MY_KEY", journal=str(tmp_path / "j")
    )
    engine.generate(REQUESTS[:1])
    assert {headers["Authorization"] for headers in faults.headers} == {"Bearer s3cret"}
    assert "s3cret" not in "".join(path.read_text() for path in (tmp_path / "j").iterdir())


# ---- settings


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("engine.base_url=localhost:8000", "is no address like http://localhost:8000/v1"),
        ("engine.base_url='http://me:secret@host/v1'", "must not hold a password"),
        ("engine.base_url=null", "needs engine.base_url"),
        ("engine.prompts=tokens", "engine.prompts=tokens is not known; choose from ids, text"),
        ("engine.prompts=text", "set engine.extensions=false, too"),
        ("engine.concurrency=0", "engine.concurrency must be a whole number of 1 or more"),
        ("method=xcompress_release", "engine=openai cannot do the beam search of the authors' release"),
        ("execution=ray", "engine=openai needs no actors: set execution=local"),
        ("generation.temperature=2.5", "temperatures of 0.01 to 2.0, not 2.5"),
    ],
)
def test_wrong_settings(override: str, answer: str) -> None:
    settings = settings_of(["experiment=laptop", "engine=openai", override])
    with pytest.raises(UsageError) as caught:
        check(settings)
    assert answer in str(caught.value)


# ---- the journal


def test_a_torn_journal(tmp_path: Path) -> None:
    """A last line without its end is not read, and what comes after it is; two writers see each other's lines."""
    path = tmp_path / "deep" / "a.jsonl"
    journal = Journal(path)
    assert journal.get("k") is None
    journal.put("k", {"text": "é\n"})
    with path.open("ab") as file:
        file.write(b'{"key": "torn", "answ')
    after = Journal(path)
    assert after.get("k") == {"text": "é\n"} and after.get("torn") is None
    after.put("l", 2)
    journal.put("m", 3)
    assert [journal.get(key) for key in "klm"] == [{"text": "é\n"}, 2, 3]
    assert [Journal(path).get(key) for key in "klm"] == [{"text": "é\n"}, 2, 3]


# ---- a whole run


def test_a_run_with_failures(
    url: str, faults: Faults, tmp_path: Path, model_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """One question's requests fail in the second round: the run names it, keeps all else, and then asks for it alone.

    The tables are then those of a run without failures.
    """
    demos = tmp_path / "demos.yaml"
    demos.write_text('- {question: "What is by the hill?", answers: ["old mill"]}\n', encoding="utf-8")
    overrides = [
        *("experiment=laptop", "engine=openai", f"engine.base_url={url}", "engine.attempts=2", f"dataset.demos_file={demos}"),
        *(f"reader.model={model_folder('llama')}", f"compressor.model={model_folder('llama')}", "compressor.chat=false"),
        *("compressor.max_new_tokens=6", "reader.max_new_tokens=4", "generation.candidates=2", "generation.temperature=0.2"),
        *(f"dataset.path={write_questions(tmp_path / 'test.jsonl', 4)}", "dataset.corpus=null", "dataset.segment_size=1"),
        *("dataset.calibration_path=null", "method=xcompress_no_gate", "shard_size=2", "statistics.resamples=200"),
    ]

    def run(root: str) -> Path:
        folder = run_config(compose([*overrides, f"run_root={tmp_path / root}"]))
        assert folder is not None
        return folder

    def fails(body: dict[str, Any], before: int) -> int | None:
        text = faults.answer.engine.tokenizer.decode(body["prompt"])  # type: ignore[attr-defined]
        return 500 if "river 1?" in text and "Town 1" in text else None

    faults.fault = fails
    with caplog.at_level(logging.WARNING), pytest.raises(UsageError) as caught:
        run("broken")
    assert "generate: requests of 1 questions failed (q1): HTTP 500" in str(caught.value)
    assert "the same command asks for these alone" in str(caught.value)
    asked = len(faults.bodies)
    stored = list((tmp_path / "broken" / "candidates").rglob("*.parquet"))
    assert len(stored) == 1, "the other shard is there"
    faults.fault = lambda body, before: None
    faults.bodies.clear()
    tables = run("broken")
    again = [body for body in faults.bodies if body["max_tokens"] == 6]
    texts = [faults.answer.engine.tokenizer.decode(body["prompt"]) for body in again]  # type: ignore[attr-defined]
    assert again and all("river 1?" in text and "Town 1" in text for text in texts), "nothing else is asked for again"
    assert len(again) < asked
    clean = run("clean")
    for name in ("table1.csv", "counts.json"):
        assert (tables / name).read_bytes() == (clean / name).read_bytes()
    record = json.loads((tables / "provenance.json").read_text())["identities"]["candidates"]["engine"]
    assert set(record) == {"_target_", "served", "prompts", "extensions", "max_context"}


def test_an_unreachable_server_ends_the_run_at_once(tmp_path: Path) -> None:
    settings = to_settings(compose(["experiment=laptop", "engine=openai", "engine.base_url=http://127.0.0.1:9/v1", "limit=2"]))
    run = Run(dataclasses.replace(settings, run_root=str(tmp_path), stages=["prepare", "generate"]))
    with pytest.raises(UsageError, match=r"no server answers at http://127\.0\.0\.1:9/v1"):
        run.execute()
