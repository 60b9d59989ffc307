"""Ask one question: python scripts/ask.py "Who wrote Dracula?" --passages notes.txt (more: python scripts/ask.py --help)."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import unicodedata
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from xcompress.config import quiet_libraries, settings_of
from xcompress.schema import Passage, UsageError

if TYPE_CHECKING:
    from xcompress.compressed import Compressed
    from xcompress.controller import XCompress
    from xcompress.settings import Settings

DESCRIPTION = """\
Summarise passages for a question, let the reader's SPS choose among the summaries, and answer from the chosen one.
By default the embedded 135M model does both (no GPU, no model hub)."""
EXAMPLES = """\
examples:
  python scripts/ask.py "Who wrote Dracula?" --passages notes.txt         one passage a paragraph (or .jsonl, .csv, ...)
  grep -i dracula *.md | python scripts/ask.py "Who wrote Dracula?"       passages from standard input
  python scripts/ask.py "Who wrote Dracula?" --folder notes/              the best paragraphs of a folder (BM25)
  python scripts/ask.py "Who wrote Dracula?" --passages notes.txt reader=llama3_8b compressor=compact_7b
  python scripts/ask.py --calibrate --gate gate.json                      calibrate once, then ask with --gate gate.json
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; overrides may stand anywhere after the question."""
    parser = argparse.ArgumentParser(
        "ask.py", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", nargs="?", help="in quotes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration, as for scripts/run.py")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--passages", metavar="FILE", help="text (a passage a paragraph) or a table (a passage a row); - is stdin"
    )
    source.add_argument("--folder", metavar="FOLDER", help="of text files, searched with BM25")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="passages taken from the folder (default 10)")
    parser.add_argument(
        "--gate", metavar="FILE", help="a calibrated gate: skips sampling where the first summary is good enough"
    )
    parser.add_argument("--calibrate", action="store_true", help="calibrate on dataset.calibration_path and write --gate FILE")
    parser.add_argument("--selector", metavar="NAME", help="one of the configuration's selectors, instead of the lowest SPS")
    parser.add_argument("--no-answer", action="store_true", help="only summarise and choose")
    parser.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    asked = parser.parse_intermixed_args(arguments)
    if asked.question is not None and asked.calibrate:  # then it is an override
        asked.overrides.insert(0, asked.question)
        asked.question = None
    if asked.top < 1:
        raise UsageError(f"--top must be 1 or more, not {asked.top}")
    for text in asked.overrides:
        if "=" not in text and Path(text).exists():
            raise UsageError(f"{text} is a file or folder; say --passages {text} or --folder {text}")
    return asked


def configuration(overrides: list[str]) -> Settings:
    """The embedded model unless another experiment is asked for; other groups and keys as given."""
    own = any(text.split("=", 1)[0].lstrip("+") == "experiment" for text in overrides)
    return settings_of(overrides if own else ["experiment=laptop", *overrides])


def main(arguments: list[str]) -> None:
    """Ask, or calibrate.

    Raises:
        UsageError: anything the user can mend.
    """
    asked = parse(arguments)
    if asked.question is None and not asked.calibrate:
        raise UsageError('ask a question: python scripts/ask.py "Who wrote Dracula?" --passages notes.txt (see --help)')
    quiet_libraries()
    settings = configuration(asked.overrides)
    if asked.calibrate:
        calibrate(asked, settings)
        return
    if not asked.question.strip():
        raise UsageError("the question is blank")
    passages, found = passages_of(asked)
    from xcompress.controller import XCompress

    shown = Shown()
    with shown:
        shown.step("loading the models", 0)
        controller = XCompress.from_settings(settings, gate=asked.gate, answers=not asked.no_answer, selector=asked.selector)
        result = controller.compress(asked.question, passages, answer=not asked.no_answer, progress=shown.step)
    if asked.json:
        plain = result.as_dict()
        plain["passages"] = [{"title": passage.title, "text": passage.text} for passage in passages]
        print(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(result, controller, found, time.monotonic() - shown.started)


def calibrate(asked: argparse.Namespace, settings: Settings) -> None:
    """Calibrate the gate on the configuration's calibration questions and store it."""
    if not asked.gate:
        raise UsageError("--calibrate needs --gate FILE, the file to write")
    source = settings.dataset.calibration()
    if source is None:
        raise UsageError("there are no calibration questions: set dataset.calibration_path=FILE")
    from xcompress.controller import XCompress
    from xcompress.embedded import cache_root
    from xcompress.health import Health
    from xcompress.stages import prepare

    data = settings.dataset
    questions = list(  # an index of the corpus is kept with the converted models, not in the working folder
        prepare.stream(source, data.passages, Health(data.passages), cache_root(), limit=data.calibration_limit)
    )
    with Shown() as shown:
        shown.step("loading the models", 0)
        controller = XCompress.from_settings(settings, answers=False)
        gate = controller.calibrate(questions, shown.step)
    gate.save(asked.gate)
    share = settings.method.gate_share
    print(
        f"{asked.gate}: a ratio above {gate.threshold(share):.4g} keeps the initial summary ({share:.0%} of {len(gate.ratios)})"
    )


