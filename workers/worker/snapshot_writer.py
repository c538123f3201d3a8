"""Writes the state of runs to disk in background threads, while the rank computes."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ..checkpoint import TrainedState, save
from ..protocol.calls import Failure

logger = logging.getLogger(__name__)

_NUM_THREADS = 2


class SnapshotWriter:
    """Writes one rank's snapshots. The caller bounds how many at a time, because each holds a copy in memory."""

    def __init__(self, device: torch.device, base_name: str) -> None:
        self._device = device
        self.base_name = base_name
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "snapshot", initializer=_use_one_thread)
        self._writing: dict[int, Future[None]] = {}
        self._forgotten: list[Future[None]] = []

    def begin(self, snapshot_id: int, state: TrainedState, directory: Path) -> None:
        """Copies the state and writes it in the background; the model may change at once. Errors are reported by
        `take_ended`.

        A snapshot that only other ranks write counts as ended here.
        """
        if not state.has_part_to_write:
            self._writing[snapshot_id] = _done()
            return
        copy, event = state.copied(), None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        # Passed in a list that the thread empties: any other reference would keep the device's memory alive.
        self._writing[snapshot_id] = self._threads.submit(self._write, [copy], event, directory)

    def forget(self, snapshot_id: int) -> None:
        """Forgets a snapshot that other ranks could not begin; its files may still be written."""
        if (writing := self._writing.pop(snapshot_id, None)) is not None:
            self._forgotten = [each for each in (*self._forgotten, writing) if not each.done()]

    def take_ended(self) -> dict[int, Failure | None]:
        """Returns the snapshots that have ended since the last call; None means written."""
        done = [snapshot_id for snapshot_id, writing in self._writing.items() if writing.done()]
        return {snapshot_id: _outcome(self._writing.pop(snapshot_id)) for snapshot_id in done}

    def wait(self) -> None:
        """Waits until none is being written and forgets them."""
        wait([*self._writing.values(), *self._forgotten])
        self._writing.clear()

    def _write(self, taken: list[TrainedState], copied: torch.cuda.Event | None, directory: Path) -> None:
        state = taken.pop()
        if copied is not None:
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                torch.cuda.current_stream(self._device).wait_event(copied)
                state = state.mapped(Tensor.cpu)
        try:
            save(state, directory, base_name=self.base_name)
        except Exception:
            if directory.exists():
                raise
            raise FileNotFoundError(f"{directory} was removed while it was written") from None


def _use_one_thread() -> None:
    """Limits the thread to one core, leaving the others to computation. Reading the number first matters: see
    `lanes`.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


def _done() -> "Future[None]":
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _outcome(writing: "Future[None]") -> Failure | None:
    error = writing.exception()
    if error is None:
        return None
    if isinstance(error, OperationError):
        return Failure.of(error)
    if not isinstance(error, OSError):  # an OSError's message suffices
        logger.error("a run was not saved", exc_info=error)
    return Failure(f"the run cannot be saved: {type(error).__name__}: {error}", "server")
