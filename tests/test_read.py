"""Reading: raw passages, closed book and every distinct summary once, with exactly the prompts that are expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import make_tokenizer

from xcompress.checkpoint import Loaded
from xcompress.config import CONFIGS
from xcompress.engines.base import Draw, Engine, Generation, Progress, Request, check_length
from xcompress.engines.hf import HFEngine
from xcompress.prompts import READER_PARTS, Template, load_demos, load_template
from xcompress.schema import ANSWERS, Passage, Question, UsageError
from xcompress.settings import ReaderSettings
from xcompress.stages.read import QuestionReader

TOKENIZER = make_tokenizer(True)
SHIPPED = load_template(CONFIGS / "prompts" / "reader_short_answer.yaml", READER_PARTS)
SMALL = Template(
    Path("t"),
    {
        "system": "Be brief.",
        "passage": "{title}={text}",
        "demo": "{question}>{answer}",
        "with_context": "{demos}\n{context}\n{question}>",
        "closed_book": "{demos}\n{question}>",
    },
)
DEMOS = (("Is {context} a word?", "no"), ("Two?", "2"))
A = Question("a", "Who is Ada?", ("x",), (Passage("Ada", "She counted."), Passage("Bob", "He sold.")))
B = Question("b", "Who is {summary}?", ("y",), (Passage("", "{question}"),))


@dataclass
class ScriptedEngine:
    """Follows the Engine protocol: answers every prompt by ``script`` and keeps the requests."""

    script: Callable[[str], str]
    max_context: int = 100_000
    name: str = "scripted"
    reproducible: bool = True
    requests: list[Request] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        self.requests += requests
        for request in requests:
            check_length(request, self.max_context)
        texts = [self.script(text_of(request.prompt)) for request in requests]
        return [[Generation(text, tuple(range(len(text))), "length", -float(len(text)))] for text in texts]

    def token_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        return [[value] for value in self.loglikelihood(pairs)]

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        raise AssertionError("reading asks for no likelihood")


def text_of(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def reader(engine: Engine, template: Template = SMALL, tokenizer: Any = TOKENIZER, **changes: Any) -> QuestionReader:
    return QuestionReader(engine, tokenizer, template, DEMOS, ReaderSettings(name="r", model="m", **changes))


def candidates(question: Question, *summaries: str) -> list[dict[str, Any]]:
    return [{"question_id": question.id, "candidate": k, "summary": summary} for k, summary in enumerate(summaries)]


def test_places_in_order() -> None:
    engine = ScriptedEngine(lambda prompt: f" {len(prompt)} ")
    rows = reader(engine).read([A, B], [*candidates(B, "s", "t"), *candidates(A, "u")])
    assert [(row["question_id"], row["source"], row["candidate"]) for row in rows] == [
        ("a", "raw_passages", None),
        ("a", "closed_book", None),
        ("a", "candidate", 0),
        ("b", "raw_passages", None),
        ("b", "closed_book", None),
        ("b", "candidate", 0),
        ("b", "candidate", 1),
    ]
    assert [row["prediction"] for row in rows] == [str(len(text_of(request.prompt))) for request in engine.requests]
    assert [row["prompt_tokens"] for row in rows] == [len(request.prompt) for request in engine.requests]
    pa.Table.from_pylist(rows, schema=ANSWERS)


def test_prompts_byte_for_byte() -> None:
    engine = ScriptedEngine(lambda prompt: "")
    reader(engine).read([A, B], [*candidates(A, "It {is} {question} {{so}}."), *candidates(B, "")])
    head = "<|start|>Be brief.\n\nIs {context} a word?>no\n\nTwo?>2\n"
    assert [text_of(request.prompt) for request in engine.requests] == [
        head + "Ada=She counted.\n\nBob=He sold.\nWho is Ada?>",
        head + "Who is Ada?>",
        head + "It {is} {question} {{so}}.\nWho is Ada?>",
        head + "={question}\nWho is {summary}?>",
        head + "Who is {summary}?>",
        head + "\nWho is {summary}?>",
    ]


def test_the_shipped_prompt_byte_for_byte() -> None:
    engine = ScriptedEngine(lambda prompt: "")
    reader(engine, SHIPPED).read([A], candidates(A, "It is so."))
    head = (
        "<|start|>Answer each question with a few words.\n\n"
        "Question: Is {context} a word?\nAnswer: no\n\nQuestion: Two?\nAnswer: 2\n\n"
    )
    raw, closed, summary = (text_of(request.prompt) for request in engine.requests)
    ask = "Read the text, then answer the question with a few words.\nText: "
    assert raw == f"{head}{ask}Ada: She counted.\n\nBob: He sold.\nQuestion: Who is Ada?\nAnswer:"
    assert closed == f"{head}Question: Who is Ada?\nAnswer:"
    assert summary == f"{head}{ask}It is so.\nQuestion: Who is Ada?\nAnswer:"


@pytest.mark.parametrize("path", sorted((CONFIGS / "demos").glob("*.yaml")), ids=lambda path: path.stem)
def test_all_demos_are_there(path: Path) -> None:
    engine = ScriptedEngine(lambda prompt: "")
    demos = load_demos(path)
    made = QuestionReader(engine, TOKENIZER, SHIPPED, demos, ReaderSettings(name="r", model="m"))
    made.read([A], candidates(A, "s"))
    for request in engine.requests:
        text = text_of(request.prompt)
        assert all(f"Question: {question}\nAnswer: {answer}\n" in text for question, answer in demos)
        assert text.count("Answer:") == len(demos) + 1


def test_with_a_chat_template() -> None:
    engine = ScriptedEngine(lambda prompt: "")
    reader(engine, chat=True).read([A], [])
    assert text_of(engine.requests[1].prompt) == (
        "<|start|><|system|>Be brief.<|end|><|user|>Is {context} a word?>no\n\nTwo?>2\nWho is Ada?><|end|><|assistant|>"
    )


def test_requests_are_greedy_single_lines() -> None:
    engine = ScriptedEngine(lambda prompt: "")
    reader(engine, max_new_tokens=9).read([A], candidates(A, "s"))
    assert {(r.draws, r.max_new_tokens, r.stop, r.repetition_penalty) for r in engine.requests} == {
        ((Draw(),), 9, ("\n",), 1.0)
    }


def test_equal_summaries_are_read_once() -> None:
    engine = ScriptedEngine(lambda prompt: prompt[-30:-12])
    rows = reader(engine).read([A, B], [*candidates(A, "s", "t", "s", "s", "t ", ""), *candidates(B, "s", "s")])
    assert len(engine.requests) == (2 + 4) + (2 + 1), "two of each question, then its distinct summaries"
    found = {(row["question_id"], row["candidate"]): row for row in rows if row["source"] == "candidate"}
    assert len(found) == 8

    def without_number(key: tuple[str, int]) -> dict[str, Any]:
        return {name: value for name, value in found[key].items() if name != "candidate"}

    assert without_number(("a", 0)) == without_number(("a", 2)) == without_number(("a", 3))
    assert without_number(("a", 1)) != without_number(("a", 4)), "not even white space is equal"
    assert found["a", 0]["prediction"] != found["b", 0]["prediction"], "never shared between questions"


def test_a_blank_summary_is_read_with_an_empty_context() -> None:
    engine = ScriptedEngine(lambda prompt: "x")
    rows = reader(engine).read([A], candidates(A, ""))
    _, closed, blank = (text_of(request.prompt) for request in engine.requests)
    assert rows[2]["source"] == "candidate" and blank != closed
    assert blank.endswith("2\n\nWho is Ada?>")


def test_long_passages_are_shortened_and_counted() -> None:
    passages = tuple(Passage("T", f"{n} " + "word " * 20) for n in range(5))
    question = Question("q", "Who is Ada?", (), passages)
    whole = ScriptedEngine(lambda prompt: "x")
    reader(whole).read([question], [])
    full = len(whole.requests[0].prompt)
    tight = ScriptedEngine(lambda prompt: "x", max_context=full - 150 + 7)
    raw, closed, summary = reader(tight, max_new_tokens=7).read([question], candidates(question, "short"))
    assert raw["passages_dropped"] == 2
    assert raw["prompt_tokens"] <= full - 150
    assert raw["tokens_removed"] == full - raw["prompt_tokens"]
    text = text_of(tight.requests[0].prompt)
    assert text.startswith("<|start|>Be brief.\n\nIs {context} a word?>no\n\nTwo?>2\nT=0 ") and text.endswith("\nWho is Ada?>")
    assert "T=2 " in text and "T=3 " not in text
    assert [(row["passages_dropped"], row["tokens_removed"]) for row in (closed, summary)] == [(0, 0), (0, 0)]


def test_what_cannot_fit_names_the_question() -> None:
    with pytest.raises(UsageError, match=r"question 'a': instruction and question alone take \d+ tokens; only 18 fit"):
        reader(ScriptedEngine(lambda prompt: "x", max_context=50)).read([A], [])


def test_numbers_of_the_generation_are_kept() -> None:
    rows = reader(ScriptedEngine(lambda prompt: " Paris ")).read([A], candidates(A, "s"))
    for row in rows:
        assert (row["prediction"], row["new_tokens"], row["finish_reason"], row["logprob_sum"]) == ("Paris", 7, "length", -7.0)


def test_a_real_model_reads_one_line(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    made = reader(HFEngine(loaded), tokenizer=loaded.tokenizer, max_new_tokens=24)
    pool = [*candidates(A, "It is so.", "It is not.", "It is so."), *candidates(B, "", "So.")]
    rows = made.read([A, B], pool)
    assert len(rows) == 2 * 2 + 5
    assert not any("\n" in row["prediction"] for row in rows)
    assert all(row["new_tokens"] <= 24 and row["finish_reason"] in {"stop", "length"} for row in rows)
    other = made.read([B, A], pool)
    keys = ("question_id", "source", "candidate", "prediction", "new_tokens", "finish_reason")
    assert sorted([str([row[key] for key in keys]) for row in rows]) == sorted(str([row[key] for key in keys]) for row in other)
    assert {row["prediction"] for row in rows} != {""}


def test_the_answer_is_the_first_line(tiny: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine cuts at the line end that the stage asks for: a model that writes lines gives the first one."""
    loaded = tiny("llama")
    engine = HFEngine(loaded)
    line = iter(loaded.tokenizer("New York\nLondon", add_special_tokens=False)["input_ids"])
    following = _next_of(engine, line)
    monkeypatch.setattr(engine, "_next", following)
    (row,) = [row for row in reader(engine, tokenizer=loaded.tokenizer).read([A], []) if row["source"] == "raw_passages"]
    assert (row["prediction"], row["finish_reason"]) == ("New York", "stop")


def _next_of(engine: HFEngine, line: Any) -> Callable[..., Any]:
    """A replacement of the engine's choice of tokens: every row gets the next token of ``line``."""
    import torch

    def following(logits: Any, *_: Any) -> tuple[Any, Any]:
        token = next(line)
        return torch.full((len(logits),), token), torch.zeros(len(logits))

    return following
