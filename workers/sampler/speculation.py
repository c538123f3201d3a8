"""Speculative decoding: draft models propose tokens, and one target pass verifies several per sequence.

Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding (2023),
https://arxiv.org/abs/2211.17192: the distribution of the samples does not change.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..drafts.draft_model import DraftModel
from ..drafts.sequences.drafting import TargetStates
from ..heads import LogprobHead
from ..lora import Segment
from ..models.model import BaseModel
from ..ops.kv_cache import ContinuationChunk
from ..registry.model_registry import ModelRegistry
from ..state.trainable import Trainable
from .cache.draft_caches import DraftCaches
from .cache.prefix_cache import BlockRange, num_tokens_of
from .logits.noise import ACCEPT_STREAM, DRAFT_STREAM, derive_keys, uniforms
from .logits.token_choice import SamplingSettings, SamplingTensors, invert_cdf, probabilities
from .rank_sync import RankSync, VerifyResult
from .requests.jobs import AcceptanceStats, SequenceState
from .requests.sequence_table import SequenceTable

# Passes before statistics count; and before the statistics of a draft start over.
_PASSES_TO_JUDGE_BY, _PASSES_TO_REMEMBER = 8, 128
# One of this many jobs uses its draft even if that has not paid off lately, since it may by now.
_JOBS_FOR_A_TRIAL = 8
_MOST_REMEMBERED = 1000

# Number of tokens at which a pass takes about as long to compute as to read the weights, by device type.
_TOKENS_FOR_WEIGHTS = {"cpu": 9, "cuda": 150}


@dataclass(frozen=True, eq=False)
class DraftTokens:
    """Draft tokens.

    tokens: int64, [k].
    probabilities: the draft's probability of each token of its vocabulary, float32, [k, V]; None if there are no
    tokens.
    """

    tokens: np.ndarray
    probabilities: Tensor | None


@dataclass(eq=False)
class _State:
    """The draft's state of one sequence.

    num_changes: the draft's weight version (see Trainable) when the sequence was placed.
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


