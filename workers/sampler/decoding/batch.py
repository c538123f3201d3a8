"""The next forward pass of the sampler, as one packed row.

First one token of every sequence that decodes, then chunks of prompts whose beginning is cached, then prompts that
start at their first token. In each part tokens of the same adapter are adjacent; in the last, prompts of equal length
too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ...ops.attention import Packing, pack_lengths
from ...ops.kernels import PrefixGroups
from ...ops.kv_cache import CachedRow, ContinuationChunk, DecodeStep, NewSequences
from ..cache.cache import CacheSlot, KVCache, SlotPool
from ..requests.jobs import Job, SequenceState
from ..requests.sequence_table import SequenceTable


@dataclass(eq=False)
class Prefill:
    """Tokens to run before sampling, of which `computed` are in the cache, and the sequences that continue from them.

    sequences: the first one's slot stores the tokens; without `cached` none has a slot.
    weight_version: see PrefixCache.
    samples_next: whether the next token is sampled at the end of the prefill.
    borders: numbers of tokens, ascending, after which a pass ends so that the states there can be stored.
    """

    sequences: list[SequenceState]
    tokens: np.ndarray
    cached: bool
    weight_version: int
    computed: int = 0
    samples_next: bool = True
    borders: Sequence[int] = ()

    @property
    def job(self) -> Job:
        return self.sequences[0].job

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def until_border(self) -> int:
        """The most tokens of its next pass."""
        return next((border for border in self.borders if border > self.computed), len(self.tokens)) - self.computed

    def matches(self, sequence: SequenceState) -> bool:
        """True if the sequence has sampled nothing yet and continues from the same tokens."""
        is_prompt = self.samples_next and len(self.tokens) == len(self.job.prompt)
        return is_prompt and sequence.job is self.job and not len(sequence.tokens)


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens start:stop of a prefill."""

    prefill: Prefill
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> np.ndarray:
        return self.prefill.tokens[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prefill.tokens)

    @property
    def sequence(self) -> SequenceState:
        """The sequence whose slot stores the tokens, if it has one."""
        return self.prefill.sequences[0]

    @property
    def cached(self) -> bool:
        return self.prefill.cached


@dataclass(frozen=True, eq=False)
class DraftTokensPart:
    """The newest token of a sequence and the draft tokens after it.

    start: the position of the newest token.
    tokens: int64, [1 + draft tokens].
    """

    sequence: SequenceState
    start: int
    tokens: np.ndarray
    cached: bool = True

    @classmethod
    def of(cls, sequence: SequenceState, proposed: np.ndarray, table: SequenceTable) -> "DraftTokensPart":
        """Returns the part for the proposed tokens, int64, [draft tokens]."""
        tokens = np.concatenate([[table.newest[sequence.line]], proposed])
        return cls(sequence, int(table.length[sequence.line]) - 1, tokens)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _PoolMembers:
    """The decoding sequences in one slot pool: their indices among all that decode, and their slots."""

    pool: SlotPool
    members: np.ndarray
    rows: slice | Tensor
    slots: Tensor
    in_order: bool
    num_slots: int
    groups: PrefixGroups


@dataclass(frozen=True)
class AdapterSpan:
    """Adjacent tokens of the packed row, or rows of logits, of one adapter."""

    adapter_id: str | None
    length: int


def adapter_spans(lengths: Iterable[tuple[str | None, int]]) -> list[AdapterSpan]:
    """Merges adjacent lengths of the same adapter."""
    return [
        AdapterSpan(adapter_id, sum(length for _, length in part))
        for adapter_id, part in groupby(lengths, key=lambda pair: pair[0])
    ]


