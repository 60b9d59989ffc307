"""The resolved configuration as typed settings: every key of ``configs/`` has a field here, and a key without one is an error.

All checks that need no model run here, before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from xcompress.schema import UsageError

STAGES = ("prepare", "generate", "score", "stepwise", "read", "analyse")
MATRICES = ("embedding", "output_head", "q_proj")
# Rows of Table 1 that a selector of one's own cannot be named like.
BUILT_IN_SELECTORS = (
    *("closed_book", "raw_passages", "compact", "random", "shortest", "longest", "lowest_ppl", "lowest_longppl", "compressor"),
    *("question", "confidence", "majority", "lowest_sps", "oracle"),
)
POOLINGS = ("max", "mean", "last", "min", "absmax")  # of hidden states; the order of the stored axis
T = TypeVar("T")


@dataclass(frozen=True)
class ModelSettings:
    """A causal LM. ``model`` is a hub name, a folder, or ``{_target_: function}`` that returns a folder."""

    name: str
    model: Any
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class ReaderSettings(ModelSettings):
    """The LM that answers and whose weights define SPS and PPL."""

    prompt_file: str = ""
    chat: bool = False
    max_new_tokens: int = 32
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        _positive("reader.max_new_tokens", self.max_new_tokens)
        if self.batch_tokens is not None:
            _positive("reader.batch_tokens", self.batch_tokens)


@dataclass(frozen=True)
class CompressorSettings(ModelSettings):
    """The LM that writes summaries. ``judge``: how a round is found complete ("generated", "scored" or "fixed")."""

    prompt_file: str = ""
    chat: bool = True
    judge: str = "generated"
    max_rounds: int = 6
    max_new_tokens: int = 700
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _choice("compressor.judge", self.judge, ("generated", "scored", "fixed"))
        _positive("compressor.max_rounds", self.max_rounds)
        _positive("compressor.max_new_tokens", self.max_new_tokens)
        if self.repetition_penalty <= 0:
            raise UsageError("compressor.repetition_penalty must be above 0; 1 is neutral")


@dataclass(frozen=True)
class HubSettings:
    """A data set in the hub's layout: its name there (already in the local cache) or a local folder. No code of it is run."""

    id: str
    revision: str | None = None
    config: str | None = None
    split: str = "validation"
    calibration_split: str | None = None
    files: Sequence[str] = ()


@dataclass(frozen=True)
class ArchiveSettings:
    """A zip or tar file that holds a public file as ``member``; size in bytes."""

    member: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class DownloadSettings:
    """A public file: where it is, what it is called here, and (where known) its size in bytes and SHA-256."""

    file: str
    url: str
    size: int | None = None
    sha256: str | None = None
    archive: ArchiveSettings | None = None


@dataclass(frozen=True)
class RetrieverSettings:
    """How passages are found in a corpus: "bm25", or "dense" with a sentence-transformers model."""

    kind: str = "bm25"
    model: Any = None
    revision: str | None = None
    query_prefix: str = ""
    passage_prefix: str = ""

    def __post_init__(self) -> None:
        _choice("dataset.retriever.kind", self.kind, ("bm25", "dense"))
        if self.kind == "dense" and not self.model:
            raise UsageError(
                "dataset.retriever.kind=dense needs dataset.retriever.model: a sentence-transformers model's folder or hub name"
            )


@dataclass(frozen=True)
class SourceSettings:
    """Questions (a file, or a data set in the hub's layout), and a corpus where they have no passages."""

    path: str
    format: str = "auto"
    columns: Mapping[str, str] | None = None
    corpus: str | None = None
    retriever: RetrieverSettings = field(default_factory=RetrieverSettings)
    hub: HubSettings | None = None


