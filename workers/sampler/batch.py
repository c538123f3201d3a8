"""The next forward pass of the sampler, as one packed row.

First one token of every sequence that decodes, then chunks of prompts whose beginning is cached, then prompts that
start at their first token. In each part tokens of the same adapter are adjacent; in the last, prompts of equal length
too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ..ops.attention import Packing, pack_lengths
from ..ops.kernels import PrefixGroups
from ..ops.kv_cache import CachedRow, ContinuationChunk, DecodeStep, NewSequences
from .cache.cache import CacheSlot, KVCache, SlotPool
from .requests.jobs import Job, SequenceState
from .requests.sequence_table import SequenceTable
from .requests.token_choice import ChosenTokens, DraftTokens
from .sampling import AdapterSpan, SampledTokens, adapter_spans


@dataclass(eq=False)
class Prefill:
    """Tokens to run before sampling, and the sequences that continue from them."""

    sequences: list[SequenceState]
    """The first one's slot stores the tokens; without `cached` none has a slot."""
    tokens: np.ndarray
    cached: bool
    weight_version: int
    """See PrefixCache."""
    computed: int = 0
    """The number of tokens that are in the cache."""
    samples_next: bool = True
    """True if the next token is sampled at the end of the prefill."""
    borders: Sequence[int] = ()
    """Numbers of tokens, ascending, after which a pass ends so that the states there can be stored."""

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

    def next_chunk(self, length: int) -> "Chunk":
        stop = self.computed + length
        return Chunk(self.sequences[0], self.computed, self.tokens[self.computed : stop], self.cached, prefill=self)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive tokens of a sequence: of a prefill, or its newest token and the draft tokens after it."""

    sequence: SequenceState
    """The sequence whose slot stores the tokens, if it has one."""
    start: int
    """The position of the first token."""
    tokens: np.ndarray
    """int64."""
    cached: bool
    prefill: Prefill | None = None
    draft: DraftTokens | None = None

    @classmethod
    def of_draft(cls, sequence: SequenceState, draft: DraftTokens, table: SequenceTable) -> "Chunk":
        tokens = np.concatenate([[table.newest[sequence.line]], draft.tokens])
        return cls(sequence, int(table.length[sequence.line]) - 1, tokens, cached=True, draft=draft)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_last(self) -> bool:
        return self.prefill is not None and self.stop == len(self.prefill.tokens)


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


class DecodeRows:
    """The sequences that decode, with one row each in a pass.

    Valid until a sequence joins, leaves or moves to another slot.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        table: SequenceTable,
        cache: KVCache,
        device: torch.device,
        num_threads: int,
    ) -> None:
        slots = {sequence: cache.slot_of(sequence) for sequence in sequences}
        self.sequences = sorted(
            sequences, key=lambda each: (each.job.adapter_key, slots[each].capacity, slots[each].index)
        )
        """The sequences in the order of the packed row."""
        self.lines = np.array([sequence.line for sequence in self.sequences], dtype=np.int64)
        """Theirs in the table, int64, [n]."""
        self.table, self.cache, self.device = table, cache, device
        self._keys = [(sequence.job.adapter_id, slots[sequence].capacity) for sequence in self.sequences]
        self._capacities = np.array([capacity for _, capacity in self._keys], dtype=np.int64)
        self._num_threads, self._num_moves = num_threads, cache.num_moves
        self._pool_members = list(self._by_pool([slots[sequence] for sequence in self.sequences]))

    @property
    def has_moved(self) -> bool:
        """True if any sequence of the cache, of these or of others, has moved."""
        return self.cache.num_moves != self._num_moves

    def adapter_spans(self) -> list[AdapterSpan]:
        return adapter_spans((sequence.job.adapter_id, 1) for sequence in self.sequences)

    def tokens(self) -> np.ndarray:
        """Returns the newest token of each sequence, int64, [n]."""
        return self.table.newest[self.lines]

    def positions(self) -> np.ndarray:
        """Returns the position of each newest token, int64, [n]: the number of tokens that are cached."""
        return self.table.length[self.lines] - 1

    def steps(self, num_steps: int | None = 1) -> list[DecodeStep]:
        """Returns the first of so many steps, of each pool; None for all that its slots have room for."""
        steps, positions = [], self.positions()
        for part in self._pool_members:
            lengths = positions[part.members]
            steps.append(
                DecodeStep(
                    tensors=part.pool.tensors,
                    rows=part.rows,
                    slots=part.slots,
                    in_order=part.in_order,
                    lengths=torch.from_numpy(lengths).to(self.device),
                    num_slots=part.num_slots,
                    span=int(lengths.max()) + 1,
                    groups=part.groups,
                    num_threads=self._num_threads,
                    last_span=part.pool.tensors.capacity if num_steps is None else int(lengths.max()) + num_steps,
                )
            )
        return steps

    def steps_left(self) -> np.ndarray:
        """Returns after how many steps each sequence reaches its token limit or the end of its slot, int64, [n]."""
        tokens = self.table.limit[self.lines] - self.table.count[self.lines] - 1
        return np.minimum(tokens, self._capacities - self.table.length[self.lines])

    def num_unwatched(self) -> int:
        """Returns for how many steps only a stop token can end a sequence; 0 if tokens need a look by themselves."""
        watched = self.table.is_watched[self.lines].any() or self.table.is_adjusted[self.lines].any()
        return 0 if watched or not self.sequences else int(self.steps_left().min())

    def outgrown(self) -> list[SequenceState]:
        """Returns the sequences whose slot has no room for the next token, the oldest first."""
        full = np.flatnonzero(self.table.length[self.lines] > self._capacities)
        return sorted((self.sequences[number] for number in full), key=lambda sequence: sequence.order)

    def rows_for(self, other: "DecodeRows") -> np.ndarray | None:
        """Returns rows of these for the other sequences, int64, [n], each of the same adapter and slot length; None if
        there are too few.
        """
        free: dict[tuple[str | None, int], list[int]] = {}
        for place, key in enumerate(self._keys):
            free.setdefault(key, []).append(place)
        places = [members.pop() for key in other._keys if (members := free.get(key))]
        return np.array(places, np.int64) if len(places) == len(other.lines) else None

    def pools_of(self, rows: np.ndarray) -> Sequence[SlotPool]:
        return [part.pool for part in self._pool_members if rows[part.members].any()]

    def place(self, steps: Sequence[DecodeStep], other: "DecodeRows", rows: np.ndarray, lengths: np.ndarray) -> None:
        """Changes the steps of these sequences to those of the other ones, in these rows.

        Args:
            lengths: cached tokens of each row's sequence, int64 [all rows]. The other rows get a slot that is unused.
        """
        slots = np.full(len(self.lines), -1)
        slots[rows] = [other.cache.slot_of(sequence).index for sequence in other.sequences]
        for part, step in zip(self._pool_members, steps, strict=True):
            own = slots[part.members]
            step.slots.copy_(torch.from_numpy(np.where(own < 0, part.pool.tensors.num_slots - 1, own)))
            step.lengths.copy_(torch.from_numpy(lengths[part.members]))
            step.span = int(lengths[part.members].max()) + 1

    def _by_pool(self, slots: Sequence[CacheSlot]) -> Iterator[_PoolMembers]:
        by_pool: dict[SlotPool, list[int]] = {}
        for number, slot in enumerate(slots):
            by_pool.setdefault(slot.pool, []).append(number)
        for pool, members in by_pool.items():
            indices = [slots[number].index for number in members]
            is_adjacent = members[-1] - members[0] == len(members) - 1
            yield _PoolMembers(
                pool=pool,
                members=np.array(members),
                rows=slice(members[0], members[-1] + 1) if is_adjacent else torch.tensor(members, device=self.device),
                slots=torch.tensor(indices, device=self.device),
                in_order=indices == list(range(len(indices))),
                num_slots=max(indices) + 1,
                groups=_groups([self.sequences[number] for number in members], self.device),
            )


