"""Every prompt, from template file to token ids, and the parser of a compressor's output.

Templates live in YAML files (``configs/prompts``), demonstrations in ``configs/demos``. Placeholders are filled in one pass, so
braces in passages, questions or summaries reach the model byte for byte and are never taken for placeholders.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from xcompress.schema import Passage, UsageError

log = logging.getLogger(__name__)
_PLACEHOLDER = re.compile(r"\{(question|passages|summary|evaluation|title|text|answer|demos|context)\}")


def fill(template: str, **values: str) -> str:
    """Replace our own placeholders by ``values`` in a single pass; other braces stay as they are.

    Raises:
        KeyError: the template uses a placeholder for which there is no value here.
    """
    return _PLACEHOLDER.sub(lambda match: values[match.group(1)], template)


@dataclass(frozen=True)
class Template:
    """A prompt file: named parts, each a text with placeholders."""

    path: Path
    parts: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.parts[name]


def load_template(path: str | Path, required: Mapping[str, Sequence[str]]) -> Template:
    """Read a prompt file and check it before any model is loaded.

    Args:
        path: YAML file of named texts.
        required: for each part that must be there, the placeholders that it must hold.

    Raises:
        UsageError: the file is missing, is not a mapping of texts, lacks a part or a placeholder, or has an unknown one.
    """
    path = Path(path)
    parts = _read_yaml(path, "prompt file")
    if not isinstance(parts, dict) or not all(isinstance(value, str) for value in parts.values()):
        raise UsageError(f"prompt file {path} must hold named texts (name: text), nothing else")
    unknown = [str(part) for part in parts if part not in required]
    if unknown:
        raise UsageError(f"prompt file {path} has an unknown part {unknown[0]!r}; known: {', '.join(required)}")
    for part, placeholders in required.items():
        if part not in parts:
            raise UsageError(f"prompt file {path} lacks the part {part!r}; it has {', '.join(parts)}")
        absent = [name for name in placeholders if "{" + name + "}" not in parts[part]]
        if absent:
            raise UsageError(f"prompt file {path}: part {part!r} lacks the placeholder {{{absent[0]}}}")
        allowed = {*placeholders, *_OPTIONAL.get(part, ())}
        extra = [name for name in _PLACEHOLDER.findall(parts[part]) if name not in allowed]
        if extra:
            raise UsageError(
                f"prompt file {path}: part {part!r} uses {{{extra[0]}}}, which has no value there;"
                f" it may use {', '.join('{' + name + '}' for name in sorted(allowed))}"
            )
    return Template(path, parts)


def _read_yaml(path: Path, what: str) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{what} {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{what} {path} is not valid YAML: {str(error).splitlines()[0]}") from None


_OPTIONAL: Mapping[str, tuple[str, ...]] = {"later": ("evaluation",)}
COMPRESSOR_PARTS: Mapping[str, Sequence[str]] = {
    "system": (),
    "passage": ("title", "text"),
    "first": ("question", "passages"),
    "later": ("question", "passages", "summary"),
}
READER_PARTS: Mapping[str, Sequence[str]] = {
    "system": (),
    "passage": ("title", "text"),
    "demo": ("question", "answer"),
    "with_context": ("demos", "context", "question"),
    "closed_book": ("demos", "question"),
}


@lru_cache(maxsize=32)
def load_demos(path: Path) -> tuple[tuple[str, str], ...]:
    """(question, answer) pairs of a demonstrations file: a YAML or JSON list of {question, answers}.

    Raises:
        UsageError: the file is missing or an entry lacks one of the two.
    """
    entries = _read_yaml(path, "demonstrations file")
    if not isinstance(entries, list):
        raise UsageError(f"demonstrations file {path} must hold a list of {{question, answers}}")
    pairs = []
    for position, entry in enumerate(entries, start=1):
        answers = entry.get("answers") if isinstance(entry, dict) else None
        answer = answers[0] if isinstance(answers, list) and answers else answers
        if answer in (None, "", []) or not entry.get("question"):
            raise UsageError(f"demonstrations file {path}, entry {position}: needs a question and answers")
        if isinstance(answer, bool):
            raise UsageError(
                f"demonstrations file {path}, entry {position}: write a yes or no in quotes (YAML reads true, false)"
            )
        pairs.append((str(entry["question"]), str(answer)))
    return tuple(pairs)


def format_passages(template: Template, passages: Sequence[Passage]) -> str:
    """Passages one after the other, separated by an empty line."""
    return "\n\n".join(fill(template["passage"], title=p.title, text=p.text).strip() for p in passages)


# ---- text to token ids


def start_token(tokenizer: Any) -> int | None:
    """The id that the tokenizer itself puts before a text (Llama 3, Gemma: yes; Qwen, GPT-2, SmolLM2: none)."""
    with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    first = with_special[0] if with_special else None
    return (
        int(first)
        if first is not None and first == tokenizer.bos_token_id and with_special[: len(without)] != without
        else None
    )


def encode(tokenizer: Any, text: str, start: bool = True) -> list[int]:
    """Token ids of ``text`` with exactly one start token in front where the tokenizer has one (none with ``start=False``)."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    first = start_token(tokenizer)
    if first is None:
        return ids
    while ids and ids[0] == first:  # a chat template may have written it already
        ids.pop(0)
    return [first, *ids] if start else ids