class SpeculativeDecoder:
    """The drafts of one sampler.

    A sequence uses its draft from its prefill on, as long as the draft's cache has room: the draft needs the captured
    features of all tokens.
    """

    def __init__(
        self, base: BaseModel, models: ModelRegistry, head: LogprobHead, together: RankSync, caches: DraftCaches
    ) -> None:
        self._base, self._models, self._together = base, models, together
        self._head, self._caches = head, caches
        self._served: Collection[str] = ()
        self._states: dict[SequenceState, _State] = {}
        self._fared: WeakKeyDictionary[DraftModel, dict[int, AcceptanceStats]] = WeakKeyDictionary()

    def serve(self, draft_ids: Collection[str]) -> None:
        """Uses these drafts, which are on the device, from now on.

        Sequences of other drafts stop using them: they would miss captured features.
        """
        self._served = draft_ids
        for row, state in list(self._states.items()):
            if not self.uses_draft(row) or self._draft(row) is not state.draft:
                self.forget(row)

    def uses_draft(self, row: SequenceState) -> bool:
        """True if the sequence's draft is available and should be used for it."""
        return row.job.request.draft_id in self._served and may_use_draft(row)

    def pays(self, row: SequenceState, num_sampled: int) -> bool:
        """True if enough draft tokens are accepted for the cost of verifying them.

        If the client gave the seed, only the sequence's own draft tokens count, as if it were sampled alone. So a seed
        gives the same tokens regardless of other requests and of the speed of the machine.

        Args:
            num_sampled: sequences in a pass. The more there are, the less compute is spare.
        """
        if not row.job.request.seed_is_drawn:
            return row.draft_stats.num_passes % _PASSES_TO_JUDGE_BY != 0 or self._seems_to_pay(row, row.draft_stats, 1)
        is_seen = row.draft_stats.num_passes >= _PASSES_TO_JUDGE_BY
        guessed = row.draft_stats if is_seen else self._recent_stats(self._draft(row), row.namespace)
        return self._seems_to_pay(row, guessed, num_sampled)

    def may_pay(self, row: SequenceState, namespace: int, num_sampled: int) -> bool:
        """Like `pays`, for a sequence that has no draft tokens yet. Always true if nothing else is sampled.

        Args:
            namespace: of the sampled weights.
        """
        if num_sampled == 1 or not row.job.request.seed_is_drawn or row.job.seed % _JOBS_FOR_A_TRIAL == 0:
            return True
        return self._seems_to_pay(row, self._recent_stats(self._draft(row), namespace), num_sampled)

    def _seems_to_pay(self, row: SequenceState, guessed: AcceptanceStats, num_sampled: int) -> bool:
        """Judges by `guessed`. True if that has too few passes."""
        if guessed.num_passes < _PASSES_TO_JUDGE_BY:
            return True
        draft = self._draft(row)
        num = guessed.num_draft_tokens / guessed.num_passes
        of_draft = draft.draft_lengths.num_passes(num) * draft.layout.num_weights / self._base.num_parameters
        to_check = num_sampled / (num_sampled + _TOKENS_FOR_WEIGHTS[self._base.device.type])
        return guessed.acceptance_length >= 1 + of_draft + num * to_check

    def num_draft_tokens(self, row: SequenceState) -> int:
        """Returns the number of draft tokens per pass; fewer at the end of the sequence."""
        lengths, requested = self._draft(row).draft_lengths, row.job.request.num_draft_tokens
        return lengths.default if requested is None else min(requested, lengths.most)

    def is_ready(self, row: SequenceState) -> bool:
        return row in self._states and self.uses_draft(row)

    def captured(self, rows: Sequence[SequenceState]) -> dict[int, Tensor] | None:
        """Returns the layers to capture in a pass with these sequences: see BaseModel.hidden_states."""
        drafts = [self._states[row].draft for row in rows if row in self._states]
        layers = {layer for draft in drafts for layer in draft.draft.capture_layers or ()}
        return dict.fromkeys(layers, torch.empty(0)) if layers else None

    def num_bytes(self, row: SequenceState, count: int) -> int:
        """Returns the bytes that the draft's cache needs after `count` sampled tokens."""
        draft = self._draft(row)
        return self._caches.of(draft).num_bytes_for(self._num_cached(row, draft, count))

    def place(self, row: SequenceState, count: int) -> bool:
        """Gives the sequence a slot in the draft's cache. The draft must then get the features of all its tokens."""
        draft = self._draft(row)
        if not self._caches.of(draft).allocate(row, self._num_cached(row, draft, count)):
            return False
        self._states[row] = _State(draft, draft.vectors.num_changes)
        return True

    def find_prefix(self, row: SequenceState, namespace: int, sequence: np.ndarray, most: int) -> list[BlockRange]:
        """Returns the longest prefix in the draft's prefix cache, at most `most` tokens long.

        Args:
            namespace: of the sampled weights.
            sequence: int64.
        """
        draft = self._draft(row)
        return self._caches.of(draft).prefixes.find(_draft_weight_version(draft, namespace), sequence, most)

    def restore(self, row: SequenceState, stretches: Sequence[BlockRange]) -> None:
        """Fills the draft's slot with a cached prefix. The draft then needs the features of later tokens only."""
        state = self._states[row]
        self._caches.of(state.draft).load_prefix(row, stretches)
        state.num_cached = num_tokens_of(stretches)

    def keep(self, row: SequenceState, namespace: int, sequence: np.ndarray) -> None:
        """Stores the tokens that the draft has processed, of `sequence` int64, in its prefix cache."""
        state = self._states.get(row)
        if state is not None and state.num_changes == state.draft.vectors.num_changes:
            known = sequence[: state.num_cached + 1]
            self._caches.of(state.draft).store_prefix(row, _draft_weight_version(state.draft, namespace), known)

    def observe(
        self, row: SequenceState, first: int, part: slice, captured: Mapping[int, Tensor], sequence: np.ndarray
    ) -> None:
        """Gives the draft the captured features of tokens of `sequence` (int64) that have run, from position `first`
        on.

        If the draft missed earlier ones, the sequence stops using it.
        """
        state = self._states.get(row)
        if state is None or first != state.num_seen:
            self.forget(row)
            return
        state.pending_features.append(_features(state.draft, captured, part))
        # The token after the last one may not be known yet.
        known = state.num_seen - state.num_cached - 1
        if known:
            waiting = torch.cat(state.pending_features)
            following = sequence[state.num_cached + 1 : state.num_cached + 1 + known]
            told = self._draft_input([row], [waiting[:known]], [following])
            state.draft.network(trains=False).extend_cache(told, self._ends([row]))
            state.pending_features = [waiting[known:]]

    def fork(self, leader: SequenceState, others: Sequence[SequenceState]) -> None:
        """Copies the state to other sequences, which have slots and continue from the same tokens."""
        state = self._states.get(leader)
        placed = [row for row in others if row in self._states]
        if state is None:
            for row in placed:
                self.forget(row)
            return
        self._caches.of(state.draft).fork(leader, placed)
        for row in placed:
            self._states[row] = replace(state, pending_features=list(state.pending_features))

    def num_next(self, row: SequenceState, count: int) -> int:
        """Returns the number of draft tokens after `count` sampled ones. The last token is never a draft token."""
        return min(self.num_draft_tokens(row), row.job.max_new_tokens - count - 1)

    def has_room(self, row: SequenceState, count: int) -> bool:
        """True if the draft's slot has room for draft tokens after `count` sampled ones; grows it if necessary."""
        state = self._states[row]
        length, cache = self._num_cached(row, state.draft, count), self._caches.of(state.draft)
        seat = cache.slot_of(row)
        assert seat is not None
        return length <= seat.capacity or cache.grow(row, length)

    def propose(self, rows: Sequence[SequenceState], table: SequenceTable) -> dict[SequenceState, DraftTokens]:
        """Proposes draft tokens for each sequence. All must have room."""
        found: dict[SequenceState, DraftTokens] = {}
        by_draft: dict[tuple[DraftModel, int], list[SequenceState]] = {}
        for row in rows:
            num = self.num_next(row, int(table.count[row.table_row]))
            if num > 0:
                by_draft.setdefault((self._states[row].draft, num), []).append(row)
            else:
                found[row] = DraftTokens(np.zeros(0, np.int64), None)
        for (draft, num), together in by_draft.items():
            together = sorted(together, key=lambda row: row.job.adapter_key)
            found |= zip(together, self._propose_group(draft, together, num, table), strict=True)
        return found

    def accept(self, row: SequenceState, part: slice, captured: Mapping[int, Tensor], num: int) -> None:
        """Records that `num` draft tokens were accepted.

        Args:
            part: where the newest token and the draft tokens ran.
        """
        state = self._states.get(row)
        if state is not None:
            state.pending_features.append(_features(state.draft, captured, slice(part.start, part.start + num + 1)))
            self._recent_stats(state.draft, row.namespace).add(part.stop - part.start - 1, num)

    def vocabulary(self, row: SequenceState) -> Tensor:
        """Returns the tokens that the draft can propose, int64, ascending."""
        return self._states[row].draft.vocabulary

    def forget(self, row: SequenceState) -> None:
        """Stops using a draft for the sequence. Ignored if it uses none."""
        state = self._states.pop(row, None)
        if state is None:
            return
        cache = self._caches.of(state.draft)
        cache.free(row)
        if not cache.held_bytes():
            cache.free_unused_slots()

    def clear(self) -> None:
        self._states = {}
        self._caches.clear()

    def _num_cached(self, row: SequenceState, draft: DraftModel, count: int) -> int:
        """Returns how many tokens the draft's cache holds when it proposes tokens after `count` sampled ones."""
        num = self.num_next(row, count)
        return len(row.job.prompt) + count - 1 + (draft.draft_lengths.num_ahead(num) if num > 0 else 0)

    def _recent_stats(self, draft: DraftModel, namespace: int) -> AcceptanceStats:
        """Returns the draft's recent statistics, kept per namespace so that tenants learn nothing of each other."""
        fared = self._fared.setdefault(draft, {})
        if namespace not in fared or fared[namespace].num_passes >= _PASSES_TO_REMEMBER:
            if len(fared) > _MOST_REMEMBERED:
                fared.clear()
            fared[namespace] = AcceptanceStats()
        return fared[namespace]

    def _draft(self, row: SequenceState) -> DraftModel:
        draft_id = row.job.request.draft_id
        assert draft_id is not None
        return self._models.draft(draft_id)

    def _propose_group(
        self, draft: DraftModel, rows: list[SequenceState], num: int, table: SequenceTable
    ) -> list[DraftTokens]:
        waiting = [torch.cat(self._states[row].pending_features) for row in rows]
        following = [table.last_tokens(row, len(each)) for row, each in zip(rows, waiting, strict=True)]
        drawing = _DraftSampling(draft, rows, table, self._base.device, self._together)
        told = self._draft_input(rows, waiting, following)
        draft.network(trains=False).propose(told, num, self._ends(rows), drawing.draw)
        for row in rows:
            self._states[row].pending_features = []
        return drawing.guesses()

    def _draft_input(
        self, rows: Sequence[SequenceState], waiting: Sequence[Tensor], following: Sequence[np.ndarray]
    ) -> TargetStates:
        """Returns input for the draft, and counts it as processed.

        Args:
            waiting: captured features of each sequence.
            following: the token after each of these.
        """
        chunks, start = [], 0
        for row, each in zip(rows, waiting, strict=True):
            state, stop = self._states[row], start + len(each)
            chunks.append(self._chunk(row, start, stop, state.num_cached))
            state.num_cached, start = state.num_cached + len(each), stop
        return TargetStates(torch.cat(list(waiting)), self._tensor(np.concatenate(following)), chunks)

    def _ends(self, rows: Sequence[SequenceState]) -> "_Ends":
        return _Ends(self._base, self._head, [self._model(row) for row in rows])

    def _model(self, row: SequenceState) -> Trainable | None:
        """Returns the sampled adapter or model; None for the base model."""
        return None if row.job.adapter_id is None else self._models.get(row.job.adapter_id)

    def _chunk(self, row: SequenceState, start: int, stop: int, cached: int) -> ContinuationChunk:
        seat = self._caches.of(self._states[row].draft).slot_of(row)
        assert seat is not None
        return ContinuationChunk(start, stop, seat.shelf, seat.slot, cached)

    def _tensor(self, integers: np.ndarray) -> Tensor:
        return torch.as_tensor(integers, dtype=torch.int64).to(self._base.device)


