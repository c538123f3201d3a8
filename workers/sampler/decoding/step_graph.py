"""Repeats a decode step on a GPU as a CUDA graph: its hundreds of kernels take longer to launch than to run."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

# Failed captures of other batches than those that succeed are cheap; after so many in a row, none is tried.
_MOST_FAILURES = 8


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
