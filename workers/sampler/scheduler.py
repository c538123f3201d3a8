"""Schedules sequences: waiting, prefill, decoding, or decoding with draft tokens; and gives them slots in the KV cache.

Sequences are admitted in order of arrival. If the cache is full, the youngest are preempted: they wait, and are
prefilled again later.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch

from ...schemas.errors import OperationError
from ..protocol.worker_config import WorkerConfig
from .cache.cache import SHORTEST, KVCache
from .cache.prefix_cache import BlockRange, num_tokens_of, truncate
from .cache.weight_versions import WeightVersions
from .decoding.batch import Batch, DecodeBatch, DraftTokensPart, Prefill, PrefillChunk
from .requests.jobs import NOWHERE, Job, SequenceState
from .requests.sequence_table import SequenceTable
from .speculation import DraftTokens, SpeculativeDecoder


class KVCacheFull(OperationError):
    """The sequence does not fit into an empty cache."""

    def __init__(self, row: SequenceState, message: str) -> None:
        super().__init__(message)
        self.row = row


class SequenceScheduler:
    """table: one line for each sequence that is admitted."""

    def __init__(
        self,
        cache: KVCache,
        namespaces: WeightVersions,
        config: WorkerConfig,
        device: torch.device,
        num_threads: int,
        speculation: SpeculativeDecoder,
    ) -> None:
        self.cache = cache
        self._speculation = speculation
        self.table = SequenceTable()
        self._namespaces = namespaces
        self._config = config
        self._device, self._num_threads = device, num_threads
        self._served: Collection[str] = ()
        self._waiting: deque[SequenceState] = deque()
        self._prefills: list[Prefill] = []
        self._decoding_rows: dict[SequenceState, None] = {}
        self._guessed_rows: dict[SequenceState, None] = {}
        self._decoding: DecodeBatch | None = None

    @property
    def is_idle(self) -> bool:
        """True if no sequence is admitted, and the first that waits cannot be."""
        return not self.table.num_lines and not (self._waiting and self._is_served(self._waiting[0]))

    def admitted(self) -> list[SequenceState]:
        prefilled = (row for prefill in self._prefills for row in prefill.sequences)
        return [*self._decoding_rows, *self._guessed_rows, *prefilled]

    def with_drafts(self) -> list[SequenceState]:
        """Returns the sequences that decode with draft tokens."""
        return list(self._guessed_rows)

    @property
    def num_sampled(self) -> int:
        """The number of sequences that decode, with or without draft tokens."""
        return len(self._decoding_rows) + len(self._guessed_rows)

    def is_pending(self, row: SequenceState) -> bool:
        """True if the sequence waits or is in prefill."""
        return row.stop_reason is None and row not in self._decoding_rows and row not in self._guessed_rows

    def stop_drafting(self, row: SequenceState) -> None:
        """Lets a sequence with draft tokens continue without them."""
        del self._guessed_rows[row]
        if row.namespace == self._namespaces.of(row.job):
            self.table.copy_to(row)
            self._speculation.keep(row, row.namespace, row.token_ids())
        self._speculation.forget(row)
        self._decoding_rows[row] = None
        self._decoding = None

    def serve(self, adapter_ids: Collection[str]) -> None:
        """Admits from now on only sequences of these adapters and of the base model."""
        self._served = adapter_ids

    def check(self, row: SequenceState) -> None:
        """Raises OperationError if the sequence can never fit into the cache."""
        asked = row.job.request.params.max_tokens
        # Without max_tokens a sample may end long before the context is full.
        length = row.longest_cached if asked else row.length + 1
        if row.needs_cache and not self.cache.fits_alone(length):
            raise self._no_room(row, length)

    def enqueue(self, rows: Iterable[SequenceState]) -> None:
        """Appends the sequences to the queue."""
        self._waiting.extend(rows)

    def next_batch(self, guesses: Mapping[SequenceState, DraftTokens]) -> Batch:
        """Returns what runs next; empty if nothing can.

        Args:
            guesses: draft tokens of all sequences that use a draft. The cache must have room for them.
        Raises:
            KVCacheFull: a sequence does not fit. The caller may remove it and continue.
        """
        self._make_room()
        self._admit()
        budget = self._prefill_budget()
        parts: list[PrefillChunk | DraftTokensPart] = [
            self._guess_part(row, guesses[row]) for row in self._guessed_rows
        ]
        for prefill in self._prefills:
            length = min(prefill.remaining, budget) if prefill.cached else prefill.remaining
            if length > 0:
                parts.append(PrefillChunk(prefill, prefill.computed, prefill.computed + length))
                budget -= length
        return Batch.of(self._current_decoding(), parts, self.cache)

    def end_prefill(self, prefill: Prefill) -> None:
        """Lets the sequences of the prefill decode."""
        self._prefills.remove(prefill)
        leader, *others = prefill.sequences
        if prefill.cached:
            if prefill.namespace == self._namespaces.of(prefill.job):
                self._keep(leader, prefill.namespace, prefill.sequence)
            self.cache.fork(leader, [row for row in others if row.needs_cache])
        self._speculation.fork(leader, [row for row in others if row.needs_cache])
        for row in prefill.sequences:
            row.namespace = prefill.namespace
            going_on = self._guessed_rows if self._speculation.is_ready(row) else self._decoding_rows
            going_on[row] = None
        self._decoding = None

    def end(self, row: SequenceState) -> None:
        """Removes an ended sequence. The prefix cache keeps its tokens, for the next turn of a conversation."""
        if self.cache.slot_of(row) is not None and row.namespace == self._namespaces.of(row.job):
            self.table.copy_to(row)
            # The newest token is not in the cache yet.
            self._keep(row, row.namespace, row.token_ids()[:-1])
        self._release(row)

    def remove(self, job: Job) -> None:
        """Removes the sequences of a job, except those that have ended."""
        for row in job.sequences:
            self._release(row)
        self._waiting = deque(row for row in self._waiting if row.job is not job)

    def preempt_all(self) -> None:
        """Preempts all sequences. They keep their tokens."""
        for row in sorted(self.admitted(), key=lambda row: row.order, reverse=True):
            self._release(row)
            self._waiting.appendleft(row)

    def clear(self) -> None:
        self._waiting.clear()
        self._prefills.clear()
        self._decoding_rows.clear()
        self._guessed_rows.clear()
        self._decoding = None
        self.table = SequenceTable()
        self.cache.clear()
        self._speculation.clear()

    def _is_served(self, row: SequenceState) -> bool:
        return row.job.adapter_id is None or row.job.adapter_id in self._served

    def _keep(self, row: SequenceState, namespace: int, sequence: np.ndarray) -> None:
        """Stores the sequence in the prefix caches of the model and of its draft."""
        self.cache.store_prefix(row, namespace, sequence)
        self._speculation.keep(row, namespace, sequence)

    def _release(self, row: SequenceState) -> None:
        """Frees the line and the slots of a sequence. Ignored if it is not admitted."""
        if row.table_row == NOWHERE:
            return
        self.table.remove(row)
        self.cache.free(row)
        self._decoding_rows.pop(row, None)
        self._guessed_rows.pop(row, None)
        self._speculation.forget(row)
        self._decoding = None
        for prefill in self._prefills:
            if row in prefill.sequences:
                prefill.sequences.remove(row)
        self._prefills = [prefill for prefill in self._prefills if prefill.sequences]

    def _no_room(self, row: SequenceState, length: int) -> KVCacheFull:
        needed = length * self.cache.bytes_per_token
        return KVCacheFull(
            row,
            f"a sequence of {length} tokens needs {needed} bytes of key/value cache, more than kv_cache_bytes"
            f" {self.cache.budget_bytes}: lower max_tokens, shorten the prompt or start the server with a larger"
            " --kv-cache-bytes",
        )

    # Room for decoding

    def make_room_for_drafts(self) -> None:
        """Makes room for the draft tokens of all sequences that use a draft, by preempting the youngest. Raises
        KVCacheFull.

        A preempted sequence resumes at the same token and with its draft: else its tokens would depend on which other
        requests run.
        """
        for row in sorted(self._guessed_rows, key=lambda row: row.order):
            while row in self._guessed_rows and not self._has_room_to_guess(row):
                self._preempt_youngest()

    def _has_room_to_guess(self, row: SequenceState) -> bool:
        seat = self.cache.slot_of(row)
        assert seat is not None
        count = int(self.table.count[row.table_row])
        length = int(self.table.length[row.table_row]) + self._speculation.num_next(row, count)
        has_room = length <= seat.capacity or self._grow(row, length)
        return has_room and self._speculation.has_room(row, count)

    def _guess_part(self, row: SequenceState, guesses: DraftTokens) -> DraftTokensPart:
        tokens = np.concatenate([[self.table.newest[row.table_row]], guesses.tokens])
        return DraftTokensPart(row, int(self.table.length[row.table_row]) - 1, tokens)

    def _make_room(self) -> None:
        """Makes room for the next token of all decoding sequences, by preempting the youngest."""
        decoding = self._current_decoding()
        for row in decoding.outgrown(self.table) if decoding is not None else ():
            while row in self._decoding_rows and not self._grow(row, int(self.table.length[row.table_row])):
                self._preempt_youngest()

    def _current_decoding(self) -> DecodeBatch | None:
        if self._decoding_rows and (self._decoding is None or self._decoding.has_moved):
            self._decoding = DecodeBatch(list(self._decoding_rows), self.cache, self._device, self._num_threads)
        return self._decoding

    def _grow(self, row: SequenceState, length: int) -> bool:
        if not self.cache.grow(row, self._with_headroom(row, length)) and not self.cache.grow(row, length):
            return False
        self._decoding = None
        return True

    def _with_headroom(self, row: SequenceState, length: int) -> int:
        """Adds spare tokens, so that the slot need not grow again at once."""
        return max(length, min(length + SHORTEST, row.longest_cached))

    def _preempt_youngest(self) -> None:
        """Preempts the youngest sequence. If it is alone, only its own slot is in the way of the longer one."""
        under_way = self.admitted()
        youngest = max(under_way, key=lambda row: row.order)
        length = int(self.table.length[youngest.table_row])
        if len(under_way) == 1 and not self.cache.fits_alone(length):
            raise self._no_room(youngest, length)
        self._release(youngest)
        self._waiting.appendleft(youngest)

    # Admission

    def _admit(self) -> None:
        """Admits waiting sequences in order, until one does not fit or enough prompt tokens are in prefill.

        A sequence whose adapter is not served blocks those behind it, or it could wait forever.
        """
        budget = self._prefill_budget() - sum(prefill.remaining for prefill in self._prefills)
        num_logits = sum(map(self._num_logits, self.admitted()))
        while self._waiting and num_logits < self._config.head_chunk_tokens:
            row = self._waiting[0]
            num_logits += self._num_logits(row)
            if not self._is_served(row):
                return
            if self._prefills and self._prefills[-1].matches(row):
                admitted = self._join_prefill(self._prefills[-1], row)
            elif budget <= 0:
                return
            else:
                admitted = self._start_prefill(row)
                budget -= self._prefills[-1].remaining if admitted else 0
            if not admitted and not self._is_alone():
                return
            if not admitted:
                raise self._no_room(row, row.length + 1)

    def _num_logits(self, row: SequenceState) -> int:
        """Returns how many rows of logits one pass computes for the sequence."""
        return 1 + (self._speculation.num_draft_tokens(row) if self._speculation.uses_draft(row) else 0)

    def _prefill_budget(self) -> int:
        """Returns the most prompt tokens of an iteration: few if other sequences decode meanwhile."""
        has_others = self._decoding_rows or self._guessed_rows
        return self._config.prefill_chunk_tokens if has_others else self._config.micro_batch_tokens

    def _join_prefill(self, prefill: Prefill, row: SequenceState) -> bool:
        row.without_draft |= prefill.sequences[0].without_draft
        self._decide_drafting(row, prefill.namespace)
        if row.needs_cache and not self._place(row):
            return False
        prefill.sequences.append(row)
        self._enter(row)
        return True

    def _start_prefill(self, row: SequenceState) -> bool:
        namespace = self._namespaces.of(row.job)
        self._decide_drafting(row, namespace)
        # With a draft, the newest token runs together with the next draft tokens.
        draws = not (len(row.tokens) and self._is_guessed(row))
        sequence = row.token_ids() if draws else row.token_ids()[:-1]
        known = self.cache.prefixes.find(namespace, sequence, self._num_reusable(row, len(sequence)))
        told: Sequence[BlockRange] = ()
        if self._is_guessed(row):
            # Both must start at the same token: the draft needs the target's hidden states of all later ones.
            told = self._speculation.find_prefix(row, namespace, sequence, num_tokens_of(known))
            known = truncate(known, num_tokens_of(told))
        needs_slot = row.needs_cache or self._is_long(len(sequence) - num_tokens_of(known), len(sequence))
        cached = (needs_slot or bool(known)) and self._place(row)
        if needs_slot and not cached:
            return False
        if cached and known:
            self.cache.load_prefix(row, known)
        if cached and told:
            self._speculation.restore(row, told)
        prefill = Prefill([row], sequence, cached, namespace, num_tokens_of(known) if cached else 0, draws)
        if row.job.num_cache_hits is None:
            row.job.num_cache_hits = prefill.computed
        self._prefills.append(prefill)
        self._enter(row)
        return True

    def _is_long(self, num_tokens: int, length: int) -> bool:
        """True if the tokens must run in chunks. Those that exceed the whole cache run in one pass, uncached."""
        return num_tokens > self._prefill_budget() and self.cache.fits_alone(length)

    def _num_reusable(self, row: SequenceState, length: int) -> int:
        """Returns how many of the sequence's tokens the prefix cache may replace. The last one must always run.

        A sequence that has sampled tokens has had its prompt scored.
        """
        return min(length - 1, row.job.num_reusable + len(row.tokens))

    def _place(self, row: SequenceState) -> bool:
        if self._is_guessed(row):
            return self._place_with_draft(row)
        if self.cache.allocate(row, self._with_headroom(row, row.length)):
            return True
        # A tight slot is only for a sequence without others: it would soon be preempted again.
        return not self.table.num_lines and self.cache.allocate(row, row.length + 1)

    def _decide_drafting(self, row: SequenceState, namespace: int) -> None:
        """Decides to decode without the draft if both exceed an empty cache or it has not paid off lately."""
        if self._is_guessed(row):
            of_draft = self._speculation.num_bytes(row, _next_count(row))
            is_too_large = self.cache.num_bytes_for(self._length_to_guess(row)) + of_draft > self.cache.budget_bytes
            may_pay = self._speculation.may_pay(row, namespace, 1 + len(self.admitted()))
            row.without_draft = is_too_large or not may_pay

    def _length_to_guess(self, row: SequenceState) -> int:
        """Returns how many tokens the cache must hold for the next draft tokens."""
        count = _next_count(row)
        return len(row.job.prompt) + count + self._speculation.num_next(row, count)

    def _place_with_draft(self, row: SequenceState) -> bool:
        length, count = self._length_to_guess(row), _next_count(row)
        for wanted in [self._with_headroom(row, length), *([] if self.table.num_lines else [length])]:
            if self.cache.allocate(row, wanted):
                if self._speculation.place(row, count):
                    return True
                self.cache.free(row)
        return False

    def _is_guessed(self, row: SequenceState) -> bool:
        """True if the sequence uses a draft from its first sampled token on."""
        return row.needs_cache and self._speculation.uses_draft(row)

    def _is_alone(self) -> bool:
        """True if nothing is in flight, in other samplers neither."""
        return not self.table.num_lines and not self.cache.budget.held_bytes()

    def _enter(self, row: SequenceState) -> None:
        self._waiting.popleft()
        self.table.add(row)


def _next_count(row: SequenceState) -> int:
    """Returns the number of sampled tokens before the next draft tokens. The first token is sampled without them."""
    return max(1, len(row.tokens))