class _DraftSampling:
    """Samples draft tokens, one position of all sequences at a time."""

    def __init__(
        self,
        draft: DraftModel,
        rows: Sequence[SequenceState],
        table: SequenceTable,
        device: torch.device,
        together: RankSync,
    ) -> None:
        lines = np.array([row.table_row for row in rows], dtype=np.int64)
        self._vocabulary, self._together = draft.vocabulary, together
        self._choice = SamplingTensors.of(_without_filters(table.settings(lines)), draft.shape.vocabulary, device)
        self._keys, self._lengths = derive_keys(table.noise_key[lines], DRAFT_STREAM), table.length[lines]
        self._tokens: list[Tensor] = []
        self._chances: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        of_draft = probabilities(logits.float(), self._choice)
        noise = torch.from_numpy(uniforms(self._keys, self._lengths + len(self._tokens))).to(of_draft)
        drawn = self._together.from_leader(invert_cdf(of_draft, noise[:, None]).squeeze(1))
        self._tokens.append(self._vocabulary[drawn])
        self._chances.append(of_draft)
        return self._tokens[-1]

    def guesses(self) -> list[DraftTokens]:
        tokens, of_rows = torch.stack(self._tokens, dim=1).cpu().numpy(), torch.stack(self._chances, dim=1)
        return [DraftTokens(row, each) for row, each in zip(tokens, of_rows, strict=True)]


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


