"""The rows that decode steps compute, and how a step that was recorded is repeated."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...lora import BatchPlan
from ...ops.kernels import StepRecorder, new_step_tape
from ...ops.kv_cache import CachedRow
from ..cache.cache import SlotPool
from ..requests.sequence_table import SequenceTable
from .batch import AdapterSpan, DecodeBatch
from .step_graph import StepGraph, StepGraphs

# Capturing a step takes about as long as running it.
_WORTH_CAPTURE = 4


class DecodeRows:
    """Computes consecutive decode steps from and to the same tensors, one row for each sequence.

    On a GPU other sequences can take over rows, and rows can be idle: so a captured step serves many batches. An idle
    row computes what is not read, in an unused slot.

    adapter_spans: of all rows.
    tokens, positions: the input of the next step, int64, [rows].
    plan: of the adapters of its last step.
    """

    def __init__(
        self, decoding: DecodeBatch, table: SequenceTable, device: torch.device, graphs: StepGraphs | None
    ) -> None:
        self.adapter_spans: Sequence[AdapterSpan] = decoding.adapter_spans
        self._decoding, self._device, self._graphs = decoding, device, graphs
        left = decoding.steps_left(table)
        self._steps_left = int(np.median(left)) if graphs is not None else int(left.min())
        # With other sequences a captured step may run to the end of the slots.
        self._steps = decoding.steps(table, 1 + int(left.min()) if graphs is None else None)
        self._num_resizes = [step.tensors.num_resizes for step in self._steps]
        self._num_run = 0
        self._recorded: StepRecorder | None = None
        self._weights: object = None
        self._busy: Tensor | None = None
        self._idle_pools: Sequence[SlotPool] = ()
        self._advances: Sequence[Tensor] = ()
        self.plan: BatchPlan | None = None
        self.tokens = torch.from_numpy(table.newest[decoding.lines]).to(device)
        self.positions = torch.from_numpy(table.length[decoding.lines] - 1).to(device)

    @property
    def is_current(self) -> bool:
        """True if the cache still has the same slots, and unused ones for idle rows."""
        same = self._num_resizes == [step.tensors.num_resizes for step in self._steps]
        return same and all(pool.num_free for pool in self._idle_pools)

    def packing(self) -> CachedRow:
        return CachedRow(self._steps, (), None, len(self.tokens), ())

    def give_to(self, decoding: DecodeBatch, table: SequenceTable) -> bool:
        """Gives the rows to the sequences of another batch. Returns False if new rows serve them better."""
        if not (isinstance(self._recorded, StepGraph) and self._recorded.can_repeat):
            return False
        if 2 * len(decoding.lines) < len(self.tokens) or (rows := self._decoding.rows_for(decoding)) is None:
            return False
        is_idle = np.ones(len(self.tokens), np.bool_)
        is_idle[rows] = False
        self._idle_pools = self._decoding.pools_of(is_idle)
        if not self.is_current:
            return False
        tokens, positions = np.zeros((2, len(is_idle)), np.int64)
        tokens[rows], positions[rows] = table.newest[decoding.lines], table.length[decoding.lines] - 1
        self._decoding.place(self._steps, decoding, rows, positions)
        self.tokens.copy_(torch.from_numpy(tokens))
        self.positions.copy_(torch.from_numpy(positions))
        self._busy = torch.from_numpy(rows).to(self._device)
        advances = torch.from_numpy(~is_idle).to(self._device, torch.int64)
        self._advances = [advances, *(advances[step.rows] for step in self._steps)]
        return True

    def run(self, compute: Callable[[], Tensor], weights: object) -> Tensor:
        """Returns what the function computes for the sequences in the next step, of the results of all rows.

        The second step is recorded, and those after it repeat it if they can.

        Args:
            weights: compares equal as long as the weights that the function uses are in the same places.
        """
        found = self._run(compute, weights)
        self._num_run += 1
        return found if self._busy is None else found.index_select(0, self._busy)

    def advance(self, tokens: Tensor) -> None:
        """Makes the tokens [sequences] the input of the next step."""
        if self._busy is None:
            self.tokens.copy_(tokens)
            self.positions += 1
            for step in self._steps:
                step.advance()
            return
        self.tokens.index_copy_(0, self._busy, tokens)
        of_all, *of_steps = self._advances
        self.positions += of_all
        for step, by in zip(self._steps, of_steps, strict=True):
            step.advance(by)

    def _run(self, compute: Callable[[], Tensor], weights: object) -> Tensor:
        if weights != self._weights:
            self._weights, self._recorded = weights, None
        if self._recorded is not None and self._recorded.can_repeat:
            return self._recorded.repeat()
        if self._recorded is not None or self._num_run == 0 or (recorder := self._new_recorder()) is None:
            return compute()
        self._recorded = recorder
        found = recorder.record(compute)
        recorder.can_repeat &= all(step.is_steady for step in self._steps)
        return found

    def _new_recorder(self) -> StepRecorder | None:
        if self._graphs is None:
            return new_step_tape() if self._device.type == "cpu" else None
        return self._graphs.new() if self._steps_left - self._num_run >= _WORTH_CAPTURE else None
