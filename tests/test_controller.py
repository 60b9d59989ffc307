"""The controller: what an evaluation run stores, with the gate saving the sampling; gate files, threads, wrong input."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hydra.core.global_hydra import GlobalHydra
from test_pipeline import overrides as overrides  # the fixture: overrides of a small complete run with tiny models

from xcompress import Candidate, Compressed, Gate, Passage, Question, SPSScorer, UsageError, XCompress
from xcompress.config import ROOT, compose, run_config, settings_of
from xcompress.pipeline import Run

pytestmark = pytest.mark.usefixtures("one_thread")
MORE = ["generation.candidates=3", "method.gate_share=0.5"]


def questions_of(overrides: Sequence[str], tmp_path: Path) -> dict[str, list[Question]]:
    """Test and calibration questions as the pipeline prepares them."""
    splits = Run(settings_of([*overrides, f"run_root={tmp_path / 'questions'}"])).prepare()
    return {split.name: [question for shard in split.questions for question in shard] for split in splits}


@pytest.fixture
def controller(overrides: list[str]) -> XCompress:
    """A controller of the small run, its gate not calibrated."""
    return XCompress.from_config(*overrides, *MORE)


@pytest.mark.parametrize("reader", ["llama", "qwen3"])
def test_the_pipeline_and_the_controller_choose_alike(
    overrides: list[str], tmp_path: Path, model_folder: Callable[[str], Path], reader: str
) -> None:
    """Every summary, score, gate decision, choice and answer is what an evaluation run of the same settings stores.

    The reader is the compressor's own model, and another one.
    """
    kept = [text for text in overrides if not text.startswith("reader.model")]
    config = [*kept, *MORE, f"reader.model={model_folder(reader)}", "method.pooling=mean"]
    folder = run_config(compose([*config, f"run_root={tmp_path / 'runs'}"]))
    assert folder is not None
    stored = {(row["question_id"], row["candidate"]): row for row in pq.read_table(folder / "candidates.parquet").to_pylist()}
    table = {row["method"]: row for row in json.loads((folder / "table1.json").read_text())["rows"]}
    questions = questions_of(config, tmp_path)
    controller = XCompress.from_config(*config)
    controller.calibrate(questions["calibration"])
    results = controller.compress_batch(questions["test"], answer=True)

    skipped = sum(result.skipped for result in results)
    assert skipped == table["xcompress"]["gate_skipped"] and 0 < skipped < len(results), "both branches are exercised"
    assert {result.chosen for result in results} - {0}, "some choice is a sampled summary"
    for result in results:
        assert len(result.candidates) == (1 if result.skipped else 4)
        for candidate in result.candidates:
            row = stored[result.id, candidate.index]
            assert candidate.summary == row["summary"]
            assert (candidate.tokens, candidate.compressor_tokens) == (row["tokens"], row["compressor_tokens"])
            assert candidate.sps == pytest.approx(row["sps"], rel=1e-5)
            assert candidate.nll == pytest.approx(row["nll"], rel=1e-5)
        chosen = stored[result.id, result.chosen]
        assert "xcompress" in chosen["chosen_by"], result.id
        assert (result.summary, result.answer) == (chosen["summary"], chosen["prediction"])
    spent = sum(result.spent.compressor for result in results) / len(results)
    assert spent == pytest.approx(table["xcompress"]["compressor_tokens"])
    scored = sum(result.spent.scoring for result in results) / len(results)
    assert scored == pytest.approx(table["xcompress"]["selection_tokens"])
    alone = [controller.compress(question, answer=True) for question in questions["test"]]
    assert [(r.chosen, r.summary, r.answer) for r in alone] == [(r.chosen, r.summary, r.answer) for r in results]


def test_a_skipped_question_is_never_sampled(controller: XCompress, overrides: list[str], tmp_path: Path) -> None:
    """The steps that run say so: with a gate that always skips there is no sampling, with one that never does there is."""
    question = questions_of(overrides, tmp_path)["test"][0]
    steps: dict[str, int] = {}

    def progress(step: str, tokens: int) -> None:
        steps[step] = steps.get(step, 0) + tokens

    controller.gate = Gate((0.0,), controller.made_with())
    kept = controller.compress(question, progress=progress, answer=True)
    assert kept.skipped and kept.chosen == 0 and kept.gate == "skipped" and kept.threshold == 0.0
    assert set(steps) == {"initial summary", "scoring", "reading"} and all(steps.values())
    assert kept.spent.scoring == kept.candidates[0].tokens and kept.spent.reading > 0
    steps.clear()
    controller.gate = Gate((1e9,), controller.made_with())
    sampled = controller.compress(question, progress=progress)
    assert sampled.gate == "sampled" and len(sampled.candidates) == 4 and steps["sampling"] > 0 and sampled.answer is None
    assert sampled.candidates[0] == kept.candidates[0]


def test_threads_get_what_a_single_one_gets(controller: XCompress, overrides: list[str], tmp_path: Path) -> None:
    """Eight threads on one controller, while others score on the same model: equal to one after the other."""
    questions = questions_of(overrides, tmp_path)
    controller.calibrate(questions["calibration"])
    scorer = SPSScorer(controller.scorer.loaded.folder, dtype="float32", device="cpu", cache=tmp_path)
    assert scorer._scorer.loaded is controller.scorer.loaded, "they share a model, so they must share its lock"
    texts = ["old mill", "a bridge over the river by the hill"]
    alone = [controller.compress(question, answer=True) for question in questions["test"]]
    scores = scorer.score(texts)
    with ThreadPoolExecutor(8) as pool:
        together = [pool.submit(controller.compress, question, answer=True) for question in questions["test"] * 2]
        beside = [pool.submit(scorer.score, texts) for _ in range(6)]
        assert [future.result() for future in together] == alone * 2
        assert [future.result() for future in beside] == [scores] * 6


def test_gate_files(controller: XCompress, overrides: list[str], tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """A gate is kept and taken up; another share needs no calibration; another reader, compressor or rule is refused."""
    calibration = questions_of(overrides, tmp_path)["calibration"]
    gate = controller.calibrate(calibration)
    path = tmp_path / "gate.json"
    gate.save(path)
    assert path.stat().st_size < 4096 and len(gate.ratios) == len(calibration)
    again = XCompress.from_config(*overrides, *MORE, gate=path)
    assert again.gate == gate
    lower = XCompress.from_config(*overrides, "method.gate_share=0.9", gate=path)
    assert lower.gate is not None and lower.gate.threshold(0.9) < gate.threshold(0.1)
    for override, what in (
        (f"reader.model={model_folder('qwen3')}", r"another reader, reader weights \(reader: 'llama', here 'qwen3'\)"),
        (f"compressor.model={model_folder('qwen3')}", "another compressor"),
        ("method.first_token=false", "another first token"),
        ("dataset.segment_size=2", "another segment size"),
    ):
        kept = [text for text in overrides if text.split("=")[0] != override.split("=")[0]]
        with pytest.raises(UsageError, match=what):
            XCompress.from_config(*kept, override, gate=path, answers=False)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "does not exist; calibrate first"),
        ("{", "cannot be read"),
        ("[]", "is not a gate file"),
        ('{"format": 1, "ratios": []}', "is not a gate file"),
        ('{"format": 2, "ratios": [0.5], "made_with": {}}', "is not a gate file"),
        ('{"format": 1, "ratios": [0.5]}', "does not say what it was calibrated with"),
    ],
)
def test_damaged_gate_files(tmp_path: Path, content: str | None, what: str) -> None:
    path = tmp_path / "gate.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=what):
        Gate.load(path)


def test_without_calibration_everything_is_sampled(
    controller: XCompress, overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Said once in the log and in each result; a method without a gate says "off"."""
    with caplog.at_level(logging.WARNING):
        results = [controller.compress("Who?", ["The miller did."]) for _ in range(2)]
    assert [r.gate for r in results] == ["not calibrated"] * 2 and caplog.text.count("the gate is not calibrated") == 1
    assert results[0] == results[1] and len(results[0].candidates) == 4
    off = XCompress.from_config(*overrides, *MORE, "method=xcompress_no_gate", answers=False)
    assert off.compress("Who?", ["The miller did."]).gate == "off"