def may_use_draft(row: SequenceState) -> bool:
    """True if the sequence's parameters allow a draft, and draft tokens pay off."""
    return not (row.needs_processors or row.without_draft)


def verify(guesses: DraftTokens, target: Tensor, vocabulary: Tensor, key: np.uint64, length: int) -> VerifyResult:
    """Accepts or rejects draft tokens by rejection sampling.

    Args:
        target: the target model's probabilities at each draft token and after the last, float32, [k + 1, V].
        vocabulary: the tokens that the draft can propose, int64.
        length: of the sequence before the draft tokens.
    """
    num = len(guesses.tokens)
    positions = length + np.arange(num + 1)
    accept = uniforms(derive_keys(np.array([key]), ACCEPT_STREAM), positions[:num])
    tokens = torch.from_numpy(guesses.tokens).to(target.device)
    number = 0
    if num:
        assert guesses.probabilities is not None
        target_version = target[torch.arange(num, device=target.device), tokens]
        of_draft = guesses.probabilities.gather(1, torch.searchsorted(vocabulary, tokens)[:, None]).squeeze(1)
        # The negation rejects NaN as well.
        wrong = np.flatnonzero(~(accept * of_draft.cpu().numpy() < target_version.cpu().numpy()))
        number = int(wrong[0]) if len(wrong) else num
    left = target[number]
    if number < num:
        assert guesses.probabilities is not None
        left = left.index_add(0, vocabulary, guesses.probabilities[number].to(left.dtype), alpha=-1).clamp_(min=0)
        left = left if float(left.sum()) > 0 else target[number]
    noise = uniforms(np.array([key]), positions[number : number + 1])
    token = invert_cdf(left[None], torch.from_numpy(noise).to(left)[:, None])
    return VerifyResult(number, int(token))


def _draft_weight_version(draft: DraftModel, of_target: int) -> int:
    """Returns the namespace of a draft's entries: they depend on its weights and on its target's."""
    return of_target << 32 | draft.vectors.num_changes


def _features(draft: DraftModel, captured: Mapping[int, Tensor], part: slice) -> Tensor:
    return torch.cat([captured[layer][part] for layer in draft.draft.capture_layers or ()], dim=-1)


def _without_filters(settings: SamplingSettings) -> SamplingSettings:
    """Removes the filters: the target applies them when it verifies."""
    nothing = np.zeros_like(settings.min_p)
    return SamplingSettings(settings.temperature, nothing, np.zeros_like(settings.top_k), np.ones_like(settings.top_p))