class Batch:
    """The packed row of one pass: a token of every sequence that decodes, then chunks.

    One without chunks may run several times; the table gets the tokens of these passes together.
    """

    def __init__(self, decoding: DecodeRows, chunks: Sequence[Chunk]) -> None:
        self.decoding, self.table = decoding, decoding.table
        self.chunks = sorted(chunks, key=self._place_of)
        """The other parts in the order of the packed row, new prompts last."""
        self.is_repeated = False
        """True if the next pass is one more of this batch."""
        self._most_taken = 0 if chunks else decoding.num_unwatched()
        self._taken: list[ChosenTokens] = []

    @property
    def num_tokens(self) -> int:
        return len(self.decoding.lines) + sum(chunk.length for chunk in self.chunks)

    def adapter_spans(self) -> list[AdapterSpan]:
        decoding = ((sequence.job.adapter_id, 1) for sequence in self.decoding.sequences)
        return adapter_spans([*decoding, *((chunk.sequence.job.adapter_id, chunk.length) for chunk in self.chunks)])

    def tokens(self) -> np.ndarray:
        """Returns int64, [tokens]."""
        return np.concatenate([self.decoding.tokens(), *(chunk.tokens for chunk in self.chunks)])

    def positions(self) -> np.ndarray:
        """Returns int64, [tokens]."""
        return np.concatenate([self.decoding.positions(), *(np.arange(each.start, each.stop) for each in self.chunks)])

    def rows(self) -> list[tuple[slice, Chunk]]:
        stops = np.cumsum([len(self.decoding.lines), *(chunk.length for chunk in self.chunks)]).tolist()
        return [(slice(start, start + chunk.length), chunk) for start, chunk in zip(stops, self.chunks, strict=False)]

    def packing(self) -> CachedRow:
        placed = [(rows.start, chunk) for rows, chunk in self.rows()]
        fresh = [(start, chunk) for start, chunk in placed if chunk.start == 0]
        return CachedRow(
            steps=self.decoding.steps(),
            chunks=[self._continuation(start, chunk) for start, chunk in placed if chunk.start],
            fresh=Packing(pack_lengths([chunk.length for _, chunk in fresh])) if fresh else None,
            fresh_start=fresh[0][0] if fresh else self.num_tokens,
            storing=list(self._storing(fresh)),
        )

    # Passes whose tokens are not in the table yet

    def take(self, sampled: SampledTokens) -> bool:
        """Keeps the tokens for `write_back` if the next pass is of the same sequences.

        It is not if a sequence ends, outgrows its slot or needs more than tokens and log-probabilities.
        """
        self.is_repeated = len(self._taken) < self._most_taken and not sampled.stops_any() and sampled.chosen.are_finite
        if self.is_repeated:
            self._taken.append(sampled.chosen)
        return self.is_repeated

    def write_back(self) -> int:
        """Writes the tokens that were kept to the table. Returns the number of passes that sampled them."""
        num_passes, self.is_repeated = len(self._taken), False
        if num_passes:
            tokens = torch.stack([each.tokens for each in self._taken], dim=1)
            logprobs = torch.stack([each.logprobs for each in self._taken], dim=1)
            self.table.extend(self.decoding.lines, tokens.cpu().numpy(), logprobs.cpu().numpy())
            self._taken = []
        return num_passes

    def _place_of(self, chunk: Chunk) -> tuple[bool, str, int, int]:
        return chunk.start == 0, chunk.sequence.job.adapter_key, chunk.length, self._capacity_of(chunk)

    def _capacity_of(self, chunk: Chunk) -> int:
        return self.decoding.cache.slot_of(chunk.sequence).capacity if chunk.cached else 0

    def _continuation(self, start: int, chunk: Chunk) -> ContinuationChunk:
        slot, is_draft = self.decoding.cache.slot_of(chunk.sequence), chunk.draft is not None
        return ContinuationChunk(start, start + chunk.length, slot.tensors, slot.index, chunk.start, is_draft=is_draft)

    def _storing(self, fresh: Sequence[tuple[int, Chunk]]) -> Iterator[NewSequences]:
        """Yields one entry for adjacent prompts of equal length and slot pool."""
        number = 0
        by_kind = groupby(fresh, key=lambda placed: (placed[1].length, self._capacity_of(placed[1])))
        for (length, capacity), members in by_kind:
            starts, chunks = zip(*members, strict=True)
            if capacity:
                slots = [self.decoding.cache.slot_of(chunk.sequence) for chunk in chunks]
                indices = torch.tensor([slot.index for slot in slots], device=self.decoding.device)
                yield NewSequences(starts[0], len(chunks), length, slots[0].tensors, indices, number)
            number += len(chunks)


def _groups(sequences: Sequence[SequenceState], device: torch.device) -> PrefixGroups:
    """Groups the samples of one prompt that were prefilled with the same weights: they share the prompt's entries."""
    by_prompt: dict[tuple[Job, int], list[int]] = {}
    for number, sequence in enumerate(sequences):
        by_prompt.setdefault((sequence.job, sequence.weight_version), []).append(number)
    order = [number for members in by_prompt.values() for number in members]
    bounds = np.cumsum([0, *(len(members) for members in by_prompt.values())])
    num_shared = [len(job.prompt) for job, _ in by_prompt]
    return PrefixGroups(*(torch.tensor(numbers, device=device) for numbers in (order, bounds, num_shared)))
