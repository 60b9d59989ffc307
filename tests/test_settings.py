"""Every configuration file becomes settings, every setting is read by something, and wrong values are one sentence."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import get_class, get_method
from omegaconf import OmegaConf

from xcompress import settings
from xcompress.config import CONFIGS, check_overrides, compose, to_settings
from xcompress.execution.base import open_execution
from xcompress.schema import UsageError
from xcompress.settings import (
    CompressorSettings,
    DatasetSettings,
    GenerationSettings,
    MethodSettings,
    ReaderSettings,
    ScoringSettings,
    Settings,
    SourceSettings,
    StatisticsSettings,
    SubspaceSettings,
    build,
    from_config,
)

ROOT = Path(__file__).parents[1]
GROUPS = ("reader", "compressor", "dataset", "engine", "method", "execution", "logger", "selectors", "experiment")
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]
NESTED = {
    "reader": ReaderSettings,
    "compressor": CompressorSettings,
    "dataset": DatasetSettings,
    "method": MethodSettings,
    "generation": GenerationSettings,
    "scoring": ScoringSettings,
    "statistics": StatisticsSettings,
}
# Read by other settings (configs/dataset/*.yaml interpolate it), not by code.
FOR_THE_RECORD: set[tuple[type, str]] = {(Settings, "data_root")}


@lru_cache
def plain() -> dict[str, Any]:
    """The default configuration as plain containers (not to be changed)."""
    config: Any = OmegaConf.to_container(compose([]), resolve=True)
    return config


# ---- every key has a field, every field a key and a reader

AUTO = CONFIGS / "engine" / "auto.yaml"  # holds whole engines; which it becomes is another test's


@pytest.mark.parametrize(("group", "name"), CHOICES, ids=["=".join(choice) for choice in CHOICES])
def test_every_choice_becomes_settings(group: str, name: str) -> None:
    config = compose([f"{group}={name}"])
    found = to_settings(config)
    assert all(
        Path(file).is_file() for file in (found.reader.prompt_file, found.compressor.prompt_file, found.dataset.demos_file)
    )
    if group in NESTED:
        assert getattr(found, group).name == name
        keys = set(OmegaConf.to_container(config[group], resolve=True))
        assert keys == {field.name for field in dataclasses.fields(NESTED[group])}, "every setting stands in the file"


def test_config_holds_every_setting() -> None:
    config = plain()
    for key, kind in NESTED.items():
        fields = {field.name for field in dataclasses.fields(kind)}
        assert set(config[key]) == fields
    top = {field.name for field in dataclasses.fields(Settings)} - {"resolved"}
    assert set(config) - {"hydra", "experiment"} == top


@pytest.mark.parametrize("path", sorted({*(CONFIGS / "engine").glob("*.yaml")} - {AUTO}), ids=lambda path: path.stem)
def test_engine_keys_are_arguments_of_the_engine(path: Path) -> None:
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    arguments = set(inspect.signature(get_method(keys.pop("_target_"))).parameters)
    assert {"folder", "dtype", "device", *keys} == arguments


@pytest.mark.parametrize(
    "path", [*sorted((CONFIGS / "execution").glob("*.yaml")), *sorted((CONFIGS / "logger").glob("*.yaml"))], ids=str
)
def test_keys_of_other_targets_are_their_fields(path: Path) -> None:
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    kind = get_class(keys["_target_"])
    assert keys["name"] == path.stem
    assert set(keys) - {"_target_"} == {field.name for field in dataclasses.fields(kind)}
    given = {key: value for key, value in keys.items() if key != "_target_"}
    build(kind, given, path.parent.name)
    with pytest.raises(UsageError, match=rf"unknown setting {path.parent.name}\.nam; did you mean {path.parent.name}\.name"):
        build(kind, {"nam": "x"}, path.parent.name)


def test_an_execution_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"execution\._target_=xcompress\.nowhere cannot be found"):
        open_execution({"_target_": "xcompress.nowhere"})


def test_every_setting_is_read_somewhere() -> None:
    files = [path for part in ("xcompress", "analysis") for path in (ROOT / part).rglob("*.py") if path.name != "settings.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text += "".join(map(inspect.getsource, (DatasetSettings.source, DatasetSettings.calibration, DatasetSettings._source)))
    kinds = [kind for kind in vars(settings).values() if dataclasses.is_dataclass(kind)]
    assert {Settings, SourceSettings, SubspaceSettings, *NESTED.values()} <= set(kinds)
    unread = {
        (kind, field.name)
        for kind in kinds
        for field in dataclasses.fields(kind)
        if not re.search(rf"\.{field.name}\b", text) and (kind, field.name) not in FOR_THE_RECORD
    }
    assert unread == set()


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_job_of_a_sweep_composes(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text(encoding="utf-8")).get("hydra", {}).get("sweeper", {}).get("params", {})
    check_overrides(["-m", f"experiment={path.stem}", *(f"{key}={values}" for key, values in sweep.items())])


def test_experiments() -> None:
    laptop = to_settings(compose(["experiment=laptop"]))
    assert (laptop.reader.name, laptop.compressor.name, laptop.dataset.name) == ("smollm2_135m", "smollm2_135m", "mini")
    assert to_settings(compose(["experiment=table1"])).limit == 500
    assert to_settings(compose(["experiment=laptop", "limit=3", "dataset.passages=7"])).dataset.passages == 7


# ---- what is refused


def change(**values: Any) -> dict[str, Any]:
    """The default configuration with ``group__key`` (or ``key``) changed; ``...`` removes it."""
    config = copy.deepcopy(plain())
    for name, value in values.items():
        group, _, key = name.rpartition("__")
        part = config[group] if group else config
        if value is ...:
            del part[key]
        else:
            part[key] = value
    return config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reader__max_new_token": 3}, r"unknown setting reader.max_new_token; did you mean reader.max_new_tokens"),
        ({"zzz": 3}, "unknown setting zzz; known: reader, "),
        ({"reader__name": ...}, "setting reader.name is missing"),
        ({"scoring__energies": ...}, "setting scoring.energies is missing"),
        ({"reader": ...}, "lacks the group 'reader'"),
        ({"method": None}, "lacks the group 'method'"),
        ({"scoring__subspaces": {"e": {"matrx": "embedding"}}}, r"unknown setting scoring.subspaces.e.matrx; did you mean"),
        ({"scoring__subspaces": {"e": {"matrix": "embeding"}}}, r"matrix=embeding is not known \(did you mean embedding\?\)"),
        ({"scoring__subspaces": {"e": {"matrix": "embedding"}}}, "method.subspace=embedding is not scored; .* has e$"),
        ({"scoring__energies": []}, "scoring.energies must be levels"),
        ({"scoring__energies": [0.95, 1.5]}, "scoring.energies must be levels"),
        ({"scoring__start_token": [True]}, "method.start_token=False is not among"),
        ({"method__energy": 0.94}, "method.energy=0.94 is not among scoring.energies"),
        ({"method__gate": "papr"}, r"method.gate=papr is not known \(did you mean paper\?\); choose from paper, release, none"),
        ({"method__pooling": "maxx"}, "method.pooling=maxx is not known"),
        ({"method__gate_share": 1.0}, "method.gate_share must lie between 0 and 1"),
        ({"compressor__judge": "score"}, "compressor.judge=score is not known"),
        ({"compressor__max_rounds": 0}, "compressor.max_rounds must be a whole number of 1 or more"),
        ({"compressor__max_new_tokens": None}, "compressor.max_new_tokens must be a whole number, not None"),
        ({"compressor__repetition_penalty": 0}, "compressor.repetition_penalty must be above 0"),
        ({"reader__max_new_tokens": 0}, "reader.max_new_tokens must be a whole number of 1 or more"),
        ({"reader__batch_tokens": 0}, "reader.batch_tokens"),
        ({"dataset__passages": 0}, "dataset.passages must be"),
        ({"dataset__segment_size": -1}, "dataset.segment_size must be"),
        ({"dataset__calibration_path": "a", "dataset__calibration_holdout": 3}, "not both"),
        ({"dataset__calibration_holdout": -1}, "dataset.calibration_holdout must be 0 or more"),
        ({"dataset__calibration_limit": 0}, "dataset.calibration_limit must be"),
        ({"generation__candidates": -1}, "generation.candidates must be 0 or more"),
        ({"generation__temperature": 0.0}, "generation.temperature must be above 0"),
        ({"generation__top_p": 0}, r"generation.top_p must lie in \(0, 1\]"),
        ({"statistics__level": 1}, "statistics.level must lie between"),
        ({"statistics__resamples": 0}, "statistics.resamples must be"),
        ({"limit": 0}, "limit must be a whole number of 1 or more"),
        ({"shard_size": 0}, "shard_size must be"),
        ({"stages": ["prepare", "scor"]}, r"stages=scor is not known \(did you mean score\?\)"),
        # types: what YAML and Hydra make of a value
        ({"seed": "abc"}, "seed must be a whole number, not 'abc'"),
        ({"seed": True}, "seed must be a whole number, not True"),
        ({"limit": "3"}, "limit must be a whole number or null, not '3'"),
        ({"method__first_token": "no"}, "method.first_token must be true or false, not 'no'"),
        ({"reader__chat": 1}, "reader.chat must be true or false, not 1"),
        ({"reader__revision": 1234567}, r"reader.revision must be text \(in quotes\) or null, not 1234567"),
        ({"generation__candidates": 2.5}, "generation.candidates must be a whole number, not 2.5"),
        ({"generation__temperature": "high"}, "generation.temperature must be a number, not 'high'"),
        ({"scoring__energies": 0.95}, r"scoring.energies must be a list \(each entry a number\), not 0.95"),
        ({"scoring__start_token": ["yes"]}, r"scoring.start_token must be a list \(each entry true or false\)"),
        ({"stages": "score"}, "stages must be a list"),
        ({"dataset__columns": {"question": 3}}, "dataset.columns must be a mapping or null"),
        ({"dataset__path": ["a", "b"]}, "dataset.path must be text"),
        ({"engine": "hf"}, "engine must be a mapping"),
    ],
)
def test_wrong_values_are_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        from_config(change(**values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"method__layer": 3},
        {"method__layer": "last"},
        {"scoring__energies": [0.95, 1]},
        {"reader__revision": "1234567"},
        {"dataset__columns": {"question": "q"}},
        {"generation__candidates": 0},
        {"generation__temperature": 1},
        {"reader__model": {"_target_": "xcompress.embedded.smollm2_135m"}},
    ],
)
def test_values_that_are_fine(values: dict[str, Any]) -> None:
    (name, value), *_ = values.items()
    group, _, key = name.partition("__")
    assert getattr(getattr(from_config(change(**values)), group), key) == value


# ---- sources


def dataset(**values: Any) -> DatasetSettings:
    return DatasetSettings(name="mini", split="test", **{"path": None, "how_to_get": "Ask us.", **values})


def test_sources(tmp_path: Path) -> None:
    for name in ("test.jsonl", "train.jsonl", "corpus.jsonl"):
        (tmp_path / name).touch()
    test, train, corpus = (str(tmp_path / name) for name in ("test.jsonl", "train.jsonl", "corpus.jsonl"))
    found = dataset(path=test, calibration_path=train, corpus=corpus, format="table", columns={"question": "q"})
    assert found.source() == SourceSettings(test, "table", {"question": "q"}, corpus)
    assert found.calibration() == SourceSettings(train, "table", {"question": "q"}, corpus)
    assert dataset(path=test).calibration() is None


def test_missing_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    here, absent = str(tmp_path / "a.jsonl"), str(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match=r"dataset=mini needs a file: Ask us. Then set dataset.path=FILE"):
        dataset().source()
    with pytest.raises(UsageError, match=r"dataset.path: .*none.jsonl does not exist. Ask us."):
        dataset(path=absent).source()
    with pytest.raises(UsageError, match=r"dataset.calibration_path: .*none.jsonl does not exist"):
        dataset(path=here, calibration_path=absent).calibration()
    with pytest.raises(UsageError, match=r"dataset.corpus: .*none.jsonl does not exist$"):
        dataset(path=here, corpus=absent).source()
