"""CompAct rounds: what each prompt holds, when a trajectory ends, which requests are shared, and what a draw depends on.

The engine is scripted where the text decides what happens next, and a tiny real model where numbers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import make_tokenizer

from xcompress.checkpoint import Loaded
from xcompress.engines.base import Draw, Engine, Generation, Progress, Request, check_length, derive_seed
from xcompress.engines.hf import HFEngine
from xcompress.prompts import Template
from xcompress.schema import CANDIDATES, Passage, Question, UsageError
from xcompress.settings import CompressorSettings, GenerationSettings
from xcompress.stages.generate import Compressor

TOKENIZER = make_tokenizer(True)
TEMPLATE = Template(
    Path("t"),
    {
        "system": "",
        "passage": "{title}={text}",
        "first": "Q:{question}\nD:{passages}",
        "later": "Q:{question}\nS:{summary}\nE:{evaluation}\nD:{passages}",
    },
)
SEED = 5
MORE, DONE = "\nEvaluation: more please [INCOMPLETE]", "\nEvaluation: enough [COMPLETE]"


@dataclass
class ScriptedEngine:
    """Follows the Engine protocol; ``script`` writes each continuation from the prompt's text and the draw."""

    script: Callable[[str, Draw], str]
    max_context: int = 100_000
    name: str = "scripted"
    reproducible: bool = True
    calls: list[list[Request]] = field(default_factory=list)
    scored: list[tuple[str, str]] = field(default_factory=list)
    likely: Callable[[str, str], float] = lambda context, continuation: 0.0

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        for request in requests:
            check_length(request, self.max_context)
        self.calls.append(list(requests))
        return [[self._continue(request, draw) for draw in request.draws] for request in requests]

    def _continue(self, request: Request, draw: Draw) -> Generation:
        ids = TOKENIZER(self.script(text_of(request.prompt), draw), add_special_tokens=False)["input_ids"]
        kept = tuple(ids[: request.max_new_tokens])
        return Generation(text_of(kept), kept, "stop" if len(kept) == len(ids) else "length", -0.5 * len(kept))

    def token_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        return [[value] for value in self.loglikelihood(pairs)]

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        for context, continuation in pairs:
            check_length(Request(tuple(context), (), len(continuation)), self.max_context)
        texts = [(text_of(context), text_of(continuation)) for context, continuation in pairs]
        self.scored += texts
        return [self.likely(*pair) for pair in texts]