@dataclass(frozen=True)
class DatasetSettings:
    """A data set: its test source, its calibration source for the gate (a file, or rows held out of the test file)."""

    name: str
    split: str
    path: str | None
    origin: str = "file"
    hub: HubSettings | None = None
    format: str = "auto"
    columns: Mapping[str, str] | None = None
    corpus: str | None = None
    retriever: RetrieverSettings = field(default_factory=RetrieverSettings)
    passages: int = 30
    segment_size: int = 5
    demos_file: str = ""
    calibration_path: str | None = None
    calibration_limit: int | None = None
    calibration_holdout: int = 0
    empty_golds: str = "official"
    licence: str = ""
    how_to_get: str = ""
    downloads: Sequence[DownloadSettings] = ()
    by_hand: str = ""

    def __post_init__(self) -> None:
        _choice("dataset.origin", self.origin, ("file", "hub"))
        if self.origin == "hub" and self.hub is None:
            raise UsageError(f"dataset={self.name} has no copy on the hub; set dataset.hub={{id: ..., split: ...}} or a path")
        _positive("dataset.passages", self.passages)
        _positive("dataset.segment_size", self.segment_size)
        if self.calibration_limit is not None:
            _positive("dataset.calibration_limit", self.calibration_limit)
        if self.calibration_holdout < 0:
            raise UsageError("dataset.calibration_holdout must be 0 or more")
        if self.calibration_path not in {None, "", "auto"} and self.calibration_holdout:
            raise UsageError("set dataset.calibration_path or dataset.calibration_holdout, not both")
        _choice("dataset.empty_golds", self.empty_golds, ("official", "match_raw"))

    def source(self) -> SourceSettings:
        """The test questions.

        Raises:
            UsageError: the file is not set, or is not there (of the hub's copy this is said when it is opened).
        """
        if self.origin == "hub" and self.hub is not None:
            return self._hub_source(self.hub)
        if not self.path:
            raise UsageError(f"dataset={self.name} needs a file: {self.how_to_get} Then set dataset.path=FILE")
        return self._source("dataset.path", self.path)

    def calibration(self) -> SourceSettings | None:
        """The calibration questions, or None where there are none."""
        if self.calibration_path == "auto":
            if self.origin == "hub" and self.hub is not None:
                split = self.hub.calibration_split
                return self._hub_source(dataclasses.replace(self.hub, split=split)) if split else None
            found = sorted(Path(self.path or "").parent.glob("train*.json*")) if self.path else []
            return self._source("dataset.calibration_path", str(found[0])) if len(found) == 1 else None
        if not self.calibration_path:
            return None
        return self._source("dataset.calibration_path", self.calibration_path)

    def _hub_source(self, hub: HubSettings) -> SourceSettings:
        self._check_corpus()
        named = "/".join(part for part in (hub.config, hub.split) if part)
        return SourceSettings(f"{hub.id} ({named})", self.format, self.columns, self.corpus, self.retriever, hub)

    def _source(self, key: str, path: str) -> SourceSettings:
        if not Path(path).exists():
            fetch = f" `python scripts/fetch_data.py dataset={self.name}` gets the public files." if self.downloads else ""
            hint = f". {self.how_to_get}{fetch} Put it there, or set {key}=FILE" if self.how_to_get else ""
            raise UsageError(f"{key}: {path} does not exist{hint}")
        self._check_corpus()
        return SourceSettings(path, self.format, self.columns, self.corpus, self.retriever)

    def _check_corpus(self) -> None:
        if self.corpus and not Path(self.corpus).exists():
            raise UsageError(f"dataset.corpus: {self.corpus} does not exist")


@dataclass(frozen=True)
class MethodSettings:
    """A method variant: which SPS, which gate, which candidates, chosen when."""

    name: str
    policy: str = "posthoc"
    options: str = "sampled"
    beams: int = 5
    beam_penalty: float = 1.2
    gate: str = "paper"
    gate_share: float = 0.30
    gate_pool: int = 50
    subspace: str = "embedding"
    layer: str | int = "penultimate"
    pooling: str = "max"
    energy: float = 0.95
    first_token: bool = True
    start_token: bool = False
    include_initial: bool = True
    scoring_dtype: str | None = None
    reading_dtype: str | None = None

    def __post_init__(self) -> None:
        _choice("method.policy", self.policy, ("posthoc", "stepwise"))
        _choice("method.options", self.options, ("sampled", "beams"))
        _choice("method.gate", self.gate, ("paper", "release", "none"))
        _choice("method.pooling", self.pooling, POOLINGS)
        _positive("method.beams", self.beams)
        _positive("method.gate_pool", self.gate_pool)
        if self.beam_penalty <= 0:
            raise UsageError("method.beam_penalty must be above 0; 1 is neutral")
        if self.options == "beams" and self.policy != "stepwise":
            raise UsageError("method.options=beams needs method.policy=stepwise: beams compete within a round")
        if not 0 < self.gate_share < 1:
            raise UsageError(f"method.gate_share must lie between 0 and 1, not {self.gate_share}")


