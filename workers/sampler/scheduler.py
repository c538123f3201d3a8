"""Schedules sequences: waiting, prefill, decoding, or decoding with draft tokens; and gives them slots in the KV cache.

Sequences are admitted in order of arrival. If the cache is full, the youngest are preempted: they wait, and are
prefilled again later.
"""

from collections import deque
from collections.abc import Collection

from ...schemas.errors import OperationError
from ..models.model import BaseModel
from ..protocol.worker_config import WorkerConfig
from .batch import Batch, Chunk, DecodeRows, Prefill
from .cache.cache import KVCache
from .requests.jobs import NOWHERE, Job, SequenceState
from .requests.sequence_table import SequenceTable
from .slots import SequenceSlots


class KVCacheFull(OperationError):
    """The sequence does not fit into an empty cache. length: the tokens that it needs room for."""

    def __init__(self, sequence: SequenceState, length: int, cache: KVCache) -> None:
        super().__init__(
            f"a sequence of {length} tokens needs {cache.size.bytes_of(length)} bytes of key/value cache, more than"
            f" kv_cache_bytes {cache.budget_bytes}: lower max_tokens, shorten the prompt or start the server with a"
            " larger --kv-cache-bytes"
        )
        self.sequence = sequence


class SequenceScheduler:
    """Decides what each pass runs; `table` has a line for each sequence that is admitted."""

    def __init__(self, slots: SequenceSlots, config: WorkerConfig, base: BaseModel) -> None:
        self.slots, self.table = slots, SequenceTable()
        self._config, self._base = config, base
        self._served: Collection[str] = ()
        self._waiting: deque[SequenceState] = deque()
        self._prefills: list[Prefill] = []
        self._decoding: dict[SequenceState, None] = {}
        self._drafting: dict[SequenceState, None] = {}
        self._decode_rows: DecodeRows | None = None
        self.batch: Batch | None = None
        """The batch that runs now, or ran last."""

    @property
    def is_idle(self) -> bool:
        """True if no sequence is admitted, and the first that waits cannot be."""
        return not self.table.num_lines and not (self._waiting and self._is_served(self._waiting[0]))

    def admitted(self) -> list[SequenceState]:
        prefilled = (sequence for prefill in self._prefills for sequence in prefill.sequences)
        return [*self._decoding, *self._drafting, *prefilled]

    def with_drafts(self) -> list[SequenceState]:
        return list(self._drafting)

    @property
    def num_sampled(self) -> int:
        return len(self._decoding) + len(self._drafting)

    def may_start_drafting(self, sequence: SequenceState) -> bool:
        """True if the sequence waits or is in prefill, and a draft may serve it."""
        is_sampled = sequence in self._decoding or sequence in self._drafting
        return sequence.stop_reason is None and not is_sampled and sequence.may_use_draft

    def stop_drafting(self, sequence: SequenceState) -> None:
        """Lets a sequence with draft tokens continue without them."""
        del self._drafting[sequence]
        self.slots.stop_drafting(sequence, self.table)
        self._decoding[sequence] = None
        self._decode_rows = None

    def serve(self, adapter_ids: Collection[str], draft_ids: Collection[str]) -> None:
        """Admits from now on only sequences of these adapters and of the base model, and drafts only with these."""
        self._served = adapter_ids
        if self.slots.proposer is not None:
            self.slots.proposer.serve(draft_ids)
        for sequence in self.with_drafts():
            if not self.slots.is_drafting(sequence):
                self.stop_drafting(sequence)

    def add(self, job: Job) -> None:
        """Appends the job's sequences to the queue. Raises OperationError if one can never fit into the cache."""
        first = job.sequences[0]
        # Without the user's max_tokens a sample may end long before the context is full.
        length = first.length + 1 if job.spec.fills_context else first.longest_cached
        if first.needs_cache and not self.slots.cache.fits_alone(length):
            raise KVCacheFull(first, length, self.slots.cache)
        self._waiting.extend(job.sequences)

    def schedule(self) -> Batch:
        """Returns what runs next; without tokens if nothing can.

        Raises:
            KVCacheFull: a sequence does not fit. The caller may remove it and continue.
        """
        if self.batch is not None and self.batch.is_repeated:
            return self.batch
        self._make_room_for_drafts()
        proposer = self.slots.proposer
        proposed = proposer.propose(self.with_drafts(), self.table) if proposer is not None else {}
        self._make_room()
        self._admit()
        budget = self._prefill_budget()
        chunks = [Chunk.of_draft(sequence, proposed[sequence], self.table) for sequence in self._drafting]
        for prefill in self._prefills:
            length = min(prefill.until_border, budget) if prefill.cached else prefill.remaining
            if length > 0:
                chunks.append(prefill.next_chunk(length))
                budget -= length
        self.batch = Batch(self._current_rows(), chunks)
        return self.batch

    def end_chunk(self, chunk: Chunk) -> None:
        """Records that a chunk has run. After the last one of a prefill its sequences decode."""
        if (prefill := chunk.prefill) is None:
            return
        prefill.computed = chunk.stop
        self.slots.store_chunk(chunk, prefill)
        if not chunk.is_last:
            return
        self._prefills.remove(prefill)
        leader, *others = prefill.sequences
        self.slots.fork(leader, others, prefill.cached)
        for sequence in prefill.sequences:
            sequence.weight_version = prefill.weight_version
            joined = self._drafting if self.slots.is_drafting(sequence) else self._decoding
            joined[sequence] = None
        self._decode_rows = None

    def end(self, sequence: SequenceState) -> None:
        """Removes an ended sequence. The prefix cache keeps its tokens, for the next turn of a conversation."""
        if self.slots.cache.has_slot(sequence):
            self.table.copy_to(sequence)
            # The newest token is not in the cache yet.
            self.slots.store_prefix(sequence, sequence.weight_version, sequence.token_ids()[:-1])
        self._release(sequence)

    def remove(self, job: Job) -> None:
        """Removes the sequences of a job, except those that have ended."""
        for sequence in job.sequences:
            self._release(sequence)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.job is not job)

    def preempt_all(self) -> None:
        for sequence in sorted(self.admitted(), key=lambda sequence: sequence.order, reverse=True):
            self._preempt(sequence)

    def clear(self) -> None:
        self._waiting.clear()
        self._prefills.clear()
        self._decoding.clear()
        self._drafting.clear()
        self.forget_tensors()
        self.slots.clear()

    def forget_tensors(self) -> None:
        """Frees the memory of a table without lines, which may have grown for one long sample."""
        self.table = SequenceTable()
        self._decode_rows = self.batch = None

    def _is_served(self, sequence: SequenceState) -> bool:
        return sequence.job.adapter_id is None or sequence.job.adapter_id in self._served

    def _release(self, sequence: SequenceState) -> None:
        """Frees the line and the slots of a sequence. Ignored if it is not admitted."""
        if sequence.line == NOWHERE:
            return
        self.table.remove(sequence)
        self.slots.free(sequence)
        self._decoding.pop(sequence, None)
        self._drafting.pop(sequence, None)
        self._decode_rows = None
        for prefill in self._prefills:
            if sequence in prefill.sequences:
                prefill.sequences.remove(sequence)
        self._prefills = [prefill for prefill in self._prefills if prefill.sequences]

    # Room for decoding

    def _make_room_for_drafts(self) -> None:
        """Makes room for the draft tokens of all sequences that use a draft, by preempting the youngest. Raises
        KVCacheFull.

        A preempted sequence resumes at the same token and with its draft: else its tokens would depend on which other
        requests run.
        """
        for sequence in sorted(self._drafting, key=lambda sequence: sequence.order):
            while sequence in self._drafting and not self.slots.has_room_to_draft(sequence, self.table):
                self._preempt_youngest()

    def _make_room(self) -> None:
        """Makes room for the next token of all decoding sequences, by preempting the youngest."""
        for sequence in self._current_rows().outgrown():
            while sequence in self._decoding and not self.slots.grow(sequence, int(self.table.length[sequence.line])):
                self._preempt_youngest()
            self._decode_rows = None

    def _current_rows(self) -> DecodeRows:
        if self._decode_rows is None or self._decode_rows.has_moved:
            device, num_threads = self._base.device, self._base.threads.most
            self._decode_rows = DecodeRows([*self._decoding], self.table, self.slots.cache, device, num_threads)
        return self._decode_rows

    def _preempt_youngest(self) -> None:
        """Preempts the youngest sequence. If it is alone, only its own slot is in the way of the longer one."""
        under_way = self.admitted()
        youngest = max(under_way, key=lambda sequence: sequence.order)
        length = int(self.table.length[youngest.line])
        if len(under_way) == 1 and not self.slots.cache.fits_alone(length):
            raise KVCacheFull(youngest, length, self.slots.cache)
        self._preempt(youngest)

    def _preempt(self, sequence: SequenceState) -> None:
        self._release(sequence)
        self._waiting.appendleft(sequence)

    # Admission

    def _admit(self) -> None:
        """Admits waiting sequences in order, until one does not fit or enough prompt tokens are in prefill.

        A sequence whose adapter is not served blocks those behind it, or it could wait forever.
        """
        most = self._prefill_budget()
        budget = most - sum(prefill.remaining for prefill in self._prefills)
        num_logits = sum(map(self.slots.num_logits, self.admitted()))
        while self._waiting and num_logits < self._config.head_chunk_tokens:
            sequence = self._waiting[0]
            num_logits += self.slots.num_logits(sequence)
            if not self._is_served(sequence):
                return
            num_admitted = self.table.num_lines
            if self._prefills and self._prefills[-1].matches(sequence):
                is_placed = self.slots.join_prefill(self._prefills[-1], sequence, num_admitted)
            elif budget <= 0:
                return
            elif is_placed := (prefill := self.slots.new_prefill(sequence, num_admitted, most)) is not None:
                self._prefills.append(prefill)
                budget -= prefill.remaining
            if not is_placed:
                # Nothing else is in flight, in other samplers neither.
                if not num_admitted and not self.slots.cache.budget.held_bytes():
                    raise KVCacheFull(sequence, sequence.length + 1, self.slots.cache)
                return
            self._waiting.popleft()
            self.table.add(sequence)

    def _prefill_budget(self) -> int:
        """Returns the most prompt tokens of an iteration: few if other sequences decode meanwhile."""
        has_others = self._decoding or self._drafting
        return self._config.prefill_chunk_tokens if has_others else self._config.micro_batch_tokens
