"""Residency: which learners are on the device, which in host memory, which on disk.

The least recently used give way: from the device to the host when the slots are taken, from the host to the disk when
its bytes are spent. On a CPU device and host are the same memory, so there moving between them moves nothing.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ..ops.memory import is_out_of_memory, memory_for
from .page_file import Page, PageFile
from .trainable import STEP, Learner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A learner's page. vectors: by name, those that it has, on the meta device. num_changes: those that it holds (see
    Learner.num_changes)."""

    page: Page
    vectors: Mapping[str, Tensor]
    num_changes: int


class Residency:
    """The learners of one kind and base by where they are, the least recently used of a place first.

    slots: learners on the device. host_bytes: of those in host memory. None = no bound. directory: see PageFile.
    Those that hold gradients never go to disk, so host_bytes may be exceeded by them. moving_seconds: that moving has
    taken since the start.
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
        self._on_device: dict[Learner, None] = {}
        self._on_host: dict[Learner, int] = {}
        self._on_disk: dict[Learner, None] = {}
        self._saved: dict[Learner, Saved] = {}
        self._held: frozenset[Learner] = frozenset()
        self._moved_bytes, self.moving_seconds = 0, 0.0

    def add(self, learner: Learner) -> None:
        """A new one, made on the device."""
        self._free_slots(1)
        self._on_device[learner] = None

    def make_room(self) -> None:
        """For one more, so that `add` has nothing to do that may fail."""
        self._free_slots(1)

    def remove(self, learner: Learner) -> None:
        self._on_device.pop(learner, None)
        self._on_host.pop(learner, None)
        self._on_disk.pop(learner, None)
        self._forget_page(learner)

    @contextmanager
    def held(self, learners: Sequence[Learner], wanted: frozenset[str] = STEP) -> Iterator[None]:
        """Inside, these are on the device, at least the wanted vectors of each. Raises OperationError when one cannot
        be brought there."""
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
        """All go to the host; from a CPU, whose memory that is, to the disk, but for those that hold gradients.

        Raises OperationError (server) where the host has no room: the others have left then.
        """
        with self._timed(), memory_for("what models have learned, on the host", "serve with more host memory"):
            for learner in tuple(self._on_device):
                self._to_host(learner)
            for learner in [each for each in self._on_host if not each.in_window]:
                if self._device.type == "cpu" and not self._to_disk(learner):
                    return
        self._bound_host()

    def memory(self, things: str) -> dict[str, int]:
        """Bytes in memory and by place, and how many are there; bytes that have come and gone since the start, and the
        time that this took. things: what they are called."""
        parked = sum(learner.num_parked_bytes for learner in self._on_device)
        on_device = sum(learner.num_bytes for learner in self._on_device) - parked
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

    def _bring(self, learners: Sequence[Learner], wanted: frozenset[str]) -> None:
        absent = [learner for learner in dict.fromkeys(learners) if learner not in self._on_device]
        self._free_slots(len(absent))
        for learner in dict.fromkeys(learners):
            if learner in absent or learner.parks_any(wanted):
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
        idle = ((each, num_bytes) for each, num_bytes in tuple(self._on_host.items()) if not each.in_window)
        for learner, num_bytes in idle:
            if surplus <= 0 or not self._to_disk(learner):
                return
            surplus -= num_bytes

    def _to_host(self, learner: Learner) -> None:
        if self._device.type != "cpu":
            self._moved_bytes += sum(each.nbytes for each in learner.live().values()) - learner.num_parked_bytes
        learner.move({name: _on_host(vector) for name, vector in learner.live().items()}, "host")
        del self._on_device[learner]
        self._on_host[learner] = learner.num_bytes

    def _to_device(self, learner: Learner, wanted: frozenset[str]) -> None:
        """The wanted vectors, beside those that are there."""
        try:
            there = self._read(learner) if learner in self._on_disk else learner.live()
            parked = {name: each for name, each in there.items() if not (name in wanted or learner.has_here(name))}
            # The copy of a pinned vector is in order with what the device does next; torch keeps the vector until then.
            vectors = {
                name: vector.to(self._device, non_blocking=True) for name, vector in there.items() if name not in parked
            }
        except Exception as error:
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            raise OperationError(
                f"what a model has learned cannot be brought back from {learner.place}: {error}", "server"
            ) from None
        if self._device.type != "cpu" or learner in self._on_disk:
            self._moved_bytes += sum(each.nbytes for name, each in vectors.items() if not learner.has_here(name))
        learner.move(vectors, "device", parked)
        self._on_host.pop(learner, None)
        self._on_disk.pop(learner, None)
        self._on_device[learner] = None

    def _to_disk(self, learner: Learner) -> bool:
        """Whether it could be written; one that has not changed since it was read is on disk already."""
        saved = self._saved.get(learner)
        if saved is None or saved.num_changes != learner.num_changes:
            self._forget_page(learner)
            try:
                self._write(learner)
            except OSError as error:
                logger.warning("what a model has learned, %d bytes, stays in host memory: %s", learner.num_bytes, error)
                return False
        learner.move({}, "disk")
        del self._on_host[learner]
        self._on_disk[learner] = None
        return True

    def _write(self, learner: Learner) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        vectors = learner.live()
        page = self._pages.write(list(vectors.values()))
        shapes = {name: vector.to("meta") for name, vector in vectors.items()}
        self._saved[learner] = Saved(page, shapes, learner.num_changes)

    def _read(self, learner: Learner) -> dict[str, Tensor]:
        saved = self._saved[learner]
        pinned = self._device.type == "cuda"
        vectors = {
            name: torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned) for name, each in saved.vectors.items()
        }
        self._pages.read(saved.page, list(vectors.values()))
        return vectors

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.moving_seconds += time.monotonic() - started

    def _forget_page(self, learner: Learner) -> None:
        saved = self._saved.pop(learner, None)
        if saved is not None:
            self._pages.free(saved.page)


def _on_host(vector: Tensor) -> Tensor:
    """Pinned, so that it is copied while the device goes on; who reads it on the host waits for the device first."""
    if vector.device.type == "cpu":
        return vector
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True).copy_(vector, non_blocking=True)