@dataclass(frozen=True)
class GenerationSettings:
    """The pool: one greedy trajectory and ``candidates`` (K) sampled ones."""

    candidates: int = 5
    temperature: float = 0.7
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if self.candidates < 0:
            raise UsageError("generation.candidates must be 0 or more")
        if self.temperature <= 0:
            raise UsageError("generation.temperature must be above 0; the greedy candidate is always there anyway")
        if not 0 < self.top_p <= 1:
            raise UsageError("generation.top_p must lie in (0, 1]")


@dataclass(frozen=True)
class SubspaceSettings:
    """A matrix of the reader and how its basis is taken."""

    matrix: str
    center: bool = False
    energy_of: str = "values"
    rows: str = "all"

    def __post_init__(self) -> None:
        _choice("scoring.subspaces.*.rows", self.rows, ("all", "tokenizer"))
        _choice("scoring.subspaces.*.matrix", self.matrix, MATRICES)
        _choice("scoring.subspaces.*.energy_of", self.energy_of, ("values", "squares"))


@dataclass(frozen=True)
class ScoringSettings:
    """What the scoring stage stores: SPS at every subspace x layer x pooling x energy, with and without the first token."""

    subspaces: Mapping[str, SubspaceSettings]
    energies: Sequence[float]
    start_token: Sequence[bool] = (False, True)
    rivals: bool = True

    def __post_init__(self) -> None:
        if not self.energies or not all(0 < energy <= 1 for energy in self.energies):
            raise UsageError("scoring.energies must be levels in (0, 1]")


@dataclass(frozen=True)
class StatisticsSettings:
    """Intervals and tests of the tables."""

    level: float = 0.95
    resamples: int = 10_000

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise UsageError("statistics.level must lie between 0 and 1")
        _positive("statistics.resamples", self.resamples)


@dataclass(frozen=True)
class Settings:
    """The whole configuration of one run."""

    reader: ReaderSettings
    compressor: CompressorSettings
    dataset: DatasetSettings
    engine: Mapping[str, Any]
    method: MethodSettings
    execution: Mapping[str, Any]
    generation: GenerationSettings
    scoring: ScoringSettings
    statistics: StatisticsSettings
    seed: int = 0
    limit: int | None = None
    stages: Sequence[str] = STAGES
    data_root: str = "data"
    run_root: str = "results/runs"
    shard_size: int = 8
    logger: Mapping[str, Any] = field(default_factory=lambda: {"_target_": "xcompress.tracking.NoTracker"})
    selectors: Mapping[str, Any] = field(default_factory=dict)
    resolved: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def scoring_dtype(self) -> str:
        """dtype of the reader when it scores."""
        return self.method.scoring_dtype or self.reader.dtype

    @property
    def reading_dtype(self) -> str:
        """dtype of the reader when it answers."""
        return self.method.reading_dtype or self.reader.dtype

    def __post_init__(self) -> None:
        for stage in self.stages:
            _choice("stages", stage, STAGES)
        _positive("shard_size", self.shard_size)
        if self.limit is not None:
            _positive("limit", self.limit)
        if self.method.subspace not in self.scoring.subspaces:
            known = ", ".join(self.scoring.subspaces)
            raise UsageError(f"method.subspace={self.method.subspace} is not scored; scoring.subspaces has {known}")
        if not any(abs(self.method.energy - energy) < 1e-9 for energy in self.scoring.energies):
            raise UsageError(f"method.energy={self.method.energy} is not among scoring.energies {list(self.scoring.energies)}")
        for name in self.selectors:
            if name in {*BUILT_IN_SELECTORS, self.method.name}:
                raise UsageError(f"selectors.{name}: Table 1 has a row of that name already; choose another")
        if self.method.start_token not in self.scoring.start_token:
            raise UsageError(f"method.start_token={self.method.start_token} is not among scoring.start_token")


