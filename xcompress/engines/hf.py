"""The transformers engine: batched, one prefill per shared prompt, finished sequences leave the batch.

Every continuation is a row. Rows are grouped where they share a prefix; a group's prefix is computed once and held once
(:mod:`xcompress.attention`). That one mechanism serves K candidates of one prompt, later rounds whose prompts differ only in
the previous summary, and reading prompts that all start with the same demonstrations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xcompress.attention import Chunk, SharedPrefix, use
from xcompress.checkpoint import Loaded, load, stop_ids
from xcompress.engines.base import Draw, Generation, Progress, Request, check_length, text_until
from xcompress.engines.beam import Beam, Beams, Continuation
from xcompress.engines.grouping import Group, batches, share_prefixes
from xcompress.engines.sampling import choose, penalise, uniforms
from xcompress.schema import UsageError

_COMPACT = 0.75  # rows are re-packed when at most this share of them is still generating


@dataclass
class _Row:
    """A continuation under way."""

    request: int
    number: int
    prompt: tuple[int, ...]
    draw: Draw
    limit: int
    stop: tuple[str, ...]
    penalty: float
    tokens: list[int] = field(default_factory=list)
    logprob_sum: float = 0.0
    finish_reason: str = ""


class HFEngine:
    """Text generation with transformers (CPU or GPU).

    Args:
        loaded: the model and its tokenizer.
        cache_gb: memory for keys and values, which decides how many rows run together.
        prefill_tokens: prompt tokens of one pass (activations grow with it).
        max_context: longest prompt plus continuation; the model's own limit where it is lower or this is None.
    """

    name = "hf"
    reproducible = True

    def __init__(
        self, loaded: Loaded, cache_gb: float = 1.5, prefill_tokens: int = 1536, max_context: int | None = None
    ) -> None:
        self.loaded = loaded
        self.tokenizer: Any = loaded.tokenizer
        config = loaded.text_config
        limits = [n for n in (max_context, getattr(config, "max_position_embeddings", None)) if n]
        self.max_context = min(limits) if limits else 4096
        self.prefill_tokens = prefill_tokens
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * size * loaded.dtype.itemsize
        self.cache_tokens = max(1024, int(cache_gb * 2**30 / per_token))
        self.stop_ids = stop_ids(loaded.tokenizer, loaded.folder)
        self.pad_id = min(self.stop_ids, default=0)  # an existing id; padding never adds a row to the vocabulary

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        """See :class:`xcompress.engines.base.Engine`."""
        for request in requests:
            check_length(request, self.max_context)
        searched = [at for at, request in enumerate(requests) if request.beams]
        rows = [
            _Row(at, number, request.prompt, draw, request.max_new_tokens, request.stop, request.repetition_penalty)
            for at, request in enumerate(requests)
            for number, draw in enumerate(request.draws)
        ]
        groups = share_prefixes([row.prompt for row in rows])
        for batch in self._batches(groups, [row.prompt for row in rows], [row.limit for row in rows]):
            self._run(batch, rows, progress)
        results: list[list[Generation]] = [[] for _ in requests]
        for row in rows:
            results[row.request].append(
                Generation(self._decode(row.tokens, row.stop), tuple(row.tokens), row.finish_reason, row.logprob_sum)
            )
        for at, beams in zip(searched, self._search([requests[at] for at in searched], progress), strict=True):
            results[at] = [Generation(self._decode(b.tokens), b.tokens, b.finish_reason, b.logprob_sum) for b in beams]
        return results

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """See :class:`xcompress.engines.base.Engine`."""
        return [math.fsum(logprobs) for logprobs in self.token_logprobs(pairs)]

    @torch.inference_mode()
    def token_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """See :class:`xcompress.engines.base.Engine`."""
        for context, continuation in pairs:
            if not context or not continuation:
                raise ValueError("context and continuation must both hold at least one token")
            check_length(Request(tuple(context), (), len(continuation)), self.max_context)
        texts = [(*context, *continuation[:-1]) for context, continuation in pairs]
        found: list[list[float]] = [[] for _ in pairs]
        # The last context token stays in the suffix: its state predicts the first continuation token.
        groups = share_prefixes(texts, [len(context) - 1 for context, _ in pairs])
        for batch in self._batches(groups, texts, [0] * len(texts)):
            plan, states, _ = self._prefill(batch, texts, 0)
            for at, group in enumerate(batch):
                for offset, index in enumerate(group.members):
                    context, continuation = pairs[index]
                    first = len(context) - 1 - group.prefix
                    row = states[at * plan.rows_per_group + offset, first : first + len(continuation)]
                    target = torch.tensor(list(continuation), device=row.device)[:, None]
                    found[index] = self.loaded.logits(row).log_softmax(-1).gather(1, target).squeeze(1).double().tolist()
                    self._check_finite(math.fsum(found[index]), f"pair {index}")
        return found

    def _batches(
        self, groups: Sequence[Group], prompts: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> Iterator[list[Group]]:
        return batches(groups, [len(p) for p in prompts], limits, self.cache_tokens)

    def _prefill(
        self, batch: Sequence[Group], prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[SharedPrefix, torch.Tensor, torch.Tensor]:
        """Compute prefixes once a group and suffixes once a row.

        Returns the plan, the suffix states [R, S, D] and the suffix lengths [R]. Groups smaller than the largest are filled up
        with copies of their first row, whose results nobody reads.
        """
        device = self.loaded.device
        per_group = max(len(group.members) for group in batch)
        slots = [index for group in batch for index in (*group.members, *[group.members[0]] * (per_group - len(group.members)))]
        prefixes = [prompts[group.members[0]][: group.prefix] for group in batch]
        suffixes = [prompts[index][batch[at // per_group].prefix :] for at, index in enumerate(slots)]
        lengths = torch.tensor([len(suffix) for suffix in suffixes], device=device)
        width = int(lengths.max())
        prefix_lengths = torch.tensor([group.prefix for group in batch], device=device)
        plan = SharedPrefix(prefix_lengths, per_group, width + new_tokens)
        capacity = torch.arange(width + new_tokens, device=device)
        plan.suffix_valid = (capacity < lengths[:, None]) | (capacity >= width)
        starts = prefix_lengths.repeat_interleave(per_group)
        # Generated tokens follow the row's own last prompt token, whatever column they are stored in.
        offsets = torch.where(capacity < width, capacity, capacity - width + lengths[:, None])
        # Padding and rows that have ended would run past the last learned position; nobody reads them.
        plan.suffix_positions = (starts[:, None] + offsets).clamp_max(self.max_context - 1)
        with use(plan):
            at = 0
            while int(prefix_lengths.max()) > 0 and at < len(batch):
                end = at + 1
                longest = len(prefixes[at])
                while end < len(batch):
                    longest = max(longest, len(prefixes[end]))
                    if longest * (end + 1 - at) > self.prefill_tokens:
                        break
                    end += 1
                plan.prefix_rows = slice(at, end)
                self.loaded.states(*self._padded(prefixes[at:end]))
                at = end
            plan.prefix_rows = None
            states: torch.Tensor | None = None
            for plan.chunk in _chunks(lengths.tolist(), per_group, self.prefill_tokens):
                rows = plan.chunk.rows
                ids, _ = self._padded(suffixes[rows])
                found = self.loaded.states(ids, plan.suffix_positions[rows, : ids.shape[1]])
                if states is None:
                    states = found.new_zeros(len(slots), width, found.shape[2])
                states[rows, : ids.shape[1]] = found
            plan.chunk = None
        assert states is not None
        plan.suffix_length = width
        return plan, states, lengths

    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(1, max(len(text) for text in texts))
        ids = torch.tensor([[*text, *[self.pad_id] * (width - len(text))] for text in texts], device=self.loaded.device)
        return ids, torch.arange(width, device=self.loaded.device).expand_as(ids)

    @torch.inference_mode()
    def _run(self, batch: Sequence[Group], rows: Sequence[_Row], progress: Progress | None) -> None:
        """Generate all rows of a batch of groups; results are left in the rows."""
        limit = max(rows[index].limit for group in batch for index in group.members)
        plan, states, lengths = self._prefill(batch, [row.prompt for row in rows], limit)
        slots: list[_Row | None] = []
        for group in batch:
            slots += [rows[index] for index in group.members]
            slots += [None] * (plan.rows_per_group - len(group.members))
        logits = self.loaded.logits(states[torch.arange(len(slots)), lengths - 1])
        del states
        noise = {id(row): uniforms(row.draw, row.limit) for row in slots if row and row.draw.temperature > 0}
        seen = self._seen(slots, logits.shape[1]) if any(row.penalty != 1.0 for row in slots if row) else None
        for step in range(limit):
            tokens, logprobs = self._next(logits, slots, noise, seen, step)
            drawn = live = 0
            for at, row in enumerate(slots):
                if row is None:
                    continue
                drawn += 1
                self._append(row, int(tokens[at]), float(logprobs[at]))
                if row.finish_reason:
                    slots[at] = None
                else:
                    live += 1
            if progress is not None:
                progress(drawn)
            if not live:
                return
            if live <= _COMPACT * len(slots):
                slots, kept = _compact(slots, plan)
                tokens = tokens[kept]
                seen = None if seen is None else seen[kept]
            if seen is not None:
                seen.scatter_(1, tokens[:, None], True)
            assert plan.suffix_positions is not None
            with use(plan):
                at = plan.suffix_length
                states = self.loaded.states(tokens[:, None], plan.suffix_positions[:, at : at + 1])
            plan.suffix_length += 1
            logits = self.loaded.logits(states[:, -1])

    def _search(self, requests: Sequence[Request], progress: Progress | None) -> list[list[Beam]]:
        """Beam searches, best sequence first. The beams of a request are one group (a shared prompt but for its last token)."""
        prompts = [request.prompt for request in requests for _ in range(request.beams)]
        limits = [request.max_new_tokens for request in requests for _ in range(request.beams)]
        first = [0]
        for request in requests:
            first.append(first[-1] + request.beams)
        groups = [Group(len(request.prompt) - 1, tuple(range(first[at], first[at + 1]))) for at, request in enumerate(requests)]
        owner = {index: at for at, group in enumerate(groups) for index in group.members}
        found: list[list[Beam]] = [[] for _ in requests]
        for batch in batches(groups, [len(p) for p in prompts], limits, self.cache_tokens, whole=True):
            at = [owner[group.members[0]] for group in batch]
            for index, beams in zip(at, self._beams(batch, [requests[i] for i in at], prompts, progress), strict=True):
                found[index] = beams
        return found

    @torch.inference_mode()
    def _beams(
        self, batch: Sequence[Group], requests: Sequence[Request], prompts: Sequence[Sequence[int]], progress: Progress | None
    ) -> list[list[Beam]]:
        """The finished beams of one batch of requests, which leave it as they end."""
        plan, states, lengths = self._prefill(batch, prompts, max(request.max_new_tokens for request in requests))
        width = plan.rows_per_group  # a request with fewer beams has idle rows
        searches = [Beams(request.beams, request.max_new_tokens, self.stop_ids) for request in requests]
        live = list(range(len(requests)))
        logits = self.loaded.logits(states[torch.arange(len(states)), lengths - 1])
        del states
        while True:
            logprobs = logits.log_softmax(-1)
            rows: list[int] = []  # row of the last step whose keys and values each row of the next one continues
            tokens: list[int] = []
            still: list[int] = []
            for place, index in enumerate(live):
                search, request = searches[index], requests[index]
                own = logprobs[place * width : place * width + len(search.open)]
                parents = search.step(self._best(own, search, request))
                if progress is not None:
                    progress(len(search.open))
                if not parents:
                    continue
                still.append(index)
                fill = width - len(parents)
                rows += [place * width + parent for parent in [*parents, *parents[:1] * fill]]
                tokens += [beam.tokens[-1] for beam in [*search.open, *search.open[:1] * fill]]
            if not still:
                return [search.finished for search in searches]
            device = logits.device
            kept = torch.tensor([place for place, index in enumerate(live) if index in set(still)], device=device)
            if rows != list(range(len(live) * width)):
                plan.select(torch.tensor(rows, device=device), kept, width)
            live = still
            assert plan.suffix_positions is not None
            with use(plan):
                at = plan.suffix_length
                ids = torch.tensor(tokens, device=device)[:, None]
                states = self.loaded.states(ids, plan.suffix_positions[:, at : at + 1])
            plan.suffix_length += 1
            logits = self.loaded.logits(states[:, -1])

    def _best(self, logprobs: torch.Tensor, search: Beams, request: Request) -> list[Continuation]:
        """The best continuations of a request's open beams [B, V], best first."""
        scored = logprobs
        if request.repetition_penalty != 1.0:
            seen = torch.zeros_like(logprobs, dtype=torch.bool)
            seen[:, torch.tensor(request.prompt, device=seen.device)] = True
            for at, beam in enumerate(search.open):
                seen[at, torch.tensor(beam.tokens, device=seen.device, dtype=torch.long)] = True
            penalty = torch.full((len(logprobs),), request.repetition_penalty, device=logprobs.device)
            scored = penalise(logprobs, seen, penalty)
        sums = torch.tensor([beam.score for beam in search.open], device=logprobs.device)
        total = (scored + sums[:, None]).flatten()
        values, places = total.topk(min(search.wanted, len(total)))
        own = logprobs.flatten()[places]
        self._check_finite(float(values.sum()), "beam search")
        vocabulary = logprobs.shape[1]
        return [
            Continuation(place // vocabulary, place % vocabulary, value, logprob)
            for place, value, logprob in zip(places.tolist(), values.tolist(), own.tolist(), strict=True)
        ]

    def _next(
        self,
        logits: torch.Tensor,
        slots: Sequence[_Row | None],
        noise: dict[int, Any],
        seen: torch.Tensor | None,
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next token [R] of every slot and its log-probability [R] under the model itself."""
        adjusted = logits
        if seen is not None:
            penalty = torch.tensor([row.penalty if row else 1.0 for row in slots], device=logits.device)
            adjusted = penalise(logits, seen, penalty)
        uniform = torch.tensor([noise[id(row)][step] if row and id(row) in noise else 0.0 for row in slots])
        draws = [row.draw if row else Draw() for row in slots]
        tokens = choose(adjusted, draws, uniform.to(logits.device))
        logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
        return tokens, logprobs

    def _seen(self, slots: Sequence[_Row | None], vocabulary: int) -> torch.Tensor:
        seen = torch.zeros(len(slots), vocabulary, dtype=torch.bool, device=self.loaded.device)
        for at, row in enumerate(slots):
            if row is not None:
                seen[at, torch.tensor(row.prompt, device=seen.device)] = True
        return seen

    def _append(self, row: _Row, token: int, logprob: float) -> None:
        self._check_finite(logprob, f"request {row.request}")
        if token in self.stop_ids:
            row.finish_reason = "stop"
            return
        row.tokens.append(token)
        row.logprob_sum += logprob
        if row.stop and any(stop in self._decode(row.tokens) for stop in row.stop):
            row.finish_reason = "stop"
        elif len(row.tokens) >= row.limit:
            row.finish_reason = "length"

    def _check_finite(self, logprob: float, where: str) -> None:
        if not math.isfinite(logprob):
            raise UsageError(f"{where}: {self.loaded.name} gives non-finite logits in {self.loaded.dtype}; use float32")

    def _decode(self, tokens: Sequence[int], stop: Sequence[str] = ()) -> str:
        return text_until(self.tokenizer, tokens, stop)


def _chunks(lengths: Sequence[int], per_group: int, budget: int) -> Iterator[Chunk]:
    """Rows of like kind that go through the model together: whole groups while they fit, else parts of one group.

    Small passes are faster on a CPU (activations stay in its caches) and pad less: a pass is as wide as its own longest suffix.
    """
    groups = len(lengths) // per_group
    at = 0
    while at < groups:
        end = at + 1
        while end < groups and max(lengths[at * per_group : (end + 1) * per_group]) * (end + 1 - at) * per_group <= budget:
            end += 1
        if end > at + 1 or max(lengths[at * per_group : end * per_group]) * per_group <= budget:
            yield Chunk(slice(at, end), slice(at * per_group, end * per_group), per_group)
        else:
            rows = max(1, budget // max(lengths[at * per_group : end * per_group]))
            for row in range(at * per_group, end * per_group, rows):
                last = min(row + rows, end * per_group)
                yield Chunk(slice(at, end), slice(row, last), last - row)
        at = end


def _compact(slots: Sequence[_Row | None], plan: SharedPrefix) -> tuple[list[_Row | None], torch.Tensor]:
    """Re-pack the slots that are still generating; groups without one disappear. Returns the slots and which were kept [R']."""
    width = plan.rows_per_group
    groups = [
        (g, [g * width + n for n in range(width) if slots[g * width + n] is not None]) for g in range(len(slots) // width)
    ]
    groups = [(group, live) for group, live in groups if live]
    per_group = max(len(live) for _, live in groups)
    kept: list[int] = []
    packed: list[_Row | None] = []
    for _, live in groups:
        filler = per_group - len(live)
        kept += [*live, *[live[0]] * filler]
        packed += [*(slots[at] for at in live), *[None] * filler]
    device = plan.prefix_lengths.device
    index = torch.tensor(kept, device=device)
    plan.select(index, torch.tensor([group for group, _ in groups], device=device), per_group)
    return packed, index


def open_engine(
    folder: Path, dtype: str, device: str, cache_gb: float = 1.5, prefill_tokens: int = 1536, max_context: int | None = None
) -> HFEngine:
    """The engine of a model folder (``configs/engine/hf.yaml``); the model is shared with stages that use the same one."""
    return HFEngine(load(folder, dtype, device), cache_gb, prefill_tokens, max_context)
