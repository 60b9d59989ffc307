"""The data doctor: one screen about a data set, before any model is loaded (``stages=[prepare]``).

It shows the counts that are stored with the questions (:mod:`xcompress.health`), and what only the run knows: how long the
passages are under the chosen reader's tokenizer, and whether calibration questions are among the test questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xcompress.health import question_key
from xcompress.schema import Question, UsageError
from xcompress.settings import ModelSettings, Settings
from xcompress.stages.prepare import StoredQuestions
from xcompress.store import write_json

_SAMPLED = 200  # questions whose passages are measured in tokens
_SHOWN = 5  # unusable rows on the screen; all are in the stored report
_WORTH_NAMING = (
    "repeated_questions",
    "golds_not_matching_themselves",
    "passages_with_replacement_characters",
    "empty_passages",
)
_PERCENTILES = {"median": 50, "p95": 95, "longest": 100}


def examine(splits: Mapping[str, StoredQuestions], settings: Settings) -> None:
    """Print the report of a run's splits and store it as ``doctor.json`` beside the questions of each."""
    tokens = {name: token_lengths(questions, settings) for name, questions in splits.items()}
    shared = overlap(splits)
    reports = {}
    for name, questions in splits.items():
        reports[name] = {
            "dataset": settings.dataset.name,
            "split": name,
            "source": _named(settings, name),
            **questions.health,
            "tokens": tokens[name],
            "questions_in_both_splits": shared,
        }
        write_json(questions.folder.path / "doctor.json", reports[name])
    show(reports, [str(questions.folder.path / "doctor.json") for questions in splits.values()])


def _named(settings: Settings, split: str) -> str:
    source = settings.dataset.calibration() if split == "calibration" else None
    return (source or settings.dataset.source()).path


def overlap(splits: Mapping[str, StoredQuestions]) -> int | None:
    """How many test questions also calibrate the gate (letter case and white space apart); None without calibration."""
    if len(splits) < 2:
        return None
    test, calibration = ({question_key(text) for text in splits[name].column("question")} for name in ("test", "calibration"))
    return len(test & calibration)


def token_lengths(questions: StoredQuestions, settings: Settings) -> dict[str, Any]:
    """Lengths in tokens of the passages of up to 200 questions, spread evenly over the split.

    Returns:
        Either ``{"reader", "not_measured": why}`` or ``{"reader", "questions", "window", "passage": {...}, "segment": {...},
        "question": {...}, "longer_than_window"}``: tokens of one passage, of one compressor round's passages, and of all
        passages of a question, each as median, 95th percentile and longest.
    """
    reader = settings.reader
    try:
        tokenizer, window = local_tokenizer(reader)
    except UsageError as error:
        return {"reader": reader.name, "not_measured": str(error)}
    size = settings.dataset.segment_size
    passage: list[int] = []
    segment: list[int] = []
    whole: list[int] = []
    for question in sample(questions, _SAMPLED):
        texts = [f"{p.title}: {p.text}" for p in question.passages]
        lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
        passage += lengths
        segment += [sum(lengths[at : at + size]) for at in range(0, len(lengths), size)]
        whole.append(sum(lengths))
    return {
        "reader": reader.name,
        "questions": len(whole),
        "window": window,
        "passage": _spread(passage),
        "segment": _spread(segment),
        "question": _spread(whole),
        "longer_than_window": None if window is None else sum(length > window for length in whole),
    }


