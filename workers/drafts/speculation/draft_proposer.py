"""Speculative decoding: draft models propose tokens, and one target pass verifies several per sequence.

Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding (2023),
https://arxiv.org/abs/2211.17192: the distribution of the samples does not change.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ....schemas.errors import OperationError
from ...heads import LogprobHead
from ...lora import Segment
from ...models.model import BaseModel
from ...ops.kv_cache import ContinuationChunk
from ...registry.model_registry import ModelRegistry
from ...sampler.cache.cache import CacheBudget, KVCache, size_of_config
from ...sampler.cache.prefix_cache import StoredRange, num_tokens_of
from ...sampler.rank_sync import RankSync
from ...sampler.requests.jobs import SequenceState
from ...sampler.requests.sequence_table import SequenceTable
from ...sampler.requests.token_choice import (
    DRAFT_STREAM,
    DraftTokens,
    SamplingTensors,
    derive_keys,
    invert_cdf,
    probabilities,
    uniforms,
)
from ...state.trainable import Trainable
from ...state.vectors import FORWARD_VECTORS
from ..model.draft_model import DraftModel
from ..sequences.drafting import TargetStates
from .payoff import DraftPayoff, draft_of


class DraftCaches:
    """Holds one cache per draft, which is freed with the draft."""

    def __init__(self, base: BaseModel, budget: CacheBudget) -> None:
        self._bytes_per_value, self._budget = base.dtype.itemsize, budget
        self._caches: WeakKeyDictionary[DraftModel, KVCache] = WeakKeyDictionary()

    def of(self, draft: DraftModel) -> KVCache:
        """Returns the draft's cache. A token's entry depends on the next token too (num_ahead in PrefixCache)."""
        if draft not in self._caches:
            size = size_of_config(draft.shape.config, self._bytes_per_value)
            self._caches[draft] = KVCache(size, self._budget, num_ahead=1)
        return self._caches[draft]

    def clear(self) -> None:
        self._caches.clear()


@dataclass(eq=False)
class _State:
    """The draft's state of one sequence.

    num_changes: of the draft's weights (see StateVectors) when the sequence was placed.
    num_cached: tokens in the draft's cache.
    pending_features: captured features of the tokens after these, except the newest token, [m, layers * hidden].
    """

    draft: DraftModel
    num_changes: int
    num_cached: int = 0
    pending_features: list[Tensor] = field(default_factory=list)

    @property
    def num_seen(self) -> int:
        """Tokens whose captured features the draft has processed or has waiting."""
        return self.num_cached + sum(map(len, self.pending_features))


class DraftProposer:
    """Implements Proposer (workers/sampler/speculation.py) for the drafts of one sampler."""

    def __init__(
        self, base: BaseModel, models: ModelRegistry, caches: DraftCaches, head: LogprobHead, ranks: RankSync
    ) -> None:
        self._base, self._models, self._ranks = base, models, ranks
        self._head, self._caches = head, caches
        self._served: Collection[str] = ()
        self._states: dict[SequenceState, _State] = {}
        self._payoff = DraftPayoff(base, models)

    def load(self, draft_ids: Iterable[str | None], most: int, held: ExitStack) -> dict[str, bool]:
        wanted = [one for one in dict.fromkeys(draft_ids) if one is not None and one in self._models]
        known = [draft_id for draft_id in wanted if isinstance(self._models.get(draft_id), DraftModel)]
        is_loaded = dict.fromkeys(known[:most], False)
        for draft_id in is_loaded:
            with suppress(OperationError):
                held.enter_context(self._models.resident([draft_id], FORWARD_VECTORS))
                is_loaded[draft_id] = True
        return is_loaded

    def serve(self, draft_ids: Collection[str]) -> None:
        self._served = draft_ids
        for sequence, state in list(self._states.items()):
            if not self.uses_draft(sequence) or self._draft(sequence) is not state.draft:
                self.forget(sequence)

    def uses_draft(self, sequence: SequenceState) -> bool:
        return sequence.job.spec.draft_id in self._served and sequence.may_use_draft

    def num_draft_tokens(self, sequence: SequenceState) -> int:
        """Returns the number of draft tokens per pass; fewer at the end of the sequence."""
        lengths, requested = self._draft(sequence).draft_lengths, sequence.job.spec.num_draft_tokens
        return lengths.default if requested is None else min(requested, lengths.most)

    def num_logits(self, sequence: SequenceState) -> int:
        return 1 + (self.num_draft_tokens(sequence) if self.uses_draft(sequence) else 0)

    def is_ready(self, sequence: SequenceState) -> bool:
        return sequence in self._states and self.uses_draft(sequence)

    def pays(self, sequence: SequenceState, num_sampled: int) -> bool:
        return self._payoff.pays(sequence, num_sampled)

    def may_pay(self, sequence: SequenceState, weight_version: int, num_sampled: int) -> bool:
        return self._payoff.may_pay(sequence, weight_version, num_sampled)

    def captured(self, sequences: Sequence[SequenceState]) -> dict[int, Tensor] | None:
        drafts = [self._states[sequence].draft for sequence in sequences if sequence in self._states]
        layers = {layer for draft in drafts for layer in draft.draft.capture_layers or ()}
        return dict.fromkeys(layers, torch.empty(0)) if layers else None

    def num_bytes(self, sequence: SequenceState, count: int) -> int:
        draft = self._draft(sequence)
        return self._caches.of(draft).num_bytes_for(self._num_cached(sequence, draft, count))

    def place(self, sequence: SequenceState, count: int) -> bool:
        draft = self._draft(sequence)
        if not self._caches.of(draft).allocate(sequence, self._num_cached(sequence, draft, count)):
            return False
        self._states[sequence] = _State(draft, draft.vectors.num_changes)
        return True

    def find_prefix(
        self, sequence: SequenceState, weight_version: int, tokens: np.ndarray, most: int
    ) -> list[StoredRange]:
        draft = self._draft(sequence)
        return self._caches.of(draft).prefixes.find(_draft_weight_version(draft, weight_version), tokens, most)

    def restore(self, sequence: SequenceState, ranges: Sequence[StoredRange]) -> None:
        state = self._states[sequence]
        self._caches.of(state.draft).load_prefix(sequence, ranges)
        state.num_cached = num_tokens_of(ranges)

    def keep(self, sequence: SequenceState, weight_version: int, tokens: np.ndarray) -> None:
        state = self._states.get(sequence)
        if state is not None and state.num_changes == state.draft.vectors.num_changes:
            known = tokens[: state.num_cached + 1]
            self._caches.of(state.draft).store_prefix(
                sequence, _draft_weight_version(state.draft, weight_version), known
            )

    def observe(
        self, sequence: SequenceState, first: int, part: slice, captured: Mapping[int, Tensor], tokens: np.ndarray
    ) -> None:
        state = self._states.get(sequence)
        if state is None or first != state.num_seen:
            self.forget(sequence)
            return
        state.pending_features.append(_features(state.draft, captured, part))
        # The token after the last one may not be known yet.
        known = state.num_seen - state.num_cached - 1
        if known:
            waiting = torch.cat(state.pending_features)
            following = tokens[state.num_cached + 1 : state.num_cached + 1 + known]
            draft_input = self._draft_input([sequence], [waiting[:known]], [following])
            state.draft.network(trains=False).extend_cache(draft_input, self._ends([sequence]))
            state.pending_features = [waiting[known:]]

    def fork(self, leader: SequenceState, others: Sequence[SequenceState]) -> None:
        state = self._states.get(leader)
        placed = [sequence for sequence in others if sequence in self._states]
        if state is None:
            for sequence in placed:
                self.forget(sequence)
            return
        self._caches.of(state.draft).fork(leader, placed)
        for sequence in placed:
            self._states[sequence] = replace(state, pending_features=list(state.pending_features))

    def num_next(self, sequence: SequenceState, count: int) -> int:
        return min(self.num_draft_tokens(sequence), sequence.job.max_new_tokens - count - 1)

    def has_room(self, sequence: SequenceState, count: int) -> bool:
        state = self._states[sequence]
        length, cache = self._num_cached(sequence, state.draft, count), self._caches.of(state.draft)
        return length <= cache.slot_of(sequence).capacity or cache.grow(sequence, length)

    def propose(self, sequences: Sequence[SequenceState], table: SequenceTable) -> dict[SequenceState, DraftTokens]:
        found: dict[SequenceState, DraftTokens] = {}
        by_draft: dict[tuple[DraftModel, int], list[SequenceState]] = {}
        for sequence in sequences:
            draft, num = self._states[sequence].draft, self.num_next(sequence, int(table.count[sequence.line]))
            if num > 0:
                by_draft.setdefault((draft, num), []).append(sequence)
            else:
                found[sequence] = DraftTokens(np.zeros(0, np.int64), torch.zeros(0, 0), draft.vocabulary)
        for (draft, num), group in by_draft.items():
            group = sorted(group, key=lambda sequence: sequence.job.adapter_key)
            found |= zip(group, self._propose_group(draft, group, num, table), strict=True)
        return found

    def accept(self, sequence: SequenceState, part: slice, captured: Mapping[int, Tensor], num: int) -> None:
        state = self._states.get(sequence)
        if state is not None:
            state.pending_features.append(_features(state.draft, captured, slice(part.start, part.start + num + 1)))
            self._payoff.recent_stats(state.draft, sequence.weight_version).add(part.stop - part.start - 1, num)

    def forget(self, sequence: SequenceState) -> None:
        state = self._states.pop(sequence, None)
        if state is None:
            return
        cache = self._caches.of(state.draft)
        cache.free(sequence)
        if not cache.held_bytes():
            cache.free_unused_slots()

    def clear(self) -> None:
        self._states = {}
        self._caches.clear()

    def _num_cached(self, sequence: SequenceState, draft: DraftModel, count: int) -> int:
        """Returns how many tokens the draft's cache holds when it proposes tokens after `count` sampled ones."""
        num = self.num_next(sequence, count)
        return len(sequence.job.prompt) + count - 1 + (draft.draft_lengths.num_ahead(num) if num > 0 else 0)

    def _draft(self, sequence: SequenceState) -> DraftModel:
        return draft_of(sequence, self._models)

    def _propose_group(
        self, draft: DraftModel, sequences: list[SequenceState], num: int, table: SequenceTable
    ) -> list[DraftTokens]:
        waiting = [torch.cat(self._states[sequence].pending_features) for sequence in sequences]
        following = [table.last_tokens(sequence, len(each)) for sequence, each in zip(sequences, waiting, strict=True)]
        sampling = _DraftSampling(draft, sequences, table, self._base.device, self._ranks)
        draft_input = self._draft_input(sequences, waiting, following)
        draft.network(trains=False).propose(draft_input, num, self._ends(sequences), sampling.draw)
        for sequence in sequences:
            self._states[sequence].pending_features = []
        return sampling.draft_tokens()

    def _draft_input(
        self, sequences: Sequence[SequenceState], waiting: Sequence[Tensor], following: Sequence[np.ndarray]
    ) -> TargetStates:
        """Returns input for the draft, and counts it as processed.

        Args:
            waiting: captured features of each sequence.
            following: the token after each of these.
        """
        chunks, start = [], 0
        for sequence, each in zip(sequences, waiting, strict=True):
            state, stop = self._states[sequence], start + len(each)
            slot = self._caches.of(state.draft).slot_of(sequence)
            chunks.append(ContinuationChunk(start, stop, slot.tensors, slot.index, state.num_cached))
            state.num_cached, start = state.num_cached + len(each), stop
        next_tokens = torch.as_tensor(np.concatenate(following), dtype=torch.int64).to(self._base.device)
        return TargetStates(torch.cat(list(waiting)), next_tokens, chunks)

    def _ends(self, sequences: Sequence[SequenceState]) -> "_Ends":
        adapter_ids = [sequence.job.adapter_id for sequence in sequences]
        models = [None if adapter_id is None else self._models.get(adapter_id) for adapter_id in adapter_ids]
        return _Ends(self._base, self._head, models)


