"""Schedules sequences: waiting, prefill, decoding, or decoding with draft tokens; and gives them slots in the KV cache.

Sequences are admitted in order of arrival. If the cache is full, the youngest are preempted: they wait, and are
prefilled again later.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch

from ...schemas.errors import OperationError
from ..protocol.config import WorkerConfig
from .cache.cache import SHORTEST, Cache
from .cache.prefixes import Stretch, beginning, length_of
from .cache.weight_versions import Namespaces
from .decoding.batch import Batch, Decoding, GuessPart, Prefill, PromptPart
from .requests.jobs import NOWHERE, Job, Row
from .requests.sequence_table import Table
from .speculation import Guesses, Speculation


class NoRoom(OperationError):
    """The sequence does not fit into an empty cache."""

    def __init__(self, row: Row, message: str) -> None:
        super().__init__(message)
        self.row = row


class Schedule:
    """table: one line for each sequence that is admitted."""

    def __init__(
        self,
        cache: Cache,
        namespaces: Namespaces,
        config: WorkerConfig,
        device: torch.device,
        num_threads: int,
        speculation: Speculation,
    ) -> None:
        self.cache = cache
        self._speculation = speculation
        self.table = Table()
        self._namespaces = namespaces
        self._config = config
        self._device, self._num_threads = device, num_threads
        self._served: Collection[str] = ()
        self._waiting: deque[Row] = deque()
        self._prefills: list[Prefill] = []
        self._decoding_rows: dict[Row, None] = {}
        self._guessed_rows: dict[Row, None] = {}
        self._decoding: Decoding | None = None

    @property
    def is_idle(self) -> bool:
        """True if no sequence is admitted, and the first that waits cannot be."""
        return not self.table.num_lines and not (self._waiting and self._is_served(self._waiting[0]))

    def under_way(self) -> list[Row]:
        prefilled = (row for prefill in self._prefills for row in prefill.rows)
        return [*self._decoding_rows, *self._guessed_rows, *prefilled]

    def guessed(self) -> list[Row]:
        """Returns the sequences that decode with draft tokens."""
        return list(self._guessed_rows)

    @property
    def num_sampled(self) -> int:
        """The number of sequences that decode, with or without draft tokens."""
        return len(self._decoding_rows) + len(self._guessed_rows)

    def is_to_come(self, row: Row) -> bool:
        """True if the sequence waits or is in prefill."""
        return row.stop_reason is None and row not in self._decoding_rows and row not in self._guessed_rows

    def decode(self, row: Row) -> None:
        """Lets a sequence with draft tokens continue without them."""
        del self._guessed_rows[row]
        if row.namespace == self._namespaces.of(row.job):
            self.table.note(row)
            self._speculation.keep(row, row.namespace, row.sequence())
        self._speculation.forget(row)
        self._decoding_rows[row] = None
        self._decoding = None

    def serve(self, adapter_ids: Collection[str]) -> None:
        """Admits from now on only sequences of these adapters and of the base model."""
        self._served = adapter_ids

    def check(self, row: Row) -> None:
        """Raises OperationError if the sequence can never fit into the cache."""
        asked = row.job.request.params.max_tokens
        # Without max_tokens a sample may end long before the context is full.
        length = row.longest_cached if asked else row.length + 1
        if row.needs_cache and not self.cache.fits_alone(length):
            raise self._no_room(row, length)

    def wait(self, rows: Iterable[Row]) -> None:
        """Appends the sequences to the queue."""
        self._waiting.extend(rows)

    def next_batch(self, guesses: Mapping[Row, Guesses]) -> Batch:
        """Returns what runs next; empty if nothing can.

        Args:
            guesses: draft tokens of all sequences that use a draft. The cache must have room for them.
        Raises:
            NoRoom: a sequence does not fit. The caller may remove it and continue.
        """
        self._make_room()
        self._admit()
        budget = self._prefill_budget()
        parts: list[PromptPart | GuessPart] = [self._guess_part(row, guesses[row]) for row in self._guessed_rows]
        for prefill in self._prefills:
            length = min(prefill.remaining, budget) if prefill.cached else prefill.remaining
            if length > 0:
                parts.append(PromptPart(prefill, prefill.computed, prefill.computed + length))
                budget -= length
        return Batch.of(self._current_decoding(), parts, self.cache)

    def end_prefill(self, prefill: Prefill) -> None:
        """Lets the sequences of the prefill decode."""
        self._prefills.remove(prefill)
        leader, *others = prefill.rows
        if prefill.cached:
            if prefill.namespace == self._namespaces.of(prefill.job):
                self._keep(leader, prefill.namespace, prefill.sequence)
            self.cache.fork(leader, [row for row in others if row.needs_cache])
        self._speculation.fork(leader, [row for row in others if row.needs_cache])
        for row in prefill.rows:
            row.namespace = prefill.namespace
            going_on = self._guessed_rows if self._speculation.is_ready(row) else self._decoding_rows
            going_on[row] = None
        self._decoding = None

    def end(self, row: Row) -> None:
        """Removes an ended sequence. The prefix cache keeps its tokens, for the next turn of a conversation."""
        if self.cache.seat(row) is not None and row.namespace == self._namespaces.of(row.job):
            self.table.note(row)
            # The newest token is not in the cache yet.
            self._keep(row, row.namespace, row.sequence()[:-1])
        self._release(row)

    def remove(self, job: Job) -> None:
        """Removes the sequences of a job, except those that have ended."""
        for row in job.rows:
            self._release(row)
        self._waiting = deque(row for row in self._waiting if row.job is not job)

    def park(self) -> None:
        """Preempts all sequences. They keep their tokens."""
        for row in sorted(self.under_way(), key=lambda row: row.order, reverse=True):
            self._release(row)
            self._waiting.appendleft(row)

    def clear(self) -> None:
        self._waiting.clear()
        self._prefills.clear()
        self._decoding_rows.clear()
        self._guessed_rows.clear()
        self._decoding = None
        self.table = Table()
        self.cache.clear()
        self._speculation.clear()

    def _is_served(self, row: Row) -> bool:
        return row.job.adapter_id is None or row.job.adapter_id in self._served

    def _keep(self, row: Row, namespace: int, sequence: np.ndarray) -> None:
        """Stores the sequence in the prefix caches of the model and of its draft."""
        self.cache.keep(row, namespace, sequence)
        self._speculation.keep(row, namespace, sequence)

    def _release(self, row: Row) -> None:
        """Frees the line and the slots of a sequence. Ignored if it is not admitted."""
        if row.line == NOWHERE:
            return
        self.table.leave(row)
        self.cache.remove(row)
        self._decoding_rows.pop(row, None)
        self._guessed_rows.pop(row, None)
        self._speculation.forget(row)
        self._decoding = None
        for prefill in self._prefills:
            if row in prefill.rows:
                prefill.rows.remove(row)
        self._prefills = [prefill for prefill in self._prefills if prefill.rows]

    def _no_room(self, row: Row, length: int) -> NoRoom:
        needed = length * self.cache.bytes_per_token
        return NoRoom(
            row,
            f"a sequence of {length} tokens needs {needed} bytes of key/value cache, more than kv_cache_bytes"
            f" {self.cache.budget_bytes}: lower max_tokens, shorten the prompt or start the server with a larger"
            " --kv-cache-bytes",
        )

    # Room for decoding

    def make_room_to_guess(self) -> None:
        """Makes room for the draft tokens of all sequences that use a draft, by preempting the youngest. Raises NoRoom.

        A preempted sequence resumes at the same token and with its draft: else its tokens would depend on which other
        requests run.
        """
        for row in sorted(self._guessed_rows, key=lambda row: row.order):
            while row in self._guessed_rows and not self._has_room_to_guess(row):
                self._preempt_youngest()

    def _has_room_to_guess(self, row: Row) -> bool:
        seat = self.cache.seat(row)
        assert seat is not None
        count = int(self.table.count[row.line])
        length = int(self.table.length[row.line]) + self._speculation.num_next(row, count)
        has_room = length <= seat.capacity or self._grow(row, length)
        return has_room and self._speculation.has_room(row, count)

    def _guess_part(self, row: Row, guesses: Guesses) -> GuessPart:
        tokens = np.concatenate([[self.table.newest[row.line]], guesses.tokens])
        return GuessPart(row, int(self.table.length[row.line]) - 1, tokens)

    def _make_room(self) -> None:
        """Makes room for the next token of all decoding sequences, by preempting the youngest."""
        decoding = self._current_decoding()
        for row in decoding.outgrown(self.table) if decoding is not None else ():
            while row in self._decoding_rows and not self._grow(row, int(self.table.length[row.line])):
                self._preempt_youngest()

    def _current_decoding(self) -> Decoding | None:
        if self._decoding_rows and (self._decoding is None or self._decoding.has_moved):
            self._decoding = Decoding(list(self._decoding_rows), self.cache, self._device, self._num_threads)
        return self._decoding

    def _grow(self, row: Row, length: int) -> bool:
        if not self.cache.grow(row, self._with_headroom(row, length)) and not self.cache.grow(row, length):
            return False
        self._decoding = None
        return True

    def _with_headroom(self, row: Row, length: int) -> int:
        """Adds spare tokens, so that the slot need not grow again at once."""
        return max(length, min(length + SHORTEST, row.longest_cached))

    def _preempt_youngest(self) -> None:
        """Preempts the youngest sequence. If it is alone, only its own slot is in the way of the longer one."""
        under_way = self.under_way()
        youngest = max(under_way, key=lambda row: row.order)
        length = int(self.table.length[youngest.line])
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
        num_logits = sum(map(self._num_logits, self.under_way()))
        while self._waiting and num_logits < self._config.head_chunk_tokens:
            row = self._waiting[0]
            num_logits += self._num_logits(row)
            if not self._is_served(row):
                return
            if self._prefills and self._prefills[-1].takes(row):
                admitted = self._follow(self._prefills[-1], row)
            elif budget <= 0:
                return
            else:
                admitted = self._begin(row)
                budget -= self._prefills[-1].remaining if admitted else 0
            if not admitted and not self._is_alone():
                return
            if not admitted:
                raise self._no_room(row, row.length + 1)

    def _num_logits(self, row: Row) -> int:
        """Returns how many rows of logits one pass computes for the sequence."""
        return 1 + (self._speculation.num_guesses(row) if self._speculation.wants(row) else 0)

    def _prefill_budget(self) -> int:
        """Returns the most prompt tokens of an iteration: few if other sequences decode meanwhile."""
        has_others = self._decoding_rows or self._guessed_rows
        return self._config.prefill_chunk_tokens if has_others else self._config.micro_batch_tokens

    def _follow(self, prefill: Prefill, row: Row) -> bool:
        row.goes_alone |= prefill.rows[0].goes_alone
        self._note_whether_alone(row, prefill.namespace)
        if row.needs_cache and not self._place(row):
            return False
        prefill.rows.append(row)
        self._enter(row)
        return True

    def _begin(self, row: Row) -> bool:
        namespace = self._namespaces.of(row.job)
        self._note_whether_alone(row, namespace)
        # With a draft, the newest token runs together with the next draft tokens.
        draws = not (len(row.tokens) and self._is_guessed(row))
        sequence = row.sequence() if draws else row.sequence()[:-1]
        known = self.cache.prefixes.find(namespace, sequence, self._num_reusable(row, len(sequence)))
        told: Sequence[Stretch] = ()
        if self._is_guessed(row):
            # Both must start at the same token: the draft needs the target's hidden states of all later ones.
            told = self._speculation.known(row, namespace, sequence, length_of(known))
            known = beginning(known, length_of(told))
        needs_slot = row.needs_cache or self._is_long(len(sequence) - length_of(known), len(sequence))
        cached = (needs_slot or bool(known)) and self._place(row)
        if needs_slot and not cached:
            return False
        if cached and known:
            self.cache.restore(row, known)
        if cached and told:
            self._speculation.restore(row, told)
        prefill = Prefill([row], sequence, cached, namespace, length_of(known) if cached else 0, draws)
        if row.job.num_cache_hits is None:
            row.job.num_cache_hits = prefill.computed
        self._prefills.append(prefill)
        self._enter(row)
        return True

    def _is_long(self, num_tokens: int, length: int) -> bool:
        """True if the tokens must run in chunks. Those that exceed the whole cache run in one pass, uncached."""
        return num_tokens > self._prefill_budget() and self.cache.fits_alone(length)

    def _num_reusable(self, row: Row, length: int) -> int:
        """Returns how many of the sequence's tokens the prefix cache may replace. The last one must always run.

        A sequence that has sampled tokens has had its prompt scored.
        """
        return min(length - 1, row.job.num_reusable + len(row.tokens))

    def _place(self, row: Row) -> bool:
        if self._is_guessed(row):
            return self._place_with_draft(row)
        if self.cache.place(row, self._with_headroom(row, row.length)):
            return True
        # A tight slot is only for a sequence without others: it would soon be preempted again.
        return not self.table.num_lines and self.cache.place(row, row.length + 1)

    def _note_whether_alone(self, row: Row, namespace: int) -> None:
        """Decides to decode without the draft if both exceed an empty cache or it has not paid off lately."""
        if self._is_guessed(row):
            of_draft = self._speculation.num_bytes(row, _next_count(row))
            is_too_large = self.cache.num_bytes_for(self._length_to_guess(row)) + of_draft > self.cache.budget_bytes
            may_pay = self._speculation.may_pay(row, namespace, 1 + len(self.under_way()))
            row.goes_alone = is_too_large or not may_pay

    def _length_to_guess(self, row: Row) -> int:
        """Returns how many tokens the cache must hold for the next draft tokens."""
        count = _next_count(row)
        return len(row.job.prompt) + count + self._speculation.num_next(row, count)

    def _place_with_draft(self, row: Row) -> bool:
        length, count = self._length_to_guess(row), _next_count(row)
        for wanted in [self._with_headroom(row, length), *([] if self.table.num_lines else [length])]:
            if self.cache.place(row, wanted):
                if self._speculation.place(row, count):
                    return True
                self.cache.remove(row)
        return False

    def _is_guessed(self, row: Row) -> bool:
        """True if the sequence uses a draft from its first sampled token on."""
        return row.needs_cache and self._speculation.wants(row)

    def _is_alone(self) -> bool:
        """True if nothing is in flight, in other samplers neither."""
        return not self.table.num_lines and not self.cache.budget.held_bytes()

    def _enter(self, row: Row) -> None:
        self._waiting.popleft()
        self.table.enter(row)


def _next_count(row: Row) -> int:
    """Returns the number of sampled tokens before the next draft tokens. The first token is sampled without them."""
    return max(1, len(row.tokens))