def text_of(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def make_question(name: str, passages: int = 5) -> Question:
    return Question(name, f"Who is {name}?", ("x",), tuple(Passage(f"{name}{n}", f"t{n}") for n in range(1, passages + 1)))


def compressor(engine: Engine, tokenizer: Any = TOKENIZER, template: Template = TEMPLATE, **changes: Any) -> Compressor:
    values = {"judge": "generated", "max_rounds": 6, "max_new_tokens": 200, "chat": True, **changes}
    generation = GenerationSettings(values.pop("candidates", 2), values.pop("temperature", 0.7), values.pop("top_p", 0.9))
    size, seed = values.pop("segment_size", 2), values.pop("seed", SEED)
    return Compressor(engine, tokenizer, template, CompressorSettings(name="c", model="m", **values), generation, size, seed)


def user(body: str) -> str:
    """The whole prompt around a user turn."""
    return f"<|start|><|user|>{body}<|end|><|assistant|>"


def test_the_scripted_engine_is_an_engine() -> None:
    assert isinstance(ScriptedEngine(lambda prompt, draw: ""), Engine)


# ---- rounds


def test_prompts_of_every_round_byte_for_byte() -> None:
    outputs = iter(["Summary: one" + MORE, "two {summary}\nEvaluation: [INCOMPLETE] still {question}", "three" + MORE])
    engine = ScriptedEngine(lambda prompt, draw: next(outputs))
    (row,) = compressor(engine, candidates=0).candidates([make_question("A")])
    prompts = [text_of(call[0].prompt) for call in engine.calls]
    assert prompts == [
        user("Q:Who is A?\nD:A1=t1\n\nA2=t2"),
        user("Q:Who is A?\nS:one\nE:more please\nD:A3=t3\n\nA4=t4"),
        user("Q:Who is A?\nS:two {summary}\nE:still {question}\nD:A5=t5"),
    ]
    assert row["summary"] == "three"
    assert [r["round"] for r in row["rounds"]] == [1, 2, 3]
    assert [r["summary"] for r in row["rounds"]] == ["one", "two {summary}", "three"]
    assert [r["evaluation"] for r in row["rounds"]] == ["more please", "still {question}", "more please"]
    assert {r["verdict"] for r in row["rounds"]} == {"incomplete"}
    assert row["rounds"][0]["text"] == "Summary: one" + MORE, "the raw output is kept"
    assert [r["prompt_tokens"] for r in row["rounds"]] == [len(call[0].prompt) for call in engine.calls]
    assert row["compressor_tokens"] == sum(r["prompt_tokens"] + r["new_tokens"] for r in row["rounds"])
    pa.Table.from_pylist([row], schema=CANDIDATES)


def test_a_trajectory_stops_when_it_is_complete() -> None:
    engine = ScriptedEngine(lambda prompt, draw: "s" + (DONE if "S:" in prompt else MORE))
    (row,) = compressor(engine, candidates=0).candidates([make_question("A", 9)])
    assert [r["verdict"] for r in row["rounds"]] == ["incomplete", "complete"]
    assert len(engine.calls) == 2


@pytest.mark.parametrize(
    ("passages", "max_rounds", "rounds"), [(5, 6, 3), (4, 6, 2), (1, 6, 1), (2, 6, 1), (9, 3, 3), (9, 1, 1)]
)  # fmt: skip
def test_a_trajectory_ends_with_its_segments_or_max_rounds(passages: int, max_rounds: int, rounds: int) -> None:
    engine = ScriptedEngine(lambda prompt, draw: "s" + MORE)
    rows = compressor(engine, max_rounds=max_rounds).candidates([make_question("A", passages)])
    assert [len(row["rounds"]) for row in rows] == [rounds] * 3
    assert len(engine.calls) == rounds


def test_prose_does_not_end_a_trajectory() -> None:
    engine = ScriptedEngine(lambda prompt, draw: "s\nEvaluation: the list of rivers is complete, dates lack")
    (row,) = compressor(engine, candidates=0).candidates([make_question("A", 4)])
    assert [r["verdict"] for r in row["rounds"]] == ["missing", "missing"]


def test_one_trajectory_completes_while_others_go_on() -> None:
    a, b = make_question("A", 6), make_question("B", 6)
    second = derive_seed(SEED, "A", 2, 1)

    def script(prompt: str, draw: Draw) -> str:
        return f"{draw.seed}" + (DONE if draw.seed == second or ("Who is B" in prompt and not draw.temperature) else MORE)

    engine = ScriptedEngine(script)
    rows = compressor(engine).candidates([a, b])
    assert [(row["question_id"], row["candidate"]) for row in rows] == [(q, k) for q in "AB" for k in range(3)]
    assert [len(row["rounds"]) for row in rows] == [3, 3, 1, 1, 3, 3]
    assert rows[2]["summary"] == str(second) and rows[2]["rounds"][-1]["verdict"] == "complete"
    assert [sum(len(request.draws) for request in call) for call in engine.calls] == [6, 4, 4]


def test_cut_off_rounds_are_missing_and_keep_their_text() -> None:
    engine = ScriptedEngine(lambda prompt, draw: "a long summary" + DONE)
    (row,) = compressor(engine, candidates=0, max_new_tokens=8).candidates([make_question("A", 3)])
    assert [(r["finish_reason"], r["verdict"], r["summary"], r["new_tokens"]) for r in row["rounds"]] == [
        ("length", "missing", "a long s", 8)
    ] * 2
    assert row["summary"] == "a long s"
    assert row["rounds"][0]["logprob_sum"] == -4.0
    inside = ScriptedEngine(lambda prompt, draw: "short" + DONE)
    (row,) = compressor(inside, candidates=0, max_new_tokens=len("short\nEvaluation: enou")).candidates([make_question("A", 2)])
    assert (row["summary"], row["rounds"][0]["evaluation"], row["rounds"][0]["verdict"]) == ("short", "enou", "missing")


def test_blank_outputs_are_blank_candidates() -> None:
    engine = ScriptedEngine(lambda prompt, draw: "")
    rows = compressor(engine).candidates([make_question("A", 4)])
    assert [row["summary"] for row in rows] == [""] * 3
    assert all([r["verdict"] for r in row["rounds"]] == ["missing", "missing"] for row in rows)


# ---- requests and draws


def test_equal_prompts_are_one_request() -> None:
    engine = ScriptedEngine(lambda prompt, draw: ("same" if draw.seed % 2 else "even") + MORE)
    compressor(engine, candidates=9, repetition_penalty=1.2).candidates([make_question("A", 4)])
    first, second = engine.calls
    assert len(first) == 1 and len(first[0].draws) == 10
    seeds = [draw.seed for draw in first[0].draws]
    assert len({seed % 2 for seed in seeds[1:]}) == 2, "this seed gives both texts"
    assert len(second) == 2, "two texts, two prompts"
    assert sum(len(request.draws) for request in second) == 10
    assert len({request.prompt for request in second}) == 2
    assert {(request.max_new_tokens, request.repetition_penalty, request.stop) for request in first + second} == {
        (200, 1.2, ())
    }


def test_the_same_summary_with_another_evaluation_is_another_prompt() -> None:
    engine = ScriptedEngine(lambda prompt, draw: f"same\nEvaluation: {draw.temperature} [INCOMPLETE]")
    compressor(engine, candidates=1).candidates([make_question("A", 4)])
    assert [len(request.draws) for request in engine.calls[1]] == [1, 1]


def test_candidate_0_is_greedy_and_the_others_are_seeded() -> None:
    engine = ScriptedEngine(lambda prompt, draw: "s" + MORE)
    compressor(engine, temperature=0.6, top_p=0.8).candidates([make_question("A", 4)])
    for number, call in enumerate(engine.calls, start=1):
        (request,) = call
        assert request.draws == (
            Draw(),
            Draw(0.6, 0.8, derive_seed(SEED, "A", 1, number)),
            Draw(0.6, 0.8, derive_seed(SEED, "A", 2, number)),
        )


def _seeds(questions: Sequence[Question], **changes: Any) -> dict[tuple[str, int, int], int]:
    engine = ScriptedEngine(lambda prompt, draw: str(draw.seed))
    rows = compressor(engine, **changes).candidates(questions)
    return {
        (row["question_id"], row["candidate"], round_["round"]): int(round_["text"]) for row in rows for round_ in row["rounds"]
    }


def test_seeds_depend_on_seed_id_candidate_and_round_only() -> None:
    a, b, c = make_question("A", 4), make_question("B", 4), make_question("C", 2)
    everything = _seeds([a, b, c])
    assert _seeds([c, a]) == {key: value for key, value in everything.items() if key[0] in "AC"}
    assert _seeds([b, c, a]) == everything
    assert _seeds([a, b, c], candidates=1) == {key: value for key, value in everything.items() if key[1] < 2}
    assert _seeds([replace(a, question="Other?"), b, c], temperature=0.1, max_new_tokens=90) == everything
    sampled = {key: value for key, value in everything.items() if key[1] > 0}
    assert len(set(sampled.values())) == len(sampled), "no two draws share a stream"
    other = _seeds([a, b, c], seed=SEED + 1)
    assert not set(other.values()) & set(sampled.values())


def test_without_sampling_only_the_initial_summary() -> None:
    questions = [make_question("A", 4), make_question("B", 1)]
    engine = ScriptedEngine(lambda prompt, draw: "s" + MORE)
    rows = compressor(engine).candidates(questions, sampled=False)
    assert [(row["question_id"], row["candidate"]) for row in rows] == [("A", 0), ("B", 0)]
    assert all(request.draws == (Draw(),) for call in engine.calls for request in call)
    full = compressor(engine).candidates(questions)
    assert [row for row in full if row["candidate"] == 0] == rows


# ---- judges


def test_fixed_judge_takes_all_rounds_and_parses_nothing() -> None:
    engine = ScriptedEngine(lambda prompt, draw: " s" + DONE + "\n")
    (row,) = compressor(engine, judge="fixed", candidates=0, max_rounds=2).candidates([make_question("A", 9)])
    assert [(r["summary"], r["evaluation"], r["verdict"]) for r in row["rounds"]] == [("s" + DONE, "", "incomplete")] * 2
    assert engine.scored == []


def test_scored_judge_asks_for_the_likelier_tag() -> None:
    def likely(context: str, tag: str) -> float:
        complete = "S:" in context  # from the second round on
        return -1.0 if (tag == "[COMPLETE]") == complete else -2.0

    engine = ScriptedEngine(lambda prompt, draw: "facts ", likely=likely)
    (row,) = compressor(engine, judge="scored", candidates=0).candidates([make_question("A", 9)])
    assert [(r["summary"], r["evaluation"], r["verdict"]) for r in row["rounds"]] == [
        ("facts", "", "incomplete"),
        ("facts", "", "complete"),
    ]
    first = user("Q:Who is A?\nD:A1=t1\n\nA2=t2") + "facts \nEvaluation: "
    assert engine.scored[:2] == [(first, "[COMPLETE]"), (first, "[INCOMPLETE]")]


def test_scored_judge_ties_count_as_incomplete() -> None:
    engine = ScriptedEngine(lambda prompt, draw: "facts")
    (row,) = compressor(engine, judge="scored", candidates=0).candidates([make_question("A", 4)])
    assert [r["verdict"] for r in row["rounds"]] == ["incomplete", "incomplete"]


def test_scored_judge_has_room_for_the_tags() -> None:
    engine = ScriptedEngine(lambda prompt, draw: "x" * 99, max_context=160)
    question = replace(make_question("A"), passages=tuple(Passage("T", "word " * 30) for _ in range(4)))
    (row,) = compressor(engine, judge="scored", candidates=0, max_new_tokens=20).candidates([question])
    longest = row["rounds"][0]["prompt_tokens"] + 20 + len("\nEvaluation: [INCOMPLETE]")
    assert 155 <= longest <= 160
    assert row["rounds"][0]["finish_reason"] == "length"


# ---- length


def test_long_passages_are_dropped_and_counted() -> None:
    passages = tuple(Passage("T", f"{n} " + "word " * 20) for n in range(4))
    question = Question("A", "Who?", (), passages)
    whole = ScriptedEngine(lambda prompt, draw: "s" + MORE)
    compressor(whole, candidates=0, segment_size=4).candidates([question])
    full = len(whole.calls[0][0].prompt)
    tight = ScriptedEngine(lambda prompt, draw: "s" + MORE, max_context=full + 50 - 110)
    (row,) = compressor(tight, candidates=0, segment_size=4, max_new_tokens=50).candidates([question])
    (round_,) = row["rounds"]
    assert round_["passages_dropped"] == 2
    assert round_["prompt_tokens"] == len(tight.calls[0][0].prompt) <= full - 110
    assert round_["tokens_removed"] == full - round_["prompt_tokens"]
    text = text_of(tight.calls[0][0].prompt)
    assert text.startswith(user("Q:Who?\nD:T=0 word")[:20]) and text.endswith("word<|end|><|assistant|>")
    assert "T=1 " in text and "T=2 " not in text


def test_what_cannot_fit_names_the_question() -> None:
    engine = ScriptedEngine(lambda prompt, draw: "s", max_context=60)
    with pytest.raises(UsageError, match=r"question 'A': instruction and question alone take \d+ tokens; only 10 fit"):
        compressor(engine, max_new_tokens=50).candidates([make_question("A")])


# ---- a real model


def _rounded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the last digits of log-probabilities (sums in another order)."""
    return [{**row, "rounds": [{**r, "logprob_sum": round(r["logprob_sum"], 3)} for r in row["rounds"]]} for row in rows]


@pytest.mark.parametrize("judge", ["generated", "scored"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_do_not_depend_on_the_order_of_questions(tiny: Callable[[str], Loaded], family: str, judge: str) -> None:
    loaded = tiny(family)
    questions = [make_question("A", 4), make_question("B", 1), make_question("C", 3)]

    def rows(part: Sequence[Question]) -> dict[str, list[dict[str, Any]]]:
        made = compressor(HFEngine(loaded), loaded.tokenizer, judge=judge, max_new_tokens=10, temperature=1.0)
        found = _rounded(made.candidates(part))
        pa.Table.from_pylist(found, schema=CANDIDATES)
        return {q.id: [row for row in found if row["question_id"] == q.id] for q in part}

    together = rows(questions)
    assert rows(questions[::-1]) == together
    assert rows(questions[1:2]) | rows([questions[2], questions[0]]) == together
    assert rows(questions) == together
    texts = [row["rounds"][0]["text"] for row in together["A"]]
    assert len(set(texts)) == 3, "greedy and two samples differ"


def test_a_full_context_can_still_be_scored(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    question = replace(make_question("A"), passages=tuple(Passage("T", "word " * 60) for _ in range(2)))
    made = compressor(HFEngine(loaded), loaded.tokenizer, judge="scored", max_new_tokens=30, candidates=1)
    assert all(row["rounds"][0]["tokens_removed"] > 0 for row in made.candidates([question]))