_NESTED: dict[str, Any] = {
    "reader": ReaderSettings,
    "compressor": CompressorSettings,
    "dataset": DatasetSettings,
    "method": MethodSettings,
    "generation": GenerationSettings,
    "scoring": ScoringSettings,
    "statistics": StatisticsSettings,
}


def from_config(config: Mapping[str, Any]) -> Settings:
    """Settings from a resolved configuration (plain containers).

    Raises:
        UsageError: an unknown key (with near matches), a missing one, or a value out of range.
    """
    values: dict[str, Any] = {key: value for key, value in config.items() if key != "experiment"}
    for key, kind in _NESTED.items():
        if not isinstance(values.get(key), Mapping):
            raise UsageError(f"the configuration lacks the group {key!r}")
        part = dict(values[key])
        if key == "scoring":
            subspaces = part.get("subspaces") or {}
            part["subspaces"] = {
                name: build(SubspaceSettings, entry, f"scoring.subspaces.{name}") for name, entry in subspaces.items()
            }
        if key == "dataset":
            part = _dataset(part)
        values[key] = build(kind, part, key)
    return build(Settings, {**values, "resolved": dict(config)}, "")


def _dataset(part: dict[str, Any]) -> dict[str, Any]:
    """The nested settings of a data set, built where they are mappings (a wrong type is said by :func:`build`)."""
    for key, kind in (("hub", HubSettings), ("retriever", RetrieverSettings)):
        if isinstance(part.get(key), Mapping):
            part[key] = build(kind, part[key], f"dataset.{key}")
    if isinstance(part.get("downloads"), list):
        downloads = []
        for number, entry in enumerate(part["downloads"]):
            where = f"dataset.downloads.{number}"
            if not isinstance(entry, Mapping):
                raise UsageError(f"{where} must be a mapping, not {entry!r}")
            entry = dict(entry)
            if isinstance(entry.get("archive"), Mapping):
                entry["archive"] = build(ArchiveSettings, entry["archive"], f"{where}.archive")
            downloads.append(build(DownloadSettings, entry, where))
        part["downloads"] = downloads
    return part


def build(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """``kind(**values)``, with one sentence for unknown or missing keys and for values of the wrong type."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=3)
            hint = f"; did you mean {' or '.join(prefix + name for name in near)}?" if near else f"; known: {', '.join(fields)}"
            raise UsageError(f"unknown setting {prefix}{key}{hint}")
    for name, entry in fields.items():
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UsageError(f"setting {prefix}{name} is missing")
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise UsageError(f"{prefix}{name} must be {_in_words(hints[name])}, not {value!r}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML or the command line has the type of its field ("no" is a text there, not false)."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return True
    if kind is UnionType:
        return any(_fits(value, argument) for argument in arguments)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(inner, arguments[1]) for inner in value.values())
    if kind is Sequence:
        return isinstance(value, list | tuple) and all(_fits(inner, arguments[0]) for inner in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _in_words(hint: Any) -> str:
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:
        return " or ".join(map(_in_words, arguments))
    if kind is Sequence:
        return f"a list (each entry {_in_words(arguments[0])})"
    words = {str: "text (in quotes)", bool: "true or false", int: "a whole number", float: "a number", type(None): "null"}
    return words.get(kind, "a mapping")


def _choice(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=2)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise UsageError(f"{key}={value} is not known{hint}; choose from {', '.join(known)}")


def _positive(key: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} must be a whole number of 1 or more, not {value!r}")
