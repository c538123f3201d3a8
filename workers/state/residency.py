"""Decides which learners are on the device, which in host memory, and which on disk.

The least recently used ones are moved: from the device to the host when the slots are full, from the host to the disk
when host_bytes are exceeded. On a CPU, device and host are the same memory, so moving between them copies nothing.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ..ops.memory import is_out_of_memory, reporting_out_of_memory
from .page_file import FilePage, PageFile
from .trainable import Trainable
from .vectors import STEP_VECTORS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskPage:
    """A learner's page on disk.

    vectors: on the meta device, by name. num_changes: StateVectors.num_changes when the page was written.
    """

    page: FilePage
    vectors: Mapping[str, Tensor]
    num_changes: int


class Residency:
    """The learners of one kind and base, by place and least recently used first.

    slots: most learners on the device. host_bytes: most bytes of learners in host memory. None means no bound.
    directory: see PageFile. Learners with gradients never go to disk, so they may exceed host_bytes. moving_seconds:
    time spent moving since the start.
    """

    def __init__(
        self,
        device: torch.device,
        slots: int | None = None,
        host_bytes: int | None = None,
        directory: str | None = None,
    ) -> None:
        self._device = device
        self.slots = slots
        self._most_host_bytes = host_bytes
        self._pages = PageFile(directory)
        self._on_device: dict[Trainable, None] = {}
        self._on_host: dict[Trainable, int] = {}
        self._on_disk: dict[Trainable, None] = {}
        self._saved: dict[Trainable, DiskPage] = {}
        self._held: frozenset[Trainable] = frozenset()
        self._moved_bytes, self.moving_seconds = 0, 0.0

    def add(self, learner: Trainable) -> None:
        """Adds a new learner, which is on the device."""
        self._free_slots(1)
        self._on_device[learner] = None

    def make_room(self) -> None:
        """Frees a slot in advance, so that `add` cannot fail."""
        self._free_slots(1)

    def remove(self, learner: Trainable) -> None:
        self._on_device.pop(learner, None)
        self._on_host.pop(learner, None)
        self._on_disk.pop(learner, None)
        self._forget_page(learner)

    @contextmanager
    def resident(self, learners: Sequence[Trainable], wanted: frozenset[str] = STEP_VECTORS) -> Iterator[None]:
        """Keeps at least the wanted vectors of these learners on the device while inside.

        Raises:
            OperationError: one of them cannot be moved there.
        """
        before = self._held
        self._held = before.union(learners)
        assert self.slots is None or len(self._held) <= self.slots, (
            f"{len(self._held)} models wanted on the device at a time, more than its {self.slots} slots"
        )
        try:
            self._bring(learners, wanted)
            yield
        finally:
            self._held = before

    def leave_device(self) -> None:
        """Moves all learners to the host; on a CPU, whose memory that is, to the disk, except for those with gradients.

        Raises:
            OperationError: (server) the host has no room; the learners moved before have left the device.
        """
        with (
            self._timed(),
            reporting_out_of_memory("the trained state of models, on the host", "serve with more host memory"),
        ):
            for learner in tuple(self._on_device):
                self._to_host(learner)
            for learner in [each for each in self._on_host if each.gradients.is_empty]:
                if self._device.type == "cpu" and not self._to_disk(learner):
                    return
        self._bound_host()

    def memory(self, things: str) -> dict[str, int]:
        """Returns bytes in memory and by place, counts by place, and bytes and time of all moves since the start.

        Args:
            things: the learners' name in the keys.
        """
        parked = sum(learner.vectors.num_parked_bytes for learner in self._on_device)
        on_device = sum(learner.vectors.num_bytes for learner in self._on_device) - parked
        on_host = sum(self._on_host.values()) + parked
        return {
            things: on_device + on_host,
            f"{things}_on_device": on_device,
            f"{things}_on_host": on_host,
            f"{things}_on_disk": sum(self._saved[learner].page.num_bytes for learner in self._on_disk),
            f"num_{things}_on_device": len(self._on_device),
            f"num_{things}_on_host": len(self._on_host),
            f"num_{things}_on_disk": len(self._on_disk),
            f"{things}_moved_bytes": self._moved_bytes,
            f"{things}_moved_milliseconds": round(1000 * self.moving_seconds),
        }

    def _bring(self, learners: Sequence[Trainable], wanted: frozenset[str]) -> None:
        absent = [learner for learner in dict.fromkeys(learners) if learner not in self._on_device]
        self._free_slots(len(absent))
        for learner in dict.fromkeys(learners):
            if learner in absent or learner.vectors.are_on_host(wanted):
                with self._timed():
                    self._to_device(learner, wanted)
        for learner in learners:
            self._on_device[learner] = self._on_device.pop(learner)

    def _free_slots(self, num_coming: int) -> None:
        if self.slots is None:
            return
        num_leaving = len(self._on_device) + num_coming - self.slots
        for learner in [each for each in self._on_device if each not in self._held][: max(num_leaving, 0)]:
            with self._timed():
                self._to_host(learner)
        self._bound_host()

    def _bound_host(self) -> None:
        if self._most_host_bytes is None:
            return
        surplus = sum(self._on_host.values()) - self._most_host_bytes
        idle = ((each, num_bytes) for each, num_bytes in tuple(self._on_host.items()) if each.gradients.is_empty)
        for learner, num_bytes in idle:
            if surplus <= 0 or not self._to_disk(learner):
                return
            surplus -= num_bytes

    def _to_host(self, learner: Trainable) -> None:
        if self._device.type != "cpu":
            self._moved_bytes += (
                sum(each.nbytes for each in learner.live_vectors().values()) - learner.vectors.num_parked_bytes
            )
        learner.vectors.move("host", {}, {name: _on_host(each) for name, each in learner.live_vectors().items()})
        del self._on_device[learner]
        self._on_host[learner] = learner.vectors.num_bytes

    def _to_device(self, learner: Trainable, wanted: frozenset[str]) -> None:
        try:
            there = self._read(learner) if learner in self._on_disk else learner.live_vectors()
            parked = {
                name: each for name, each in there.items() if not (name in wanted or learner.vectors.is_on_device(name))
            }
            # A pinned vector is copied in stream order, before the device's next work; torch holds it until then.
            vectors = {
                name: vector.to(self._device, non_blocking=True) for name, vector in there.items() if name not in parked
            }
        except Exception as error:
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            raise OperationError(
                f"a model's trained state cannot be brought back from {learner.vectors.place}: {error}", "server"
            ) from None
        if self._device.type != "cpu" or learner in self._on_disk:
            self._moved_bytes += sum(
                each.nbytes for name, each in vectors.items() if not learner.vectors.is_on_device(name)
            )
        learner.vectors.move("device", vectors, parked)
        self._on_host.pop(learner, None)
        self._on_disk.pop(learner, None)
        self._on_device[learner] = None

    def _to_disk(self, learner: Trainable) -> bool:
        """Moves a learner to disk, and returns False if it cannot be written.

        If it has not changed since it was read, its page is still valid.
        """
        saved = self._saved.get(learner)
        if saved is None or saved.num_changes != learner.vectors.num_changes:
            self._forget_page(learner)
            try:
                self._write(learner)
            except OSError as error:
                logger.warning(
                    "a model's trained state, %d bytes, stays in host memory: %s", learner.vectors.num_bytes, error
                )
                return False
        learner.vectors.move("disk", {}, {})
        del self._on_host[learner]
        self._on_disk[learner] = None
        return True

    def _write(self, learner: Trainable) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        vectors = learner.live_vectors()
        page = self._pages.write(list(vectors.values()))
        shapes = {name: vector.to("meta") for name, vector in vectors.items()}
        self._saved[learner] = DiskPage(page, shapes, learner.vectors.num_changes)

    def _read(self, learner: Trainable) -> dict[str, Tensor]:
        saved = self._saved[learner]
        pinned = self._device.type == "cuda"
        vectors = {
            name: torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned) for name, each in saved.vectors.items()
        }
        self._pages.read(saved.page, list(vectors.values()))
        # An optimizer that was cleared on disk is still in the page.
        return vectors if learner.num_steps else {"weights": vectors["weights"]}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.moving_seconds += time.monotonic() - started

    def _forget_page(self, learner: Trainable) -> None:
        saved = self._saved.pop(learner, None)
        if saved is not None:
            self._pages.free(saved.page)


def _on_host(vector: Tensor) -> Tensor:
    """Copies to pinned memory while the device continues; the host must synchronize before it reads the copy."""
    if vector.device.type == "cpu":
        return vector
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True).copy_(vector, non_blocking=True)