def passages_of(asked: argparse.Namespace) -> tuple[list[Passage], str]:
    """The passages that were asked for, and a sentence that says where they are from."""
    from xcompress.passages import parse_passages, read_passages, search_folder

    if asked.folder:
        passages, of = search_folder(Path(asked.folder), asked.question, asked.top)
        return passages, f"the {len(passages)} best of {of} paragraphs in {asked.folder} (BM25)"
    if asked.passages and asked.passages != "-":
        passages = read_passages(Path(asked.passages))
        return passages, f"{len(passages)} from {asked.passages}"
    if asked.passages is None and sys.stdin.isatty():
        raise UsageError("which passages? Give --passages FILE or --folder FOLDER, or pipe them in")
    try:
        passages = parse_passages(sys.stdin.buffer.read().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from None
    return passages, f"{len(passages)} from standard input"


class Shown:
    """What is being done, on standard error: a line that moves on a terminal, one line a step elsewhere."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._tokens = 0
        self._step = ""
        self._since = self.started
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task("") if self._bar else None

    def __enter__(self) -> Shown:
        (self._bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        (self._bar or nullcontext()).__exit__(*error)

    def step(self, name: str, tokens: int) -> None:
        """So many more tokens of a step are done."""
        if name != self._step:
            self._step, self._tokens, self._since = name, 0, time.monotonic()
            if self._bar is None:
                print(f"{name} ...", file=sys.stderr, flush=True)
        self._tokens += tokens
        if self._bar is not None and self._task is not None:
            rate = self._tokens / max(1e-9, time.monotonic() - self._since)
            done = f": {self._tokens} tokens, {rate:.0f} tokens/s" if self._tokens else ""
            self._bar.update(self._task, description=name + done)


def show(result: Compressed, controller: XCompress, found: str, seconds: float) -> None:
    """The answer, the chosen summary, a table of all candidates, and what it took."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print()
    if result.answer is not None:
        console.print(Text.assemble(("Answer   ", "bold"), (plain(result.answer) or "(blank)", "bold green")))
    console.print(Text.assemble(("Summary  ", "bold"), plain(result.summary) or "(blank)"))
    console.print()
    table = Table(pad_edge=False, show_lines=len(result.candidates) > 1)
    for heading in ("", "SPS", "PPL", "ratio", "tokens"):
        table.add_column(heading, justify="right")
    table.add_column("summary", overflow="fold", ratio=1)
    table.add_column("")
    for candidate in result.candidates:
        scores = [number(candidate.sps, ".2f"), number(candidate.ppl, ".2f"), number(candidate.ratio, ".4f")]
        cells = [str(candidate.index), *scores, str(candidate.tokens)]
        style = "bold" if candidate.index == result.chosen else ""
        table.add_row(
            *cells, Text(plain(candidate.summary) or "(blank)"), Text("\n".join(marks(result, candidate.index))), style=style
        )
    console.print(table)
    console.print(Text("\n".join(notes(result, controller, found, seconds))))


def marks(result: Compressed, index: int) -> list[str]:
    """What is to be said of a candidate beside its scores."""
    found = ["chosen"] if index == result.chosen else []
    found += ["initial"] if index == 0 else []
    scored = [candidate for candidate in result.candidates if candidate.nll is not None]
    if len(result.candidates) > 1 and scored and min(scored, key=lambda candidate: candidate.nll or 0.0).index == index:
        found.append("lowest PPL")
    return [*found, *(["cut off"] if index in result.cut_off else [])]


def notes(result: Compressed, controller: XCompress, found: str, seconds: float) -> list[str]:
    """Lower is better; where the passages are from; what the gate did; what was left out; what it took."""
    gate = {
        "skipped": f"gate: the initial summary's ratio is above {number(result.threshold, '.4f')}, so nothing was sampled",
        "sampled": f"gate: the initial summary's ratio is not above {number(result.threshold, '.4f')}, so others were sampled",
        "not calibrated": "gate: not calibrated, so summaries were sampled (calibrate once: --calibrate --gate gate.json)",
        "off": "gate: off",
    }
    rule = "the lowest SPS is chosen" if controller.selector is None else "a selector of your own chose"
    lines = [f"0 is the initial (greedy) summary, the others are sampled; {rule}.", f"passages: {found}", gate[result.gate]]
    if result.fallback:
        lines.append("no candidate has a usable score: the initial summary was taken")
    if result.passages_unused:
        lines.append(
            f"the last {result.passages_unused} passages were not used: compressor.max_rounds x dataset.segment_size is"
            f" {controller.compressor.settings.max_rounds} x {controller.compressor.segment_size}"
        )
    if result.tokens_removed:
        lines.append(f"{result.tokens_removed} tokens of passage text were left out to fit the compressor")
    if result.cut_off:
        lines.append(f"cut off: reached compressor.max_new_tokens={controller.compressor.settings.max_new_tokens}")
    spent = result.spent
    reading = f", {spent.reading} for the answer" if spent.reading else ""
    lines.append(f"tokens: {spent.compressor} compressor, {spent.scoring} scoring{reading}; {seconds:.0f} s with loading")
    return lines


def number(value: float | None, form: str) -> str:
    """A score, or "-" where there is none."""
    return "-" if value is None else format(value, form)


def plain(text: str) -> str:
    """Model and file text for a terminal: control characters and direction overrides are shown, not obeyed."""
    harmful = {*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}
    return "".join("\ufffd" if c in harmful or (unicodedata.category(c) == "Cc" and c not in "\n\t") else c for c in text)


if __name__ == "__main__":
    own = logging.getLogger("xcompress")  # what libraries log below a warning is not for the user
    own.setLevel(logging.INFO)
    own.addHandler(logging.StreamHandler())
    logging.getLogger("xcompress.controller").setLevel(logging.ERROR)  # the result says what the gate did
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