class DecodeBatch:
    """The sequences that decode one token each, in the order of the packed row.

    lines: theirs in the table, int64, [n].
    adapter_spans: of their tokens.

    Valid until a sequence joins, leaves or moves to another slot.
    """

    def __init__(
        self, sequences: Sequence[SequenceState], cache: KVCache, device: torch.device, num_threads: int
    ) -> None:
        places = {}
        for sequence in sequences:
            slot = cache.slot_of(sequence)
            assert slot is not None
            places[sequence] = sequence.job.adapter_key, slot.capacity, slot.index
        self.sequences = sorted(sequences, key=places.__getitem__)
        self.lines = np.array([sequence.line for sequence in self.sequences], dtype=np.int64)
        self.adapter_spans = adapter_spans((sequence.job.adapter_id, 1) for sequence in self.sequences)
        self._keys = [(sequence.job.adapter_id, places[sequence][1]) for sequence in self.sequences]
        self._capacities = np.array([capacity for _, capacity in self._keys])
        self._device, self._num_threads = device, num_threads
        self._cache, self._num_moves = cache, cache.num_moves
        self._pool_members = list(self._by_pool(cache))

    @property
    def has_moved(self) -> bool:
        """True if any sequence of the cache, of these or of others, has moved."""
        return self._cache.num_moves != self._num_moves

    def pools_of(self, rows: np.ndarray) -> Sequence[SlotPool]:
        """Returns the pools with slots of these rows, bool [n]."""
        return [part.pool for part in self._pool_members if rows[part.members].any()]

    def steps_left(self, table: SequenceTable) -> np.ndarray:
        """Returns after how many steps each sequence reaches its token limit or the end of its slot, int64, [n]."""
        tokens = table.limit[self.lines] - table.count[self.lines] - 1
        return np.minimum(tokens, self._capacities - table.length[self.lines])

    def rows_for(self, other: "DecodeBatch") -> np.ndarray | None:
        """Returns places in this batch for the sequences of the other one, int64, [n], each of the same adapter and
        slot length; None if there are too few."""
        free: dict[tuple[str | None, int], list[int]] = {}
        for place, key in enumerate(self._keys):
            free.setdefault(key, []).append(place)
        places = [members.pop() for key in other._keys if (members := free.get(key))]
        return np.array(places, np.int64) if len(places) == len(other.lines) else None

    def place(self, steps: Sequence[DecodeStep], other: "DecodeBatch", rows: np.ndarray, lengths: np.ndarray) -> None:
        """Changes the steps of this batch to the sequences of the other one, in these rows.

        Args:
            lengths: cached tokens of each row's sequence, int64 [all rows]. The other rows get a slot that is unused.
        """
        slots = np.full(len(self.lines), -1)
        slots[rows] = [other._slot_of(sequence).index for sequence in other.sequences]
        for part, step in zip(self._pool_members, steps, strict=True):
            own = slots[part.members]
            step.slots.copy_(torch.from_numpy(np.where(own < 0, part.pool.tensors.num_slots - 1, own)))
            step.lengths.copy_(torch.from_numpy(lengths[part.members]))
            step.span = int(lengths[part.members].max()) + 1

    def outgrown(self, table: SequenceTable) -> list[SequenceState]:
        """Returns the sequences whose slot has no room for the next token, the oldest first."""
        full = np.flatnonzero(table.length[self.lines] > self._capacities)
        return sorted((self.sequences[number] for number in full), key=lambda sequence: sequence.order)

    def _slot_of(self, sequence: SequenceState) -> CacheSlot:
        slot = self._cache.slot_of(sequence)
        assert slot is not None
        return slot

    def _by_pool(self, cache: KVCache) -> Iterator[_PoolMembers]:
        slots = [cache.slot_of(sequence) for sequence in self.sequences]
        by_pool: dict[SlotPool, list[int]] = {}
        for number, slot in enumerate(slots):
            assert slot is not None
            by_pool.setdefault(slot.pool, []).append(number)
        for pool, members in by_pool.items():
            indices = [slot.index for slot in (slots[number] for number in members) if slot is not None]
            is_adjacent = members[-1] - members[0] == len(members) - 1
            yield _PoolMembers(
                pool=pool,
                members=np.array(members),
                rows=slice(members[0], members[-1] + 1) if is_adjacent else torch.tensor(members, device=self._device),
                slots=torch.tensor(indices, device=self._device),
                in_order=indices == list(range(len(indices))),
                num_slots=max(indices) + 1,
                groups=_groups([self.sequences[number] for number in members], self._device),
            )

    def steps(self, table: SequenceTable, num_steps: int | None = 1) -> list[DecodeStep]:
        """Returns the first of so many steps, of each pool; None for all that its slots have room for."""
        steps = []
        for part in self._pool_members:
            # All but the newest token, which runs now, are cached.
            lengths = table.length[self.lines[part.members]] - 1
            steps.append(
                DecodeStep(
                    tensors=part.pool.tensors,
                    rows=part.rows,
                    slots=part.slots,
                    in_order=part.in_order,
                    lengths=torch.from_numpy(lengths).to(self._device),
                    num_slots=part.num_slots,
                    span=int(lengths.max()) + 1,
                    groups=part.groups,
                    num_threads=self._num_threads,
                    last_span=part.pool.tensors.capacity if num_steps is None else int(lengths.max()) + num_steps,
                )
            )
        return steps


