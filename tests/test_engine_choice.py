"""xcompress/engines/choose.py and what the vLLM engine says where vLLM is not there. No model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xcompress import checkpoint
from xcompress.config import ROOT, settings_of
from xcompress.engines import choose, vllm
from xcompress.engines.choose import identity, resolve
from xcompress.engines.vllm import check, open_engine, window
from xcompress.pipeline import Run
from xcompress.schema import UsageError

GPU = ["reader.device=cuda", "compressor.device=cuda", "reader.dtype=bfloat16", "compressor.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("overrides", "there", "expected"),
    [
        ([], True, "hf"),
        (GPU, False, "hf_gpu"),
        (GPU, True, "vllm"),
        ([*GPU, "reader.device=cpu"], True, "hf"),
        ([*GPU, "method=xcompress_release"], True, "hf_gpu"),
        ([*GPU, "method=xcompress_release", "method.options=sampled"], True, "vllm"),
    ],
)
def test_auto(
    overrides: list[str], there: bool, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM with a GPU and vLLM, else transformers; the choice is logged, and its settings are those of its own file."""
    monkeypatch.setattr(vllm, "installed", lambda: there)
    choose._say.cache_clear()
    caplog.set_level("INFO")
    auto = settings_of(["experiment=laptop", "engine=auto", *overrides])
    assert resolve(auto).engine == settings_of(["experiment=laptop", f"engine={expected}"]).engine
    assert f"engine=auto is engine={expected} (" in caplog.text
    assert resolve(resolve(auto)) == resolve(auto)


def test_auto_shares_the_rows_of_what_it_becomes(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """Where it is transformers, every folder has the same name."""
    models = [f"reader.model={model_folder('llama')}", f"compressor.model={model_folder('llama')}", f"run_root={tmp_path}"]

    def names(*more: str) -> set[str]:
        run = Run(settings_of(["experiment=laptop", *models, *more]))
        return {folder.path.name for folder in (run.candidates, run.scores, run.rivals, run.answers, run.stepwise)}

    assert names("engine=auto") == names("engine=hf") == names("engine=auto", "engine.hf.cache_gb=7")
    assert names() != names("engine.max_context=128")


def test_tuning_has_no_part_in_the_identity() -> None:
    """Memory, speed and place may change in the middle; what changes tokens may not."""
    assert identity(settings_of(["engine=vllm"]).engine) == {
        "_target_": "xcompress.engines.vllm.open_engine",
        "max_context": None,
        "quantization": None,
    }
    assert identity(settings_of(["engine=openai"]).engine) == {
        "_target_": "xcompress.engines.openai.open_engine",
        "served": {},
        "prompts": "ids",
        "extensions": True,
        "max_context": None,
    }
    assert identity(settings_of(["engine=hf"]).engine) == {
        "_target_": "xcompress.engines.hf.open_engine",
        "max_context": None,
    }


def test_unknown_engines(model_folder: Callable[[str], Path]) -> None:
    settings = settings_of(["experiment=laptop"])
    for target in ("nowhere.engine", "nodot", ""):
        with pytest.raises(UsageError, match=r"engine\._target_=.* cannot be found"):
            choose.check(dataclasses.replace(settings, engine={"_target_": target}))


# ---- vLLM's own


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["method=xcompress_release"], "engine=vllm cannot do the beam search of the authors' release"),
        (["generation.temperature=0.001"], "vLLM samples at temperatures of 0.01 to 2.0, not 0.001"),
    ],
)
def test_what_vllm_cannot_do(overrides: list[str], answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "installed", lambda: True)
    with pytest.raises(UsageError) as caught:
        check(settings_of(["experiment=laptop", "engine=vllm", *overrides]))
    assert answer in str(caught.value)
    check(settings_of(["experiment=laptop", "engine=vllm"]))


def test_without_vllm(tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the remedy, before anything is read; but not where only tables are made again."""
    monkeypatch.setattr(vllm, "installed", lambda: False)
    sentence = r"engine=vllm needs vLLM, which is not installed: pip install -e '.\[vllm\]'; or set engine=hf"
    overrides = ["experiment=laptop", "engine=vllm", f"run_root={tmp_path / 'runs'}"]
    with pytest.raises(UsageError, match=sentence):
        Run(settings_of(overrides))
    assert not (tmp_path / "runs").exists()
    Run(settings_of([*overrides, "stages=[prepare,analyse]"]))
    with pytest.raises(UsageError, match=sentence):
        open_engine(model_folder("llama"), "float32", "cpu")


@pytest.mark.skipif(vllm.installed(), reason="vLLM is there")
def test_the_command_without_vllm(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), "experiment=laptop", "engine=vllm", f"run_root={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: engine=vllm needs vLLM")
    assert "Traceback" not in done.stderr


def test_a_certain_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 is the second GPU that may be seen."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert vllm._visible("cuda:1", 1) == {"CUDA_VISIBLE_DEVICES": "7"}
    assert vllm._visible("cuda", 2) == {} == vllm._visible("cpu", 1)
    for device, cards in (("cuda:2", 1), ("cuda:0", 2)):
        with pytest.raises(UsageError):
            vllm._visible(device, cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert vllm._visible("cuda:1", 1) == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gemma3_nested"])
def test_window(family: str, model_folder: Callable[[str], Path]) -> None:
    """From the small file alone, wherever a family keeps it; also where a nested configuration leaves out the default."""
    config = json.loads((model_folder(family) / "config.json").read_text(encoding="utf-8"))
    assert window(config) == 512
    if family == "gemma3_nested":
        del config["text_config"]["max_position_embeddings"]
        assert window(config) == 131072
    if family == "llama":
        assert window({"model_type": "mamba"}) is None


def test_one_model_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever holds a model, in this process or in another, shares one place, and the older one goes first."""
    events: list[str] = []

    class Held:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            events.append(f"end {self.name}")

    def made(name: str) -> Any:
        return checkpoint.hold(("test", name), lambda: (events.append(f"make {name}"), Held(name))[1])

    monkeypatch.setattr(checkpoint, "_cache", type(checkpoint._cache)())
    first = made("a")
    assert made("a") is first
    del first
    made("b")
    assert events == ["make a", "end a", "make b"]
    checkpoint.release()
    assert events[-1] == "end b" and os.getpid()
