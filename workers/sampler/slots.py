"""Gives sequences slots in the KV cache, and in the draft's cache if they use a draft, and finds cached prefixes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch

from ..ops.attention import Packing, pack_lengths
from ..ops.kv_cache import PendingInputs
from .batch import Chunk, Prefill
from .cache.cache import SHORTEST, KVCache
from .cache.prefix_cache import BLOCK, StoredRange, num_tokens_of, truncate
from .requests.jobs import SequenceState
from .requests.sequence_table import SequenceTable
from .shared_state import WeightVersions
from .speculation import Proposer


@dataclass(frozen=True)
class _Place:
    """The first token of a part among the inputs of a pass, and the tokens that the states in its slot stand for."""

    row: int
    num_known: int


class PendingStates:
    """Advances the states in the slots of sequences over the tokens that stay, after a pass with draft tokens.

    Does nothing for models without recurrences.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._inputs: Sequence[PendingInputs] = ()
        self._places: dict[SequenceState, _Place] = {}

    def begin(self, parts: Sequence[Chunk], inputs: Sequence[PendingInputs]) -> None:
        """Takes the inputs of a pass.

        Args:
            parts: all those with draft tokens, in the order of the inputs. Some of their sequences may have ended.
        """
        row = 0
        for part in parts if inputs else ():
            if self._cache.has_slot(part.sequence):
                self._places[part.sequence] = _Place(row, part.start)
            row += part.length
        self._inputs = inputs

    def advance(self, lengths: Mapping[SequenceState, int]) -> None:
        """Computes the states after this many tokens of each sequence. Ignores those that have none pending."""
        counts = {each: lengths[each] - place.num_known for each, place in self._places.items() if each in lengths}
        if counts:
            # Sequences of equal length are one batch.
            self._scan(dict(sorted(counts.items(), key=itemgetter(1))))
            for sequence in counts:
                self.forget(sequence)

    def sequences(self) -> list[SequenceState]:
        return list(self._places)

    def forget(self, sequence: SequenceState) -> None:
        """Leaves the sequence's states as they are. Ignored if it has none pending."""
        self._places.pop(sequence, None)
        if not self._places:
            self._inputs = ()

    def clear(self) -> None:
        self._places, self._inputs = {}, ()

    def _scan(self, counts: Mapping[SequenceState, int]) -> None:
        """Advances the states of each sequence over its first tokens of the pass."""
        firsts = [self._places[sequence].row for sequence in counts]
        rows = [torch.arange(first, first + count) for first, count in zip(firsts, counts.values(), strict=True)]
        slots = [self._cache.slot_of(sequence) for sequence in counts]
        packing, own = Packing(pack_lengths(list(counts.values()))), torch.cat(rows)
        for each in self._inputs:
            kind, device = each.op.state, each.inputs[0].device
            before = [slot.tensors.states(kind, device)[slot.index] for slot in slots]
            inputs = [x[own.to(device)] for x in each.inputs]
            _, after = each.op.scan(inputs, packing, torch.stack(before))
            for state, new in zip(before, after, strict=True):
                state.copy_(new)


@dataclass(frozen=True)
class CachedPrefix:
    """The beginning of a sequence in the prefix caches. of_draft: empty without a draft, else of the same tokens."""

    of_model: Sequence[StoredRange]
    of_draft: Sequence[StoredRange]

    @property
    def num_tokens(self) -> int:
        return num_tokens_of(self.of_model)


