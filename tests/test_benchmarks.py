"""The benchmark's own parts: timing, ratios, tables, workload, worker processes, and its arithmetic."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tokenizer

from benchmarks import external, paper_scale
from benchmarks.ablations import Cost, counted
from benchmarks.basis import by_svd, synthetic
from benchmarks.end_to_end import fit
from benchmarks.external import Absent, External
from benchmarks.memory import peak_growth
from benchmarks.rates import block_flops
from benchmarks.table import Row, Section, record, render
from benchmarks.timing import Ratio, Series, Spent, interleave, ratio
from benchmarks.workload import prompts, texts
from xcompress.checkpoint import Loaded
from xcompress.config import ROOT
from xcompress.forward import run as forward
from xcompress.spectrum import compute_basis, residuals


def test_sides_take_turns() -> None:
    """Each repetition starts with another side; a side that timed itself is believed."""
    order: list[str] = []

    def side(name: str) -> Callable[[int], Spent | None]:
        def run(repetition: int) -> Spent | None:
            order.append(f"{name}{repetition}")
            return Spent(2.0, 1.0) if name == "b" else None

        return run

    series = interleave({"a": side("a"), "b": side("b")}, 3, lambda line: None)
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert series["b"].wall == [2.0, 2.0, 2.0] and series["b"].median == 2.0
    assert all(0 < wall < 1 for wall in series["a"].wall)


def test_a_ratio_is_formed_repetition_by_repetition() -> None:
    """The median of ratios, not the ratio of medians."""
    slow = Series("slow", (Spent(10, 4), Spent(20, 4), Spent(90, 4)))
    fast = Series("fast", (Spent(5, 1), Spent(1, 1), Spent(30, 2)))
    assert ratio(slow, fast) == Ratio(3.0, 2.0, 20.0, 3, 4.0)


def test_targets_are_judged() -> None:
    """Both directions, what has no ratio, and what stands in the Markdown."""
    found = Ratio(3.0, 2.0, 4.0, 3, 3.0)
    rows = [
        Row("fast enough", "1 s", "3 s", found, 2.5),
        Row("too slow", "1 s", "3 s", found, 4.0),
        Row("too large", "3 MB", "1 MB", found, 1.3, at_most=True),
        Row("absent", "", "not compared", None, 1.0),
    ]
    assert [row.met for row in rows] == [True, False, False, None]
    section = Section("Title", rows, ["a note"])
    text = render(section)
    assert "| fast enough | 1 s | 3 s | 3.00 [2.00, 4.00] | 3 | at least 2.5 | yes |" in text
    assert text.count("**no**") == 2 and "not measured" in text and "- a note" in text
    assert [row["met"] for row in record(section)["rows"]] == [True, False, False, None]


def test_the_peak_of_a_call_is_seen() -> None:
    """64 MB that are gone again when the call returns."""
    grown = peak_growth(lambda: float(torch.ones(2**24).sum()))
    if grown is None:
        pytest.skip("this kernel does not let a process reset its peak")
    assert 60e6 < grown < 90e6


def test_a_worker_answers_and_its_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and answers over the pipe; a worker that cannot start, or ends, gives its last words."""
    monkeypatch.setattr(external, "WORKERS", tmp_path)
    (tmp_path / "echo.py").write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    if request.get('end'): sys.exit('it was asked to end')\n"
        "    print(json.dumps({**request, 'wall': 1.5, 'cpu': 2.5}), flush=True)\n"
    )
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    worker = External(sys.executable, "echo.py", {"model": "m"})
    assert worker.about["model"] == "m"
    spent, answer = worker.timed({"texts": [[1, 2]]})
    assert spent == Spent(1.5, 2.5) and answer["texts"] == [[1, 2]]
    with pytest.raises(RuntimeError, match="it was asked to end"):
        worker.ask({"end": True})
    worker.close()
    with pytest.raises(Absent, match="a_module_that_is_not_there"):
        External(sys.executable, "broken.py", {})
    with pytest.raises(Absent, match="cannot be started"):
        External(str(tmp_path / "no-python"), "echo.py", {})


def test_texts_have_the_lengths_of_real_summaries() -> None:
    """As many different texts as asked for, the same ones each time."""
    tokenizer = make_tokenizer(start=False)
    found = texts(tokenizer, 30)
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in found]
    assert len(set(found)) == 30 and found == texts(tokenizer, 30)
    assert 20 < np.median(lengths) < 80 and max(lengths) <= 82
    long = prompts(tokenizer, 3, 2000)
    assert len(set(long)) == 3 and all(1200 < len(prompt) <= 2000 for prompt in long)


def test_tokens_through_the_blocks_are_counted(tiny: Callable[[str], Loaded]) -> None:
    """As many as the texts have; what runs outside is not counted."""
    loaded = tiny("llama")
    costs: dict[str, Cost] = {}
    for _ in range(2):
        with counted(costs, "score"):
            list(forward(loaded, [[5, 6, 7], [8, 9]], 64))
    list(forward(loaded, [[5, 6, 7]], 64))
    assert costs["score"].tokens == 10 and 0 < costs["score"].seconds < 60


def test_flops_of_the_blocks(tiny: Callable[[str], Loaded]) -> None:
    """Against a count by hand of the tiny model's weights (3 layers of 32, 48 inner, 4 heads and 2 key/value heads of 8)."""
    weights = 3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)
    by_hand = 2 * weights * 7 + 4 * 3 * 4 * 8 * (sum(range(1, 5)) + sum(range(1, 4)))
    assert block_flops(tiny("llama"), [4, 3]) == by_hand
    assert block_flops(tiny("llama"), [4], before=4) == 0


@torch.inference_mode()
def test_the_two_bases_agree() -> None:
    """The benchmark's SVD and ours give the same SPS on its synthetic matrix."""
    matrix = synthetic(600, 24)
    own, other = compute_basis(matrix), by_svd(matrix)
    x = torch.randn(5, 24)
    ranks = own.ranks([0.5, 0.95])
    assert ranks == other.ranks([0.5, 0.95])
    torch.testing.assert_close(residuals(x, own, ranks), residuals(x, other, ranks), rtol=1e-4, atol=1e-5)


def test_a_line_is_fitted() -> None:
    """Slope, intercept and R^2 of points on a line, and of points that are not."""
    assert fit([1, 2, 4], [5, 7, 11]) == pytest.approx((2, 3, 1))
    assert fit([1, 2, 3, 4], [1, 4, 9, 16])[2] < 0.97


def test_dimensions_give_the_published_numbers_of_weights() -> None:
    """8.03 and 11.8 billion parameters (a tied head counts once; Gemma's vision tower is left out), but for the norms."""
    llama, gemma = paper_scale.LLAMA, paper_scale.GEMMA
    assert llama.block_weights + 2 * llama.head_weights == pytest.approx(8.03e9, rel=0.005)
    assert gemma.block_weights + gemma.head_weights == pytest.approx(11.77e9, rel=0.01)
    assert llama.cache_bytes == 131_072


def test_the_document_holds_the_arithmetic() -> None:
    """docs/paper_scale.md shows what the program prints."""
    document = (ROOT / "docs" / "paper_scale.md").read_text(encoding="utf-8")
    shown = document.partition("<!-- python -m benchmarks.paper_scale -->\n")[2].partition("<!-- end -->")[0]
    assert shown == paper_scale.text()


def test_an_unknown_comparison_is_one_line() -> None:
    """Said before a model is loaded."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "scorring"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "there is no comparison scorring" in done.stderr and time.monotonic() - started < 60