def _groups(sequences: Sequence[SequenceState], device: torch.device) -> PrefixGroups:
    """Groups the samples of one prompt that were prefilled with the same weights: they share the prompt's entries."""
    by_prompt: dict[tuple[Job, int], list[int]] = {}
    for number, sequence in enumerate(sequences):
        by_prompt.setdefault((sequence.job, sequence.weight_version), []).append(number)
    order = [number for members in by_prompt.values() for number in members]
    bounds = np.cumsum([0, *(len(members) for members in by_prompt.values())])
    num_shared = [len(job.prompt) for job, _ in by_prompt]
    return PrefixGroups(*(torch.tensor(numbers, device=device) for numbers in (order, bounds, num_shared)))


@dataclass(frozen=True)
class Batch:
    """The packed row of one pass.

    decoding: None if no sequence decodes. parts: in the order of the packed row, new prompts last.
    """

    decoding: DecodeBatch | None
    parts: Sequence[PrefillChunk | DraftTokensPart]

    @classmethod
    def of(
        cls, decoding: DecodeBatch | None, parts: Sequence[PrefillChunk | DraftTokensPart], cache: KVCache
    ) -> "Batch":
        def capacity(part: PrefillChunk | DraftTokensPart) -> int:
            slot = cache.slot_of(part.sequence) if part.cached else None
            return 0 if slot is None else slot.capacity

        def place(part: PrefillChunk | DraftTokensPart) -> tuple[bool, str, int, int]:
            return part.start == 0, part.sequence.job.adapter_key, part.length, capacity(part)

        return cls(decoding, sorted(parts, key=place))

    @property
    def num_decoding(self) -> int:
        return 0 if self.decoding is None else len(self.decoding.sequences)

    @property
    def num_tokens(self) -> int:
        return self.num_decoding + sum(part.length for part in self.parts)

    def adapter_spans(self) -> list[AdapterSpan]:
        spans = () if self.decoding is None else self.decoding.adapter_spans
        decoding = [(span.adapter_id, span.length) for span in spans]
        return adapter_spans([*decoding, *((part.sequence.job.adapter_id, part.length) for part in self.parts)])

    def tokens(self, table: SequenceTable) -> np.ndarray:
        """Returns int64, [tokens]."""
        newest = [] if self.decoding is None else [table.newest[self.decoding.lines]]
        return np.concatenate([*newest, *(part.tokens for part in self.parts)])

    def positions(self, table: SequenceTable) -> np.ndarray:
        """Returns int64, [tokens]."""
        newest = [] if self.decoding is None else [table.length[self.decoding.lines] - 1]
        return np.concatenate([*newest, *(np.arange(part.start, part.stop) for part in self.parts)])

    def starts(self) -> list[int]:
        """Returns the index of each part's first token in the packed row."""
        lengths = [self.num_decoding, *(part.length for part in self.parts)]
        return np.cumsum(lengths)[:-1].tolist()

    def packing(self, table: SequenceTable, cache: KVCache, device: torch.device) -> CachedRow:
        placed = list(zip(self.starts(), self.parts, strict=True))
        fresh = [(start, part) for start, part in placed if part.start == 0]
        fresh_start = fresh[0][0] if fresh else self.num_tokens
        return CachedRow(
            steps=[] if self.decoding is None else self.decoding.steps(table),
            chunks=[_chunk(start, part, cache) for start, part in placed if part.start],
            fresh=Packing(pack_lengths([part.length for _, part in fresh])) if fresh else None,
            fresh_start=fresh_start,
            storing=list(_storing(fresh, cache, device)),
        )


def _chunk(start: int, part: PrefillChunk | DraftTokensPart, cache: KVCache) -> ContinuationChunk:
    slot = cache.slot_of(part.sequence)
    assert slot is not None
    is_draft = isinstance(part, DraftTokensPart)
    return ContinuationChunk(start, start + part.length, slot.tensors, slot.index, part.start, is_draft=is_draft)


def _storing(
    fresh: Sequence[tuple[int, PrefillChunk | DraftTokensPart]], cache: KVCache, device: torch.device
) -> Iterator[NewSequences]:
    """Yields one entry for adjacent prompts of equal length and slot pool."""

    def kind(placed: tuple[int, PrefillChunk | DraftTokensPart]) -> tuple[int, int]:
        slot = cache.slot_of(placed[1].sequence) if placed[1].cached else None
        return placed[1].length, 0 if slot is None else slot.capacity

    number = 0
    for (length, capacity), members in groupby(fresh, key=kind):
        starts, parts = zip(*members, strict=True)
        if capacity:
            slots = [slot for part in parts if (slot := cache.slot_of(part.sequence)) is not None]
            indices = torch.tensor([slot.index for slot in slots], device=device)
            yield NewSequences(starts[0], len(parts), length, slots[0].tensors, indices, number)
        number += len(parts)