class SequenceSlots:
    """The slots of one sampler's sequences. Other samplers may share the caches.

    proposer: None without drafts.
    pending: the states that a pass with draft tokens leaves behind.
    """

    def __init__(self, cache: KVCache, proposer: Proposer | None, weight_versions: WeightVersions) -> None:
        self.cache, self.pending = cache, PendingStates(cache)
        self.proposer, self.weight_versions = proposer, weight_versions

    def is_drafting(self, sequence: SequenceState) -> bool:
        """True if the sequence uses a draft and has a slot in the draft's cache."""
        return self.proposer is not None and self.proposer.is_ready(sequence)

    def num_logits(self, sequence: SequenceState) -> int:
        """Returns how many rows of logits one pass computes for the sequence."""
        return 1 if self.proposer is None else self.proposer.num_logits(sequence)

    def new_prefill(self, sequence: SequenceState, num_admitted: int, budget: int) -> Prefill | None:
        """Gives the sequence its slots, with its longest cached prefix. Returns None if there is no room.

        Args:
            num_admitted: other sequences of this sampler that have slots.
            budget: the most tokens that run in one pass.
        """
        weight_version = self.weight_versions.of(sequence.job)
        proposer = self._choose_proposer(sequence, weight_version, 1 + num_admitted)
        # With a draft, the newest token runs together with the next draft tokens.
        samples_next = proposer is None or not len(sequence.tokens)
        tokens = sequence.token_ids() if samples_next else sequence.token_ids()[:-1]
        prefix = self._find_prefix(sequence, proposer, weight_version, tokens)
        # Tokens that exceed the budget run in chunks; those that exceed the whole cache run in one pass, uncached.
        is_long = len(tokens) - prefix.num_tokens > budget and self.cache.fits_alone(len(tokens))
        needs_slot = sequence.needs_cache or is_long
        cached = (needs_slot or bool(prefix.num_tokens)) and self._place(sequence, proposer, is_alone=not num_admitted)
        if needs_slot and not cached:
            return None
        if cached:
            if prefix.of_model:
                self.cache.load_prefix(sequence, prefix.of_model)
            if self.proposer is not None and prefix.of_draft:
                self.proposer.restore(sequence, prefix.of_draft)
        prefill = Prefill([sequence], tokens, cached, weight_version, prefix.num_tokens if cached else 0, samples_next)
        prefill.borders = self._borders(prefill, proposer)
        if sequence.job.num_cache_hits is None:
            sequence.job.num_cache_hits = prefill.computed
        return prefill

    def join_prefill(self, prefill: Prefill, sequence: SequenceState, num_admitted: int) -> bool:
        """Gives slots to another sequence that continues from the tokens. Returns False if there is no room."""
        sequence.without_draft |= prefill.sequences[0].without_draft
        proposer = self._choose_proposer(sequence, prefill.weight_version, 1 + num_admitted)
        if sequence.needs_cache and not self._place(sequence, proposer, is_alone=not num_admitted):
            return False
        prefill.sequences.append(sequence)
        return True

    def grow(self, sequence: SequenceState, length: int) -> bool:
        """Moves the sequence to a slot for `length` tokens. Returns False if there is no room."""
        return self.cache.grow(sequence, _with_headroom(sequence, length)) or self.cache.grow(sequence, length)

    def has_room_to_draft(self, sequence: SequenceState, table: SequenceTable) -> bool:
        """True if both slots have room for the next draft tokens; grows them if necessary."""
        proposer = self.proposer
        assert proposer is not None
        count = int(table.count[sequence.line])
        length = int(table.length[sequence.line]) + proposer.num_next(sequence, count)
        has_room = length <= self.cache.slot_of(sequence).capacity or self.grow(sequence, length)
        return has_room and proposer.has_room(sequence, count)

    def fork(self, leader: SequenceState, others: Sequence[SequenceState], cached: bool) -> None:
        """Copies the leader's slots to others that continue from the same tokens. cached: whether they have slots."""
        others = [sequence for sequence in others if sequence.needs_cache]
        if cached:
            self.cache.fork(leader, others)
        if self.proposer is not None:
            self.proposer.fork(leader, others)

    def store_prefix(self, sequence: SequenceState, weight_version: int, tokens: np.ndarray) -> None:
        """Stores the sequence in the prefix caches, unless the weights have changed since.

        Args:
            tokens: int64. The states that are in the slot or pending must be those after them.
        """
        if weight_version == self.weight_versions.of(sequence.job):
            self.pending.advance({sequence: len(tokens)})
            self.cache.store_prefix(sequence, weight_version, tokens)
        self.store_draft_prefix(sequence, weight_version, tokens)

    def store_draft_prefix(self, sequence: SequenceState, weight_version: int, tokens: np.ndarray) -> None:
        """Stores the sequence in the draft's prefix cache, unless the weights have changed since."""
        if self.proposer is not None and weight_version == self.weight_versions.of(sequence.job):
            self.proposer.keep(sequence, weight_version, tokens)

    def store_chunk(self, chunk: Chunk, prefill: Prefill) -> None:
        """Stores a prefill of which a chunk has run.

        Without states after its last chunk; else at its borders, and after chunks whose keys and values need more
        memory than the states.
        """
        tokens = prefill.tokens[: chunk.stop]
        is_large = chunk.length * self.cache.size.bytes_per_token > self.cache.size.bytes_per_sequence
        is_stored = chunk.stop in prefill.borders or is_large if self.cache.has_states else chunk.is_last
        if is_stored and prefill.cached:
            self.store_prefix(chunk.sequence, prefill.weight_version, tokens)
        elif chunk.is_last:
            self.store_draft_prefix(chunk.sequence, prefill.weight_version, tokens)

    def advance_states(self, table: SequenceTable) -> None:
        """Computes the states that are pending, after all tokens but the newest."""
        if sequences := self.pending.sequences():
            self.pending.advance({each: int(table.length[each.line]) - 1 for each in sequences})

    def stop_drafting(self, sequence: SequenceState, table: SequenceTable) -> None:
        """Frees the draft's slot of a sequence that continues without it. The draft's prefix cache keeps the tokens."""
        table.copy_to(sequence)
        self.store_draft_prefix(sequence, sequence.weight_version, sequence.token_ids())
        self._forget_draft(sequence)

    def free(self, sequence: SequenceState) -> None:
        self.cache.free(sequence)
        self.pending.forget(sequence)
        self._forget_draft(sequence)

    def clear(self) -> None:
        self.cache.clear()
        self.pending.clear()
        if self.proposer is not None:
            self.proposer.clear()

    def _choose_proposer(self, sequence: SequenceState, weight_version: int, num_sampled: int) -> Proposer | None:
        """Returns the proposer if the sequence uses a draft from its first sampled token on.

        It decodes without the draft if both exceed an empty cache or it has not paid off lately.

        Args:
            num_sampled: sequences in a pass, with this one.
        """
        proposer = self.proposer
        if proposer is None or not (sequence.needs_cache and proposer.uses_draft(sequence)):
            return None
        of_draft = proposer.num_bytes(sequence, _next_count(sequence))
        of_model = self.cache.num_bytes_for(_length_to_draft(sequence, proposer))
        is_too_large = of_model + of_draft > self.cache.budget_bytes
        sequence.without_draft = is_too_large or not proposer.may_pay(sequence, weight_version, num_sampled)
        return None if sequence.without_draft else proposer

    def _place(self, sequence: SequenceState, proposer: Proposer | None, is_alone: bool) -> bool:
        """Gives the sequence its slots. Returns False if there is no room.

        Args:
            is_alone: no other sequence is admitted. Only then is a tight slot given: else it would soon be preempted
                again.
        """
        length, tight = sequence.length, sequence.length + 1
        if proposer is not None:
            length = tight = _length_to_draft(sequence, proposer)
        for wanted in [_with_headroom(sequence, length), *([tight] if is_alone else [])]:
            if self.cache.allocate(sequence, wanted):
                if proposer is None or proposer.place(sequence, _next_count(sequence)):
                    return True
                self.cache.free(sequence)
        return False

    def _find_prefix(
        self, sequence: SequenceState, proposer: Proposer | None, weight_version: int, tokens: np.ndarray
    ) -> CachedPrefix:
        """Returns the longest cached prefix of `tokens`, int64. The last token must always run."""
        # A sequence that has sampled tokens has had its prompt scored.
        most = min(len(tokens) - 1, sequence.job.num_reusable + len(sequence.tokens))
        of_model = self.cache.prefixes.find(weight_version, tokens, most)
        if proposer is None:
            return CachedPrefix(of_model, ())
        # Both must start at the same token: the draft needs the target's hidden states of all later ones. The draft can
        # start at any token, but the model, if it has states, only where they were stored.
        of_draft = proposer.find_prefix(sequence, weight_version, tokens, most)
        if num_tokens_of(of_draft) < num_tokens_of(of_model):
            of_model = self.cache.prefixes.find(weight_version, tokens, num_tokens_of(of_draft))
        return CachedPrefix(of_model, truncate(of_draft, num_tokens_of(of_model)))

    def _borders(self, prefill: Prefill, proposer: Proposer | None) -> tuple[int, ...]:
        """Returns after how many tokens of a prompt the model's states will be stored; empty if it has none.

        One border is before the last token, which must always run, so that the same prompt starts there. The other is
        after the blocks that the prompt shares with earlier ones, so that later ones with the same blocks start there.
        """
        if not (self.cache.has_states and prefill.cached) or len(prefill.sequences[0].tokens):
            return ()
        last = len(prefill.tokens) - 1
        if proposer is not None:
            last = last // BLOCK * BLOCK  # the draft's prefixes end with a block
        known = self.cache.prefixes.known_blocks(prefill.weight_version, prefill.tokens[:last])
        return tuple(sorted({border for border in (num_tokens_of(known), last) if border > prefill.computed}))

    def _forget_draft(self, sequence: SequenceState) -> None:
        if self.proposer is not None:
            self.proposer.forget(sequence)


def _length_to_draft(sequence: SequenceState, proposer: Proposer) -> int:
    """Returns how many tokens the cache must hold for the next draft tokens."""
    count = _next_count(sequence)
    return len(sequence.job.prompt) + count + proposer.num_next(sequence, count)


def _with_headroom(sequence: SequenceState, length: int) -> int:
    """Adds spare tokens, so that the slot need not grow again at once."""
    return max(length, min(length + SHORTEST, sequence.longest_cached))


def _next_count(sequence: SequenceState) -> int:
    """Returns the number of sampled tokens before the next draft tokens. The first token is sampled without them."""
    return max(1, len(sequence.tokens))
