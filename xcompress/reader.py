"""A reader: its subspaces, and SPS, NLL and concentration ratio of texts under its weights."""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xcompress.checkpoint import Loaded, fingerprint
from xcompress.forward import POOLINGS, Forward, NonFiniteError, PassSize, layer_names, run
from xcompress.perplexity import mean_nll
from xcompress.prompts import encode, start_token
from xcompress.schema import UsageError
from xcompress.settings import ScoringSettings, SubspaceSettings
from xcompress.spectrum import Basis, check_orthonormal, compute_basis, residuals
from xcompress.store import digest, write_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Scores of one text.

    Attributes:
        tokens: its length under the reader, start token not counted.
        first_token: id of its first token.
        nll: mean negative log-likelihood a scored token (nats), or None if no token is scored.
        scored_tokens: tokens in that mean: all where a start token precedes them, else all but the first.
        token_logprobs: [tokens] log-probability of each token (nats), None for one without predecessor.
        ratio: [start, first] float32, ||mean-pooled||_2 / ||max-pooled||_1 of the penultimate states.
        sps: [start, first, subspace, layer, pooling, energy] float32.
    """

    tokens: int
    first_token: int
    nll: float | None
    scored_tokens: int
    token_logprobs: list[float | None]
    ratio: npt.NDArray[np.float32]
    sps: npt.NDArray[np.float32]


def available(loaded: Loaded, subspaces: Mapping[str, SubspaceSettings]) -> dict[str, SubspaceSettings]:
    """The subspaces that this reader has: an output head that is the embedding says nothing new, and not every family has a
    query projection of its own. What is left out is logged.

    Raises:
        UsageError: none is left.
    """
    kept = {}
    for name, entry in subspaces.items():
        try:
            matrix = matrix_of(loaded, entry.matrix)
        except UsageError as error:
            log.warning("subspace %s left out: %s", name, error)
            continue
        if entry.matrix == "output_head" and matrix is matrix_of(loaded, "embedding"):
            log.info("subspace %s left out: the output head of %s is its embedding", name, loaded.name)
            continue
        kept[name] = entry
    if not kept:
        raise UsageError(f"{loaded.name} has none of the matrices that scoring.subspaces names")
    return kept


def matrix_of(loaded: Loaded, name: str) -> torch.Tensor:
    """The [rows, D] matrix a subspace is taken of.

    ``embedding`` is the input embedding itself (not what a family multiplies its output with), ``output_head`` the output
    embedding, ``q_proj`` the query projection of block L-1 (rows as samples; the authors' release).
    """
    if name == "embedding":
        weight: torch.Tensor = loaded.model.get_input_embeddings().weight
        return weight
    if name == "output_head":
        weight = loaded.model.get_output_embeddings().weight
        return weight
    block = loaded.blocks[-2]
    found = [module for label, module in block.named_modules() if label.rpartition(".")[2] == "q_proj"]
    if len(found) != 1:
        raise UsageError(f"{loaded.name} has no separate query projection in its blocks")
    weight = found[0].weight
    return weight


def load_basis(loaded: Loaded, name: str, settings: SubspaceSettings, cache: Path) -> Basis:
    """The basis of a subspace, from ``cache`` (a folder) if these weights and settings were decomposed before."""
    key = digest([fingerprint(loaded.folder), str(loaded.dtype), settings.matrix, settings.center, settings.rows, 1])
    path = cache / f"{loaded.name.replace('/', '--')}-{settings.matrix}-{key}.npz"  # shared by subspaces of other energy_of
    energy_of: Any = settings.energy_of
    if path.exists():
        try:
            with np.load(path, allow_pickle=False) as data:
                mean = torch.from_numpy(data["mean"]) if settings.center else None
                basis = Basis(
                    torch.from_numpy(data["vectors"]), torch.from_numpy(data["values"]), mean, int(data["rows"]), energy_of
                )
            check_orthonormal(basis)
            return basis
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            log.warning("basis %s is damaged (%s): it is computed again", path, error)
    log.info("computing the %s basis of %s", name, loaded.name)
    try:
        matrix = matrix_of(loaded, settings.matrix)
        if settings.rows == "tokenizer":
            matrix = matrix[: len(loaded.tokenizer)]
        basis = compute_basis(matrix, settings.center, energy_of)
    except ValueError as error:
        raise UsageError(f"{loaded.name}, subspace {name}: {error}") from error
    buffer = io.BytesIO()
    mean_array = basis.mean.numpy() if basis.mean is not None else np.zeros(0, np.float32)
    np.savez(buffer, vectors=basis.vectors.numpy(), values=basis.values.numpy(), mean=mean_array, rows=basis.rows)
    write_atomically(path, buffer.getvalue())
    return basis


class TextScorer:
    """Scores texts under one reader; see :class:`Score`.

    Args:
        loaded: the reader.
        settings: subspaces, energies and start-token rules.
        cache: folder for bases.
        batch_tokens: tokens of one forward pass; None finds what the device's memory holds.
    """

    def __init__(self, loaded: Loaded, settings: ScoringSettings, cache: Path, batch_tokens: int | None = None) -> None:
        self.loaded = loaded
        self.size = PassSize(loaded, batch_tokens)
        self.blocks = len(loaded.blocks)
        self.start = start_token(loaded.tokenizer)
        # Without a start token the two rules are the same pass.
        self.rules = [rule for rule in settings.start_token if not rule or self.start is not None] or [False]
        subspaces = available(loaded, settings.subspaces)
        self.bases = {name: load_basis(loaded, name, entry, cache) for name, entry in subspaces.items()}
        self.ranks = {name: basis.ranks(settings.energies) for name, basis in self.bases.items()}
        # Subspaces that differ in what energy is counted of have one basis, and one set of coefficients gives both.
        self.same_basis: dict[tuple[object, ...], list[str]] = {}
        for name, entry in subspaces.items():
            self.same_basis.setdefault((entry.matrix, entry.center, entry.rows), []).append(name)
        self.bases = {
            name: Basis(b.vectors.to(loaded.device), b.values, b.mean, b.rows, b.energy_of) for name, b in self.bases.items()
        }
        self.axes: dict[str, list[Any]] = {
            "start_token": self.rules,
            "first_token": [True, False],
            "subspace": list(self.bases),
            "layer": layer_names(self.blocks),
            "pooling": list(POOLINGS),
            "energy": [float(energy) for energy in settings.energies],
        }

    def describe(self) -> dict[str, Any]:
        """Rows, ranks and widths of the bases, for the record."""
        return {
            name: {"rows": basis.rows, "width": basis.vectors.shape[0], "ranks": self.ranks[name]}
            for name, basis in self.bases.items()
        }

    def score(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> list[Score | None]:
        """A score for each text; None for a blank one (or one that has no tokens). Equal whatever the texts beside it."""
        ids = [encode(self.loaded.tokenizer, text, start=False) if text.strip() else [] for text in texts]
        present = [index for index, tokens in enumerate(ids) if tokens]
        sps: Mapping[int, list[npt.NDArray[np.float32]]] = {index: [] for index in present}
        ratios: Mapping[int, list[npt.NDArray[np.float32]]] = {index: [] for index in present}
        nll: dict[int, tuple[float | None, int, list[float | None]]] = {}
        # NLL is always given the start token where there is one, whether or not SPS is taken with it.
        passes = self.rules if self.start is None or True in self.rules else [*self.rules, True]
        for rule in passes:
            start = [self.start] if rule and self.start is not None else []
            # With a start token its own state opens the text: "first token" is then the start token.
            for at, forward in self._run(start, [ids[index] for index in present], [texts[index] for index in present]):
                index = present[at]
                if rule in self.rules:
                    sps[index].append(self._sps(forward.pooled))
                    ratios[index].append(_ratio(forward.pooled[:, self.blocks - 1]))
                if bool(start) or index not in nll:
                    logprobs = forward.token_logprobs.tolist()
                    unscored: list[float | None] = [None] * (len(ids[index]) - len(logprobs))
                    nll[index] = (mean_nll(forward.token_logprobs), len(logprobs), unscored + logprobs)
                if progress is not None:
                    progress(len(ids[index]))
        return [
            Score(len(ids[i]), ids[i][0], *nll[i], np.stack(ratios[i]), np.stack(sps[i])) if ids[i] else None
            for i in range(len(texts))
        ]

    def _run(self, start: Sequence[int], ids: Sequence[Sequence[int]], texts: Sequence[str]) -> Iterator[tuple[int, Forward]]:
        """:func:`xcompress.forward.run`, with the text itself in an error."""
        try:
            yield from run(self.loaded, [[*start, *tokens] for tokens in ids], self.size)
        except NonFiniteError as error:
            error.text = texts[error.index]
            raise

    def _sps(self, pooled: torch.Tensor) -> npt.NDArray[np.float32]:
        """[first, subspace, layer, pooling, energy] from pooled states [first, layer, pooling, D]."""
        parts: dict[str, torch.Tensor] = {}
        for names in self.same_basis.values():
            ranks = [rank for name in names for rank in self.ranks[name]]
            found = residuals(pooled, self.bases[names[0]], ranks)
            parts.update(zip(names, found.tensor_split(len(names), -1), strict=True))
        stacked: npt.NDArray[np.float32] = torch.stack([parts[name] for name in self.bases], 1).cpu().numpy()
        return stacked


def _ratio(states: torch.Tensor) -> npt.NDArray[np.float32]:
    """Concentration ratio [first] of penultimate pooled states [first, pooling, D] (paper, adaptive norm filtering)."""
    maximum, mean = states[:, POOLINGS.index("max")], states[:, POOLINGS.index("mean")]
    ratio: npt.NDArray[np.float32] = (mean.norm(dim=-1) / maximum.abs().sum(-1)).cpu().numpy()
    return ratio