def test_calibration_needs_usable_questions(controller: XCompress) -> None:
    with pytest.raises(UsageError, match="calibration needs questions"):
        controller.calibrate([])


@pytest.mark.parametrize(
    ("question", "passages", "what"),
    [
        ("", ["a text"], "the question is blank"),
        (" \n", ["a text"], "the question is blank"),
        (7, ["a text"], "the question is a int"),
        ("Who?", [], "there are no passages"),
        ("Who?", None, "there are no passages"),
        ("Who?", ["", " "], "no passage has text"),
        ("Who?", "a text", "passages is a single one"),
        ("Who?", Passage("", "a text"), "passages is a single one"),
        ("Who?", ["a", 7], "passage 2 is in an unknown layout: it is a int"),
        ("Who?", [("a", "b", "c")], r"passage 1 is a tuple; as such it must be \(title, text\)"),
        ("Who?", [{"body": "a"}], "passage 1 is in an unknown layout: its keys are body"),
        ("Who?", [{"text": None}], "passage 1 has no text"),
    ],
)
def test_wrong_input_is_one_sentence(controller: XCompress, question: Any, passages: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        controller.compress(question, passages)
    assert "\n" not in str(caught.value)


def test_passages_come_in_many_forms(controller: XCompress) -> None:
    """A text, a pair, mappings and Passage objects mean the same, so they give the same summaries."""
    forms: list[Any] = [
        ("Mill", "It stands."),
        ["Mill", "It stands."],
        {"title": "Mill", "text": "It stands."},
        {"contents": "Mill\nIt stands."},
        Passage("Mill", "It stands."),
    ]
    results = [controller.compress("What stands?", [form]) for form in forms]
    assert all(result == results[0] for result in results)
    assert controller.compress("What stands?", ["It stands."]).id != results[0].id


def test_batches(controller: XCompress) -> None:
    """Order is kept, a repeated question shares its result, two questions of one id are refused, nothing gives nothing."""
    first, second = ("Who?", ["The miller did."]), ("Where?", ["By the river."])
    results = controller.compress_batch([first, second, first])
    assert [r.question for r in results] == ["Who?", "Where?", "Who?"] and results[0] == results[2] != results[1]
    assert controller.compress_batch([]) == []
    same = [Question("q", "Who?", passages=(Passage("", "a"),)), Question("q", "Where?", passages=(Passage("", "a"),))]
    with pytest.raises(UsageError, match="two different questions have the id 'q'"):
        controller.compress_batch(same)
    with pytest.raises(UsageError, match="a Question holds its passages"):
        controller.compress(same[0], ["more"])


def test_nothing_vanishes(overrides: list[str]) -> None:
    """Passages beyond the last round, cut-off candidates and shortened passages are in the result, and JSON is strict."""
    small = XCompress.from_config(*overrides, *MORE, "compressor.max_rounds=1", "compressor.max_new_tokens=2", answers=False)
    passages = ["The old mill stands by the river. " * 20] * 5
    result = small.compress("Who?", passages)
    assert result.passages_unused == 2  # segments of 3, one round
    assert result.cut_off == (0, 1, 2, 3)
    assert result.tokens_removed > 0
    plain = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert plain["candidates"][0]["sps"] == result.candidates[0].sps and plain["skipped"] is False
    with pytest.raises(UsageError, match="answer=True needs a reader"):
        small.compress("Who?", passages, answer=True)


def shortest(question: Question, candidates: Sequence[Candidate]) -> list[float | None]:
    """A selector for the tests: fewest characters."""
    return [len(candidate.summary) or None for candidate in candidates]


def test_a_selector_of_ones_own(overrides: list[str], tmp_path: Path) -> None:
    """One function and one configuration entry: a row in Table 1, and the same choice in the controller."""
    entry = "+selectors.fewest_characters={_target_: test_controller.shortest}"
    config = [*overrides, *MORE, entry]
    folder = run_config(compose([*config, f"run_root={tmp_path / 'runs'}"]))
    assert folder is not None
    stored = pq.read_table(folder / "candidates.parquet").to_pylist()
    expected: dict[str, int] = {}
    for row in sorted(stored, key=lambda row: (len(row["summary"]) or 10**6, row["candidate"])):
        expected.setdefault(row["question_id"], row["candidate"])
    by_row = {row["question_id"]: row["candidate"] for row in stored if "fewest_characters" in row["chosen_by"]}
    assert by_row == expected and len(set(expected.values())) > 1
    table = json.loads((folder / "table1.json").read_text())["rows"]
    assert [row["label"] for row in table if row["method"] == "fewest_characters"] == ["fewest characters"]
    own = XCompress.from_config(*config, "method.gate=none", selector="fewest_characters", answers=False)
    assert {r.id: r.chosen for r in own.compress_batch(questions_of(overrides, tmp_path)["test"])} == expected


def two(question: Question, candidates: Sequence[Candidate]) -> list[float]:
    """A selector that forgets candidates."""
    return [1.0, 2.0]


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("{_target_: test_controller.absent}", "selectors.mine: test_controller.absent cannot be loaded"),
        ("{_target_: nowhere.absent}", "selectors.mine: nowhere.absent cannot be loaded"),
        ("shortest", "selectors.mine must be"),
    ],
)
def test_wrong_selectors_are_refused_at_once(overrides: list[str], entry: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        settings_of([*overrides, f"+selectors.mine={entry}"])


def test_selectors_cannot_take_a_row_or_forget_a_candidate(overrides: list[str]) -> None:
    with pytest.raises(UsageError, match=r"selectors\.lowest_sps: Table 1 has a row of that name already"):
        settings_of([*overrides, "+selectors.lowest_sps={_target_: test_controller.shortest}"])
    config = [*overrides, *MORE, "+selectors.two={_target_: test_controller.two}"]
    with pytest.raises(UsageError, match="selector 'thre' is not among selectors: two"):
        XCompress.from_config(*config, selector="thre")
    forgetful = XCompress.from_config(*config, selector="two", answers=False)
    with pytest.raises(UsageError, match="2 scores for 4 candidates"):
        forgetful.compress("Who?", ["The miller did."])


def test_without_the_initial_summary(overrides: list[str]) -> None:
    """include_initial=false lets only sampled summaries compete."""
    config = [*overrides, *MORE, "method.gate=none", "+selectors.shortest_={_target_: test_controller.first}"]
    own = XCompress.from_config(*config, "method.include_initial=false", selector="shortest_", answers=False)
    assert own.compress("Who?", ["The miller did."]).chosen == 1


def first(question: Question, candidates: Sequence[Candidate]) -> list[float]:
    """A selector that takes the first one it may."""
    return [float(candidate.index) for candidate in candidates]


def test_a_program_that_uses_hydra_keeps_its_own(overrides: list[str]) -> None:
    GlobalHydra.instance().clear()
    settings_of(overrides)
    assert not GlobalHydra.instance().is_initialized()
    marker: Any = object()
    GlobalHydra.instance().hydra = marker
    try:
        settings_of(overrides)
        assert GlobalHydra.instance().hydra is marker
    finally:
        GlobalHydra.instance().clear()


def test_importing_loads_no_model_library() -> None:
    """And a misspelt override is answered before one is loaded."""
    code = (
        "import sys; from xcompress import XCompress, SPSScorer, UsageError\n"
        "try: XCompress.from_config('reader=llama3_8')\n"
        "except UsageError as error: print(error)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "did you mean llama3_8b?" in done.stdout and done.stdout.endswith("[]\n")


def test_the_result_is_typed() -> None:
    """The package says that it is typed, and its names are there."""
    import xcompress

    assert (ROOT / "xcompress" / "py.typed").exists() and set(xcompress.__all__) <= set(dir(xcompress))
    assert all(getattr(xcompress, name) for name in xcompress.__all__) and xcompress.Compressed is Compressed
    with pytest.raises(AttributeError, match="no attribute 'Compresser'"):
        _ = xcompress.Compresser