@dataclass(frozen=True, eq=False)
class _Ends:
    """Implements TargetEnds. models: the model of each sequence; None is the base model."""

    base: BaseModel
    head: LogprobHead
    models: Sequence[Trainable | None]

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.base.embedded(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        num = hidden.shape[1]
        segments = [Segment(at * num, (at + 1) * num, model) for at, model in enumerate(self.models)]
        return self.head.logits_of_segments(hidden.flatten(0, 1), segments).unflatten(0, (-1, num))


class _DraftSampling:
    """Samples draft tokens, one position of all sequences at a time."""

    def __init__(
        self,
        draft: DraftModel,
        sequences: Sequence[SequenceState],
        table: SequenceTable,
        device: torch.device,
        ranks: RankSync,
    ) -> None:
        lines = np.array([sequence.line for sequence in sequences], dtype=np.int64)
        self._vocabulary, self._ranks = draft.vocabulary, ranks
        with_filters = table.settings(lines)
        none, all_mass = np.zeros_like(with_filters.min_p), np.ones_like(with_filters.top_p)
        # The target applies the filters when it verifies.
        settings = replace(with_filters, min_p=none, top_k=np.zeros_like(with_filters.top_k), top_p=all_mass)
        self._choice = SamplingTensors.of(settings, draft.shape.vocabulary, device)
        self._keys, self._lengths = derive_keys(table.noise_key[lines], DRAFT_STREAM), table.length[lines]
        self._tokens: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        of_draft = probabilities(logits.float(), self._choice)
        noise = torch.from_numpy(uniforms(self._keys, self._lengths + len(self._tokens))).to(of_draft)
        drawn = self._ranks.from_leader(invert_cdf(of_draft, noise[:, None]).squeeze(1))
        self._tokens.append(self._vocabulary[drawn])
        self._probabilities.append(of_draft)
        return self._tokens[-1]

    def draft_tokens(self) -> list[DraftTokens]:
        tokens, of_draft = torch.stack(self._tokens, dim=1).cpu().numpy(), torch.stack(self._probabilities, dim=1)
        return [DraftTokens(row, each, self._vocabulary) for row, each in zip(tokens, of_draft, strict=True)]


def _draft_weight_version(draft: DraftModel, target_version: int) -> int:
    """Returns the weight version of a draft's entries, which depend on its weights and on its target's."""
    return target_version << 32 | draft.vectors.num_changes


def _features(draft: DraftModel, captured: Mapping[int, Tensor], part: slice) -> Tensor:
    return torch.cat([captured[layer][part] for layer in draft.draft.capture_layers or ()], dim=-1)
