"""From template file to token ids, fitting a model's length, and reading a compressor's output."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAT, CHAT_WITH_START, CHAT_WITHOUT_SYSTEM, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from xcompress import prompts
from xcompress.config import CONFIGS
from xcompress.prompts import (
    COMPRESSOR_PARTS,
    READER_PARTS,
    Parsed,
    Template,
    chat_ids,
    encode,
    fill,
    fit,
    format_passages,
    load_demos,
    load_template,
    parse_round,
    start_token,
)
from xcompress.schema import Passage, UsageError

START = 1  # id of <|start|>
ODD = (
    'S = {x : x > 0}, see {{note}}, {0}, ${x}, {question}, {passages} and {"a": [1, {}]}; \u2028 \u0085 \0 \U0001f9ea é \\n %s'
)
PARTS = {
    "system": "Be brief.",
    "passage": "{title}: {text}",
    "first": "{question}\n{passages}",
    "later": "{question}{passages}{summary}",
}


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def save(path: Path, parts: Any) -> Path:
    import yaml

    path.write_text(yaml.safe_dump(parts, allow_unicode=True), encoding="utf-8")
    return path


# ---- filling


@pytest.mark.parametrize("head", ['{{"json": {"a": {0}}}} ', '{"json": [{"a": 1}]} ', "{0} {} { ", "}", "%s $x ${y} {other}"])
def test_values_arrive_byte_for_byte(head: str) -> None:
    filled = fill(head + "{question}|{text}|{question}${x}{other}", question=ODD, text=ODD)
    assert filled == f"{head}{ODD}|{ODD}|{ODD}" + "${x}{other}"


@given(st.text(), st.text())
def test_values_are_never_filled_themselves(question: str, passages: str) -> None:
    assert (
        fill("a{question}b{passages}c{question}", question=question, passages=passages) == f"a{question}b{passages}c{question}"
    )


def test_a_placeholder_without_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill("{question} {summary}", question="q")


def test_odd_passages_reach_the_token_ids() -> None:
    tokenizer = make_tokenizer(True)
    template = Template(Path("t"), PARTS)
    user = fill(template["first"], question=ODD, passages=format_passages(template, [Passage(ODD, ODD), Passage("B", ODD)]))
    text = decode(tokenizer, chat_ids(tokenizer, "", user, chat=True))
    assert text == f"<|start|><|user|>{ODD}\n{ODD}: {ODD}\n\nB: {ODD}<|end|><|assistant|>"


# ---- template and demonstration files


@pytest.mark.parametrize("path", sorted((CONFIGS / "prompts").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_prompts_load(path: Path) -> None:
    required = {"compressor": COMPRESSOR_PARTS, "reader": READER_PARTS}[path.stem.partition("_")[0]]
    assert set(load_template(path, required).parts) == set(required)


@pytest.mark.parametrize("path", sorted((CONFIGS / "demos").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_demos_load(path: Path) -> None:
    demos = load_demos(path)
    assert len(demos) >= 5
    assert not {answer for _, answer in demos} & {"True", "False"}, "YAML's yes and no must be quoted"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": "{question}"}, r"part 'first' lacks the placeholder \{passages\}"),
        ({"later": "{question} {passages} {evaluation}"}, r"part 'later' lacks the placeholder \{summary\}"),
        ({"passage": "{title}"}, r"lacks the placeholder \{text\}"),
        ({"first": "{question}{passages}{summary}"}, r"part 'first' uses \{summary\}, which has no value there; it may use"),
        ({"system": "Answer {question}"}, r"part 'system' uses \{question\}"),
        ({"later": None}, "must hold named texts"),
        ({"frist": "{question}{passages}"}, "unknown part 'frist'; known: system, passage, first, later"),
    ],
)
def test_wrong_templates_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_template(save(tmp_path / "p.yaml", {**PARTS, **change}), COMPRESSOR_PARTS)


def test_evaluation_is_optional_in_later_rounds(tmp_path: Path) -> None:
    later = "{evaluation}{question}{passages}{summary}"
    assert load_template(save(tmp_path / "p.yaml", {**PARTS, "later": later}), COMPRESSOR_PARTS)["later"] == later
    assert load_template(save(tmp_path / "q.yaml", PARTS), COMPRESSOR_PARTS).parts == PARTS


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"- a list", "must hold named texts"), (b"a: [", "not valid YAML"), (b"a: \xff", "cannot be read"), (b"", "named texts")],
)
def test_files_that_are_no_template(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "p.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_template(tmp_path / "p.yaml", COMPRESSOR_PARTS)


def test_missing_files(tmp_path: Path) -> None:
    incomplete = {key: value for key, value in PARTS.items() if key != "later"}
    with pytest.raises(UsageError, match="lacks the part 'later'"):
        load_template(save(tmp_path / "p.yaml", incomplete), COMPRESSOR_PARTS)
    with pytest.raises(UsageError, match="does not exist"):
        load_template(tmp_path / "none.yaml", COMPRESSOR_PARTS)
    with pytest.raises(UsageError, match="cannot be read"):
        load_template("", COMPRESSOR_PARTS)
    with pytest.raises(UsageError, match="does not exist"):
        load_demos(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"question": "q"}, "must hold a list"),
        ([{"question": "q", "answers": ["a"]}, {"question": "q", "answers": []}], "entry 2: needs a question and answers"),
        ([{"answers": ["a"]}], "entry 1: needs"),
        (["q"], "entry 1: needs"),
        ([{"question": "q", "answers": [True]}], "entry 1: write a yes or no in quotes"),
        ([{"question": "q", "answers": [False]}], "entry 1: write a yes or no in quotes"),
    ],
)
def test_wrong_demos_are_refused(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_demos(save(tmp_path / "d.yaml", entries))


def test_demos_take_the_main_answer(tmp_path: Path) -> None:
    entries = [
        {"question": "a?", "answers": ["x", "y"]},
        {"question": "b?", "answers": 1831},
        {"question": "c?", "answers": [0]},
    ]
    assert load_demos(save(tmp_path / "d.yaml", entries)) == (("a?", "x"), ("b?", "1831"), ("c?", "0"))


# ---- start tokens and chat templates


@pytest.mark.parametrize("chat_template", [CHAT, CHAT_WITH_START])
@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("chat", [True, False])
def test_exactly_one_start_token(chat_template: str, system: str, chat: bool) -> None:
    tokenizer = make_tokenizer(True, chat_template)
    ids = chat_ids(tokenizer, system, "Who?", chat)
    assert start_token(tokenizer) == START
    assert ids[0] == START and ids.count(START) == 1
    turn = f"<|system|>{system}<|end|>" if system else ""
    plain = f"{system}\n\nWho?" if system else "Who?"
    assert decode(tokenizer, ids[1:]) == (f"{turn}<|user|>Who?<|end|><|assistant|>" if chat else plain)


@pytest.mark.parametrize("chat", [True, False])
def test_no_start_token_where_the_tokenizer_has_none(chat: bool) -> None:
    tokenizer = make_tokenizer(False)
    assert start_token(tokenizer) is None
    assert START not in chat_ids(tokenizer, "Be brief.", "Who?", chat)
    assert encode(tokenizer, "ab") == encode(tokenizer, "ab", start=False)


def test_a_template_may_write_the_only_start_token() -> None:
    assert chat_ids(make_tokenizer(False, CHAT_WITH_START), "", "Who?", chat=True).count(START) == 1


def test_encode_with_and_without_start() -> None:
    tokenizer = make_tokenizer(True)
    bare = encode(tokenizer, "ab", start=False)
    assert START not in bare and len(bare) == 2
    assert encode(tokenizer, "ab") == [START, *bare]
    assert encode(tokenizer, "<|start|><|start|>ab") == [START, *bare]
    assert encode(tokenizer, "") == [START]
    assert encode(tokenizer, "", start=False) == []


SILENT = "{% for m in messages if m['role'] != 'system' %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"


@pytest.mark.parametrize("template", [CHAT_WITHOUT_SYSTEM, SILENT], ids=["raises", "leaves it out"])
def test_a_refused_system_turn_opens_the_user_turn(template: str) -> None:
    tokenizer = make_tokenizer(True, template)
    text = decode(tokenizer, chat_ids(tokenizer, "Be brief.", "Who?", chat=True))
    assert text == "<|start|><|user|>Be brief.\n\nWho?<|end|><|assistant|>"


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_template_that_refuses_everything_is_named(system: str) -> None:
    tokenizer = make_tokenizer(True, "{{ raise_exception('never') }}")
    with pytest.raises(UsageError, match="fails on a plain user turn: never"):
        chat_ids(tokenizer, system, "Who?", chat=True)


def test_without_template_plain_text_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    prompts._warn_no_template.cache_clear()
    tokenizer = make_tokenizer(True, None)
    with caplog.at_level(logging.WARNING):
        ids = [chat_ids(tokenizer, "Be brief.", "Who?", chat=True) for _ in range(3)]
    assert {decode(tokenizer, found) for found in ids} == {"<|start|>Be brief.\n\nWho?"}
    assert len(caplog.records) == 1 and "no chat template" in caplog.text


def test_plain_prompts_of_a_chat_model_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    prompts._warn_no_template.cache_clear()
    chat_ids(make_tokenizer(True, None), "Be brief.", "Who?", chat=False)
    assert not caplog.records


# ---- fitting

TOKENIZER = make_tokenizer(True)
TEMPLATE = Template(Path("t"), PARTS)
LAYOUTS = {"question first": "Do it. {question}\n{passages}", "question last": "Do it. {passages}\n{question}"}


def build(passages: Sequence[Passage], layout: str = LAYOUTS["question last"]) -> tuple[int, ...]:
    user = fill(layout, question="Who is it?", passages=format_passages(TEMPLATE, passages))
    return chat_ids(TOKENIZER, "Be brief.", user, chat=True)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_whole_passages_go_first_from_the_end(layout: str) -> None:
    passages = [Passage(f"T{n}", f"text number {n}") for n in range(30)]
    full = build(passages, layout)
    kept = build(passages[:7], layout)
    fitted = fit(lambda p: build(p, layout), passages, len(kept))
    assert fitted.ids == kept
    assert (fitted.passages_dropped, fitted.tokens_removed) == (23, len(full) - len(kept))
    text = decode(TOKENIZER, fitted.ids)
    assert text.startswith("<|start|><|system|>Be brief.<|end|><|user|>Do it. ")
    assert "Who is it?" in text and text.endswith("<|end|><|assistant|>")


def test_then_words_of_the_one_left() -> None:
    passages = [Passage("T", "one two three four"), Passage("U", "five")]
    wanted = build([Passage("T", "one two")])
    fitted = fit(build, passages, len(wanted) + 3)
    assert fitted.ids == wanted
    assert (fitted.passages_dropped, fitted.tokens_removed) == (1, len(build(passages)) - len(wanted))


def test_what_fits_is_left_alone() -> None:
    passages = [Passage("T", "one  two\n three ")]
    ids = build(passages)
    assert fit(build, passages, len(ids)) == prompts.Fitted(ids, 0, 0)


def test_nothing_fits() -> None:
    smallest = len(build([Passage("T", "")]))
    assert len(fit(build, [Passage("T", "a b"), Passage("U", "c")], smallest).ids) == smallest
    with pytest.raises(UsageError, match=rf"take {smallest} tokens; only {smallest - 1} fit"):
        fit(build, [Passage("T", "a b"), Passage("U", "c")], smallest - 1)
    with pytest.raises(UsageError, match="fit the model"):
        fit(build, [], 3)


WORDS = st.lists(st.sampled_from(["a", "bc", "{text}", "déf", "", "\n", "\U0001f9ea"]), max_size=12).map(" ".join)
PASSAGES = st.lists(st.builds(Passage, st.sampled_from(["", "T", "A title"]), WORDS), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(PASSAGES, st.integers(40, 200))
def test_fit_never_exceeds_the_budget_and_is_maximal(passages: list[Passage], budget: int) -> None:
    full = build(passages)
    try:
        fitted = fit(build, passages, budget)
    except UsageError:
        assert len(build([Passage(passages[0].title, "")])) > budget
        return
    kept = len(passages) - fitted.passages_dropped
    assert len(fitted.ids) <= budget
    assert fitted.tokens_removed == len(full) - len(fitted.ids)
    assert kept >= 1 and (kept == len(passages) or len(build(passages[: kept + 1])) > budget), "one more passage would not fit"
    if fitted.ids != build(passages[:kept]):
        assert kept == 1, "words are cut only where one passage is left"
        title, words = passages[0].title, passages[0].text.split(" ")
        sizes = [build([Passage(title, " ".join(words[:count]))]) for count in range(len(words) + 1)]
        at = max(count for count, ids in enumerate(sizes) if ids == fitted.ids)
        assert len(sizes[at + 1]) > budget, "one more word would not fit"


# ---- the compressor's output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is so.\nEvaluation: All is said. [COMPLETE]", Parsed("It is so.", "All is said.", "complete")),
        ("It is so.\n\nEvaluation: A date lacks. [INCOMPLETE]", Parsed("It is so.", "A date lacks.", "incomplete")),
        ("S\nEvaluation: [INCOMPLETE] A date lacks.", Parsed("S", "A date lacks.", "incomplete")),
        ("S\nEvaluation: [COMPLETE]", Parsed("S", "", "complete")),
        # labels and Markdown
        ("Summary: S\nEvaluation: R [COMPLETE]", Parsed("S", "R", "complete")),
        ("Updated Summary: S\nEvaluation: R [COMPLETE]", Parsed("S", "R", "complete")),
        ("**Summary:** S\n\n**Evaluation:** R **[COMPLETE]**", Parsed("S", "R", "complete")),
        ("**Summary**: S\n**Evaluation**: R [INCOMPLETE].", Parsed("S", "R", "incomplete")),
        ("## Summary\nS\n\n## Evaluation\nR [COMPLETE]", Parsed("S", "R", "complete")),
        ("### Summary:\nS\n### Evaluation:\nR\n[COMPLETE]\n", Parsed("S", "R", "complete")),
        ("S\nevaluation : R [Complete]", Parsed("S", "R", "complete")),
        ("S. Evaluation: R [COMPLETE]", Parsed("S.", "R", "complete")),
        # tags without brackets decide only in capitals
        ("S\nEvaluation: All is said. COMPLETE", Parsed("S", "All is said.", "complete")),
        ("S\nEvaluation: INCOMPLETE. A date lacks.", Parsed("S", "A date lacks.", "incomplete")),
        ("S\nEvaluation: **INCOMPLETE**", Parsed("S", "", "incomplete")),
        ("S\nEvaluation: The list is complete", Parsed("S", "The list is complete", "missing")),
        ("S\nEvaluation: Complete dates lack.", Parsed("S", "Complete dates lack.", "missing")),
        ("S\nEvaluation: This is NOT COMPLETE.", Parsed("S", "This is NOT COMPLETE.", "missing")),
        # the words in the reason
        ("S\nEvaluation: Not incomplete any more. [COMPLETE]", Parsed("S", "Not incomplete any more.", "complete")),
        ("S\nEvaluation: The list is complete. [INCOMPLETE]", Parsed("S", "The list is complete.", "incomplete")),
        ("S\nEvaluation: It is COMPLETE nonsense. [INCOMPLETE]", Parsed("S", "It is COMPLETE nonsense.", "incomplete")),
        # both tags contradict each other
        ("S\nEvaluation: [COMPLETE] or [INCOMPLETE]?", Parsed("S", "or?", "incomplete")),
        ("S\nEvaluation: [INCOMPLETE] no, [COMPLETE]", Parsed("S", "no,", "incomplete")),
        # cut off or absent
        ("It is so, and furth", Parsed("It is so, and furth", "", "missing")),
        ("S\nEvalua", Parsed("S\nEvalua", "", "missing")),
        ("S\nEvaluation:", Parsed("S", "", "missing")),
        ("S\nEvaluation: It lacks [INCOMPL", Parsed("S", "It lacks [INCOMPL", "missing")),
        ("S\nEvaluation: It lacks. [INCOMPLETE", Parsed("S", "It lacks.", "incomplete")),
        ("S [COMPLETE]", Parsed("S", "", "complete")),
        ("", Parsed("", "", "missing")),
        (" \n ", Parsed("", "", "missing")),
        ("Evaluation: R [COMPLETE]", Parsed("", "R", "complete")),
        # prose that holds the words
        ("The Evaluation: a novel, and Summary: a play", Parsed("The Evaluation: a novel, and Summary: a play", "", "missing")),
        ("Complete list: {a} [b]\nEvaluation: R [INCOMPLETE]", Parsed("Complete list: {a} [b]", "R", "incomplete")),
        # a model that goes on writing
        ("S\nEvaluation: R [INCOMPLETE]\n\nSummary: T\nEvaluation: U [COMPLETE]", Parsed("S", "R", "incomplete")),
        ("S\nEvaluation: R [COMPLETE]\nEvaluation: R [INCOMPLETE]", Parsed("S", "R", "complete")),
    ],
)  # fmt: skip
def test_parse_round(text: str, expected: Parsed) -> None:
    assert parse_round(text) == expected


@given(st.text())
def test_any_output_is_read(text: str) -> None:
    parsed = parse_round(text)
    assert parsed.verdict in {"complete", "incomplete", "missing"}
    again = parse_round(f"kept\nEvaluation: {text}")
    assert again.summary == "kept"
