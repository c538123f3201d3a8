"""SnapshotWriter: brings the state of runs to disk in threads of its own, while the rank computes."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ..checkpoint import Learned, save
from ..protocol.verbs import Failure

logger = logging.getLogger(__name__)

_NUM_THREADS = 2


class SnapshotWriter:
    """Of one rank. Who begins snapshots bounds how many are under way: each holds a copy in memory."""

    def __init__(self, device: torch.device, base_name: str) -> None:
        self._device = device
        self._base_name = base_name
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "snapshot", initializer=_compute_alone)
        self._writing: dict[int, Future[None]] = {}
        self._forgotten: list[Future[None]] = []

    def begin(self, snapshot_id: int, learned: Learned, directory: Path) -> None:
        """The model may go on at once. What goes wrong from here on is told by `ended`. What only other ranks write has
        ended here."""
        if not learned.is_written_here:
            self._writing[snapshot_id] = _done()
            return
        copy, event = learned.kept(), None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        # In a list, from which the thread takes it: what else holds it would keep the device's memory.
        self._writing[snapshot_id] = self._threads.submit(self._write, [copy], event, directory)

    def forget(self, snapshot_id: int) -> None:
        """What other ranks could not begin is of no use; it may be written all the same."""
        if (writing := self._writing.pop(snapshot_id, None)) is not None:
            self._forgotten = [each for each in (*self._forgotten, writing) if not each.done()]

    def ended(self) -> dict[int, Failure | None]:
        """Each is told once; None: written."""
        done = [snapshot_id for snapshot_id, writing in self._writing.items() if writing.done()]
        return {snapshot_id: _outcome(self._writing.pop(snapshot_id)) for snapshot_id in done}

    def wait(self) -> None:
        """Until none is under way; who began them does not ask for them any more."""
        wait([*self._writing.values(), *self._forgotten])
        self._writing.clear()

    def _write(self, taken: list[Learned], copied: torch.cuda.Event | None, directory: Path) -> None:
        learned = taken.pop()
        if copied is not None:
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                torch.cuda.current_stream(self._device).wait_event(copied)
                learned = learned.mapped(Tensor.cpu)
        try:
            save(learned, directory, base_name=self._base_name)
        except Exception:
            if directory.exists():
                raise
            raise FileNotFoundError(f"{directory} was removed meanwhile") from None


def _compute_alone() -> None:
    """The cores are for who computes. Asked for first: see `lanes`."""
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
        return Failure(error.message, error.category)
    if not isinstance(error, OSError):  # of disks the message says enough
        logger.error("a run was not saved", exc_info=error)
    return Failure(f"the run cannot be saved: {type(error).__name__}: {error}", "server")