def chat_ids(tokenizer: Any, system: str, user: str, chat: bool) -> tuple[int, ...]:
    """Token ids of a prompt as the model is to continue it.

    With a chat template: system and user turn and the assistant's tag; where the template refuses a system turn (or leaves it
    out), its text opens the user turn. Without one (or ``chat=False``): system, an empty line, user. The same rule serves every
    stage and engine.
    """
    plain = f"{system}\n\n{user}" if system else user
    if not chat:
        return tuple(encode(tokenizer, plain))
    if not getattr(tokenizer, "chat_template", None):
        _warn_no_template(str(getattr(tokenizer, "name_or_path", "")))
        return tuple(encode(tokenizer, plain))
    text = None
    if system:
        with suppress(Exception):  # templates refuse in their own ways
            text = _apply(tokenizer, {"role": "system", "content": system}, {"role": "user", "content": user})
    if text is None or system.strip() not in text:
        try:
            text = _apply(tokenizer, {"role": "user", "content": plain})
        except Exception as error:
            raise UsageError(f"the chat template of {tokenizer.name_or_path} fails on a plain user turn: {error}") from error
    return tuple(encode(tokenizer, text))


def _apply(tokenizer: Any, *turns: dict[str, str]) -> str:
    return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True))


@lru_cache(maxsize=32)
def _warn_no_template(name: str) -> None:
    log.warning("the tokenizer %s has no chat template: prompts are plain text (instruction, empty line, task)", name)


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits, and what it cost: whole passages left out from the end, and tokens removed in all."""

    ids: tuple[int, ...]
    passages_dropped: int = 0
    tokens_removed: int = 0


def fit(build: Callable[[Sequence[Passage]], tuple[int, ...]], passages: Sequence[Passage], budget: int) -> Fitted:
    """Shorten passage text, and nothing else, until ``build(passages)`` has at most ``budget`` tokens.

    Whole passages go first, from the end; then the words of the one that is left, from its end.

    Raises:
        UsageError: the prompt is too long even without any passage text.
    """
    ids = build(passages)
    full = len(ids)
    kept = list(passages)
    while len(ids) > budget and len(kept) > 1:
        kept.pop()
        ids = build(kept)
    if len(ids) > budget and kept:
        words = kept[0].text.split(" ")
        low, high = 0, len(words)  # invariant: `low` words fit (or none do), `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            if len(build([Passage(kept[0].title, " ".join(words[:middle]))])) <= budget:
                low = middle
            else:
                high = middle
        ids = build([Passage(kept[0].title, " ".join(words[:low]))])
    if len(ids) > budget:
        raise UsageError(f"instruction and question alone take {len(ids)} tokens; only {budget} fit the model")
    return Fitted(ids, len(passages) - len(kept), full - len(ids))


# ---- the compressor's output

# "Evaluation:" opens a line (Markdown marks allowed; as a heading also without the colon) or follows the end of a sentence.
_EVALUATION = re.compile(
    r"(?:^|\n)[ \t*#_]*Evaluation[ \t*_]*(?::[ \t*_]*|(?=\n))|(?<=[.!?)\]\"'*])[ \t]+[*_]*Evaluation[*_]*:[ \t*_]*",
    re.IGNORECASE,
)
_LABEL = re.compile(r"^[\s*#_]*(?:Updated |New )?Summary[ \t*_]*(?::[*_]*\s*|\n\s*)", re.IGNORECASE)
_NEXT = re.compile(r"\n[ \t*#_]*(?:(?:Updated |New )?Summary|Evaluation)[ \t*_]*(?::|\n)", re.IGNORECASE)
# The tag in brackets, in any case; without brackets only in capitals, so that prose ("the list is complete") never decides.
_TAG = re.compile(r"[ \t]*[*_`]*\[\s*(INCOMPLETE|COMPLETE)\b\s*(?:\][*_`]*\.?|$)", re.IGNORECASE)
_BARE_TAG = re.compile(r"[ \t]*[*_`]*(?<!NOT )(?<!not )\b(INCOMPLETE|COMPLETE)\b[*_`]*\.?")


@dataclass(frozen=True)
class Parsed:
    """A round's output: the summary, the evaluation's reason without its tag, and "complete", "incomplete" or "missing"."""

    summary: str
    evaluation: str
    verdict: str


def parse_round(text: str) -> Parsed:
    """Split a CompAct-style output (METHOD: summary, then ``Evaluation:`` with [COMPLETE] or [INCOMPLETE]).

    A missing or cut-off evaluation keeps the summary and is "missing", which counts as incomplete. An evaluation with both tags
    contradicts itself and is incomplete. What follows a further "Summary:" or "Evaluation:" is not read.
    """
    match = _EVALUATION.search(text)
    summary = _LABEL.sub("", text[: match.start()] if match else text).strip()
    if match is None:
        tagged = _TAG.search(text)  # a bracketed tag without the heading: what stands before it is the summary
        if tagged is None:
            return Parsed(summary, "", "missing")
        before = _LABEL.sub("", text[: tagged.start()]).strip()
        tags = {found.lower() for found in _TAG.findall(text)}
        return Parsed(before, "", "incomplete" if "incomplete" in tags else "complete")
    rest = _NEXT.split(text[match.end() :], maxsplit=1)[0].strip()
    tag = _TAG if _TAG.search(rest) else _BARE_TAG
    verdicts = {found.lower() for found in tag.findall(rest)}
    verdict = "incomplete" if "incomplete" in verdicts else "complete" if verdicts else "missing"
    return Parsed(summary, tag.sub("", rest).strip(), verdict)
