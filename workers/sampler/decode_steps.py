"""Decode steps that follow each other, and how a step that was recorded is repeated.

A GPU repeats a step as a CUDA graph: its hundreds of kernels take longer to launch than to run.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..lora import BatchPlan
from ..ops.kernels import StepRecorder, new_step_tape
from ..ops.kv_cache import CachedRow
from .batch import DecodeRows
from .cache.cache import SlotPool
from .requests.token_choice import uniforms
from .sampling import SamplingMetadata

_log = logging.getLogger(__name__)

# Capturing a step takes about as long as running it.
_WORTH_CAPTURE = 4

# Failed captures of other batches than those that succeed are cheap; after so many in a row, none is tried.
_MOST_FAILURES = 8

# Noise is computed for this many steps at a time.
_NOISE_STEPS = 16


class StepGraphs:
    """Captures the decode steps of one sampler on a GPU, if they can be captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._num_failures = 0

    def new(self) -> "StepGraph | None":
        """Returns an empty graph, or None if captures have failed too often."""
        return StepGraph(self) if self._num_failures < _MOST_FAILURES else None

    def report(self, error: RuntimeError | None) -> None:
        """Takes whether a capture failed. The first failure in a row is logged."""
        self._num_failures = 0 if error is None else self._num_failures + 1
        if error is not None and self._num_failures == 1:
            reason = str(error).partition("\n")[0]
            _log.warning("a decode step on %s runs without a CUDA graph, which is slower: %s", self.device, reason)
            _log.debug("what could not be captured", exc_info=error)


class StepGraph:
    """Captures what a function computes on a GPU.

    `repeat` computes the same again, from and to the same tensors: what changes from call to call must be overwritten
    in place. can_repeat: False if the function waits for the GPU, or reads numbers from it.
    """

    def __init__(self, graphs: StepGraphs) -> None:
        self.can_repeat = True
        self._graphs = graphs
        self._graph = torch.cuda.CUDAGraph()
        self._result = torch.empty(0)

    def record(self, compute: Callable[[], Tensor]) -> Tensor:
        """Calls the function and returns its result."""
        try:
            self._capture(compute)
        except RuntimeError as error:
            self.can_repeat = False
            self._graphs.report(error)
            return compute()
        self._graphs.report(None)
        return self.repeat()

    def repeat(self) -> Tensor:
        """Returns the tensor that `record` returned, overwritten."""
        self._graph.replay()
        return self._result

    def _capture(self, compute: Callable[[], Tensor]) -> None:
        stream = self._graphs.stream
        stream.wait_stream(torch.cuda.current_stream(self._graphs.device))
        with torch.cuda.stream(stream):
            # Other threads of the worker copy and allocate meanwhile.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._result = compute()
            finally:
                self._graph.capture_end()


class DecodeSteps:
    """Computes consecutive steps of the same sequences from and to the same tensors, one row for each sequence.

    On a GPU other sequences can take over rows, and rows can be idle: so a captured step serves many batches. An idle
    row computes what is not read, in an unused slot.
    """

    def __init__(self, rows: DecodeRows, vocab_size: int, device: torch.device, graphs: StepGraphs | None) -> None:
        self.adapter_spans = rows.adapter_spans()
        """The adapters of all rows."""
        self.plan: BatchPlan | None = None
        """The plan of the adapters, of the last step."""
        self.tokens = torch.from_numpy(rows.tokens()).to(device)
        """The input of the next step, int64, [rows]."""
        self.positions = torch.from_numpy(rows.positions()).to(device)
        self._rows, self._vocab_size, self._device, self._graphs = rows, vocab_size, device, graphs
        left = rows.steps_left()
        self._steps_left = int(np.median(left)) if graphs is not None else int(left.min())
        # With other sequences a captured step may run to the end of the slots.
        self._steps = rows.steps(1 + int(left.min()) if graphs is None else None)
        self._num_resizes = [step.tensors.num_resizes for step in self._steps]
        self._num_run = 0
        self._recorded: StepRecorder | None = None
        self._weights: object = None
        self._busy: Tensor | None = None
        self._idle_pools: Sequence[SlotPool] = ()
        self._advances: Sequence[Tensor] = ()
        self._begin(rows)

    @property
    def is_current(self) -> bool:
        """True if the cache still has the same slots, and unused ones for idle rows."""
        same = self._num_resizes == [step.tensors.num_resizes for step in self._steps]
        return same and all(pool.num_free for pool in self._idle_pools)

    def packing(self) -> CachedRow:
        return CachedRow(self._steps, (), None, len(self.tokens), ())

    def serve(self, decoding: DecodeRows) -> bool:
        """Makes these sequences those of the next step. Returns False if new rows serve them better."""
        lengths = decoding.table.length[decoding.lines]
        is_same = self._decoding is decoding and np.array_equal(lengths, self._lengths + self._num_served)
        return (is_same and self.is_current) or self._give_rows_to(decoding)

    def _give_rows_to(self, decoding: DecodeRows) -> bool:
        if not (isinstance(self._recorded, StepGraph) and self._recorded.can_repeat):
            return False
        if 2 * len(decoding.lines) < len(self.tokens) or (rows := self._rows.rows_for(decoding)) is None:
            return False
        is_idle = np.ones(len(self.tokens), np.bool_)
        is_idle[rows] = False
        self._idle_pools = self._rows.pools_of(is_idle)
        if not self.is_current:
            return False
        tokens, positions = np.zeros((2, len(is_idle)), np.int64)
        tokens[rows], positions[rows] = decoding.tokens(), decoding.positions()
        self._rows.place(self._steps, decoding, rows, positions)
        self.tokens.copy_(torch.from_numpy(tokens))
        self.positions.copy_(torch.from_numpy(positions))
        self._busy = torch.from_numpy(rows).to(self._device)
        advances = torch.from_numpy(~is_idle).to(self._device, torch.int64)
        self._advances = [advances, *(advances[step.rows] for step in self._steps)]
        self._begin(decoding)
        return True

    def noise(self) -> Tensor:
        """Returns the noise for the tokens of the next step, float32 in [0, 1), [sequences]."""
        number = self._num_served % _NOISE_STEPS
        if number == 0:
            keys = self._decoding.table.noise_key[self._decoding.lines, None]
            positions = self._lengths[:, None] + self._num_served + np.arange(_NOISE_STEPS)
            drawn = np.ascontiguousarray(uniforms(keys, positions).T)
            self._noise = torch.from_numpy(drawn).to(self._device, torch.float32)
        return self._noise[number]

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
        self._num_served += 1
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

    def _begin(self, decoding: DecodeRows) -> None:
        self._decoding, self._lengths, self._num_served = decoding, decoding.table.length[decoding.lines], 0
        self.metadata = SamplingMetadata(decoding.sequences, decoding.table, self._vocab_size, self._device)
        self._noise = torch.empty(0)

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