def sample(questions: StoredQuestions, count: int) -> Iterator[Question]:
    """At most ``count`` questions from shards that are spread evenly over the split."""
    shards = len(questions)
    per_shard = max(1, max(questions.sizes, default=1))
    chosen = min(shards, max(1, count // per_shard))
    left = count
    for index in sorted({at * shards // chosen for at in range(chosen)}):
        part = questions[index][:left]
        left -= len(part)
        yield from part


def local_tokenizer(settings: ModelSettings) -> tuple[Any, int | None]:
    """A model's tokenizer and window from small local files alone; no weights are needed or read, nothing is downloaded.

    Raises:
        UsageError: the tokenizer is not there.
    """
    from transformers import AutoConfig, AutoTokenizer

    model = settings.model
    if isinstance(model, Mapping):
        from hydra.utils import instantiate

        model = instantiate(dict(model))
    where: dict[str, Any] = {"revision": settings.revision, "local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), **where)
    except Exception as error:  # a missing or damaged file can raise anything
        known = Path(str(model)).is_dir()
        how = "" if known else f" (hf download {model} config.json tokenizer.json tokenizer_config.json)"
        raise UsageError(
            f"the tokenizer of {model} {'cannot be loaded' if known else 'is not on this machine'}{how}"
        ) from error
    try:
        window = getattr(AutoConfig.from_pretrained(str(model), **where).get_text_config(), "max_position_embeddings", None)
    except Exception:  # the tokenizer's files were fetched alone
        window = None
    tokenizer.model_max_length = 1 << 60  # lengths are measured; no warning about long ones
    return tokenizer, window


def _spread(lengths: Sequence[int]) -> dict[str, int] | None:
    if not lengths:
        return None
    return {name: int(np.percentile(lengths, share)) for name, share in _PERCENTILES.items()}


# ---- the screen


def show(reports: Mapping[str, Mapping[str, Any]], files: Sequence[str]) -> None:
    """Print reports side by side; what deserves a look is marked with ``!``."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    names = sorted(reports, reverse=True)  # test before calibration
    ordered = [reports[name] for name in names]
    console.print(f"{ordered[0]['dataset']}: {ordered[0]['source']}", style="bold", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", width=1)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name)
    for label, cells in _rows(ordered):
        look = any(cell.startswith("! ") for cell in cells)
        texts = [Text(cell.removeprefix("! "), style="yellow" if cell.startswith("! ") else "") for cell in cells]
        table.add_row(Text("!" if look else "", style="yellow"), Text(label), *texts)
    console.print(table)
    for name, report in zip(names, ordered, strict=True):
        for line in (*_notes(name, report), *_unusable(name, report)):
            console.print(line, markup=False, soft_wrap=True)
    console.print("stored: " + "\n        ".join(files), style="dim", markup=False, soft_wrap=True)


def _notes(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    tokens = report["tokens"]
    if "not_measured" in tokens:
        yield f"* {name}: tokens are not measured: {tokens['not_measured']}"
    else:
        yield (
            f"* {name}: median / 95 % / longest under the tokenizer of {tokens['reader']},"
            f" over {tokens['questions']:,} of {report['questions']:,} questions"
        )
    for key, ids in report["examples"].items():
        if key in _WORTH_NAMING:
            yield f"  {name}, {key.replace('_', ' ')}: ids {', '.join(ids)}{', ...' if report[key] > len(ids) else ''}"


def _unusable(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    rows = report["unusable_rows"]
    for row in rows[:_SHOWN]:
        line = f", line {row['line']}" if "line" in row else ""
        yield f"  {name} row {row['position']}{line} cannot be used: {row['reason']}"
    if len(rows) > _SHOWN:
        reasons = Counter(row["reason"].partition(" (")[0] for row in rows)
        listed = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        yield f"  ... and {len(rows) - _SHOWN} more of {name} ({listed}): all are listed in its doctor.json"


def _rows(reports: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Label and one cell a report; a cell that starts with "! " deserves a look."""

    def row(label: str, cell: Callable[[Mapping[str, Any]], str]) -> tuple[str, list[str]]:
        return label, [cell(report) for report in reports]

    yield row("questions", lambda r: f"{r['questions']:,}")
    yield row("rows that cannot be used", lambda r: _marked(len(r["unusable_rows"])))
    yield row("repeated questions", lambda r: _marked(r["repeated_questions"]))
    if reports[0]["questions_in_both_splits"] is not None:
        yield row("in both splits", lambda r: _marked(r["questions_in_both_splits"]))
    if any(report["kinds"] for report in reports):
        yield row("kinds", lambda r: ", ".join(f"{kind} {number:,}" for kind, number in _most(r["kinds"])) or "-")
    yield row("answers a question", lambda r: _histogram(r["answers_per_question"]))
    yield row("without gold answer", lambda r: _marked(r["unlabelled"], "{:,} (read, not scored)"))
    yield row("yes/no answers", lambda r: _of(r["yes_no"], r["labelled"]))
    yield row("golds no answer can match", lambda r: _marked(r["golds_not_matching_themselves"]))
    yield row("passages a question", lambda r: _histogram(r["passages_per_question"]))
    yield row(
        "fewer than asked for",
        lambda r: _marked(r["fewer_passages_than_asked"], f"{{:,}} (fewer than {r['passages_asked_for']})"),
    )
    yield row("passages left out", _left_out)
    yield row("words a passage", _words)
    if any("not_measured" not in report["tokens"] for report in reports):
        yield row("tokens a passage *", lambda r: _tokens(r, "passage"))
        yield row("tokens a round *", lambda r: _tokens(r, "segment"))
        yield row("tokens a question *", lambda r: _tokens(r, "question"))
        yield row("longer than the reader *", _too_long)
    yield row("empty passages", lambda r: _marked(r["empty_passages"]))
    yield row("passages without title", lambda r: _marked(r["passages_without_title"]))
    yield row("repeated in a question", lambda r: _marked(r["repeated_passages"]))
    yield row("with HTML left-overs", lambda r: _marked(r["passages_with_html"]))
    yield row("with \ufffd (lost characters)", lambda r: _marked(r["passages_with_replacement_characters"]))
    yield row("all gold titles found", lambda r: _found(r["all_gold_titles_retrieved"], r["with_gold_titles"]))
    yield row("  recall at k, %", lambda r: _at_k(r, "gold_titles"))
    yield row("answer string found", lambda r: _found(r["answer_string_in_passages"], r["labelled"]))
    yield row("  recall at k, %", lambda r: _at_k(r, "answer_string"))


def _marked(number: int, text: str = "{:,}") -> str:
    return "! " + text.format(number) if number else "0"


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({100 * part / whole:.1f} %)" if whole else "n/a (none given)"


def _found(part: int, whole: int) -> str:
    if not whole:
        return "n/a (none given)"
    return ("! " if part < 0.5 * whole else "") + _of(part, whole)


def _histogram(counts: Mapping[str, int]) -> str:
    """The commonest numbers in order; the rest as a range."""
    if not counts:
        return "-"
    if len(counts) <= 4:
        return ", ".join(f"{number}: {times:,}" for number, times in counts.items())
    numbers = [int(number) for number in counts]
    common = max(counts, key=lambda number: counts[number])
    total = sum(counts.values())
    mean = sum(int(number) * times for number, times in counts.items()) / total
    return f"{min(numbers)} to {max(numbers)}, mean {mean:.1f}, most often {common} ({counts[common]:,})"


def _most(kinds: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:4]


def _left_out(report: Mapping[str, Any]) -> str:
    if report["passages_left_out"] is None:
        return "not known (stored by an older version)"
    questions = report["questions_with_passages_left_out"]
    return _marked(report["passages_left_out"], f"{{:,}} of {questions:,} questions") if questions else "0"


def _words(report: Mapping[str, Any]) -> str:
    words = report["words_per_passage"]
    return "-" if words["mean"] is None else f"mean {words['mean']:.0f}, longest {words['longest']:,}"


def _tokens(report: Mapping[str, Any], what: str) -> str:
    spread = report["tokens"].get(what)
    return "-" if spread is None else " / ".join(f"{spread[name]:,}" for name in _PERCENTILES)


def _too_long(report: Mapping[str, Any]) -> str:
    tokens = report["tokens"]
    if tokens.get("window") is None:
        return "-"
    long = tokens["longer_than_window"]
    return ("! " if long else "") + f"{long:,} of {tokens['questions']:,} (takes {tokens['window']:,})"


def _at_k(report: Mapping[str, Any], what: str) -> str:
    cells = [f"@{k} {100 * values[what]:.0f}" for k, values in report["at_k"].items() if values[what] is not None]
    return "  ".join(cells) if cells else "n/a"
