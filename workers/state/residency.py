"""Decides which models are on the device, which in host memory, and which on disk.

The least recently used ones are moved: from the device to the host when the slots of their kind are full, from the host
to the disk when host_bytes are exceeded. On a CPU, device and host are the same memory, so moving between them copies
nothing.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ..resources.memory import is_out_of_memory, reporting_out_of_memory
from .page_file import FilePage, PageFile
from .trainable import Trainable
from .vectors import MOMENT_VECTORS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskPage:
    """A model's page on disk.

    vectors: on the meta device, by name. num_changes: StateVectors.num_changes when the page was written.
    """

    page: FilePage
    vectors: Mapping[str, Tensor]
    num_changes: int


@dataclass
class ModelsOfKind:
    """The models of one kind by place, least recently used first.

    slots: most models on the device; None means no bound. on_host: with their bytes. moved_bytes, moving_seconds: of
    all moves since the start.
    """

    slots: int | None
    on_device: dict[Trainable, None] = field(default_factory=dict)
    on_host: dict[Trainable, int] = field(default_factory=dict)
    on_disk: dict[Trainable, None] = field(default_factory=dict)
    moved_bytes: int = 0
    moving_seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.moving_seconds += time.monotonic() - started


class Residency:
    """Moves the models of a rank between device, host memory and disk.

    Models with gradients never go to disk, so they may exceed host_bytes.
    """

    def __init__(
        self,
        device: torch.device,
        slots: Mapping[str, int | None],
        host_bytes: int | None = None,
        directory: str | None = None,
    ) -> None:
        """Starts without models.

        Args:
            slots: most models on the device, by kind; None means no bound.
            host_bytes: most bytes in host memory, of each kind; None means no bound.
            directory: see PageFile.
        """
        self._device, self._max_host_bytes = device, host_bytes
        self._kinds = {kind: ModelsOfKind(most) for kind, most in slots.items()}
        self._pages = PageFile(directory)
        self._saved: dict[Trainable, DiskPage] = {}
        self._held: frozenset[Trainable] = frozenset()

    def add(self, model: Trainable) -> None:
        """Adds a new model, which is on the device. It cannot fail after `make_room` for its kind."""
        self.make_room(model.kind)
        self._kinds[model.kind].on_device[model] = None

    def make_room(self, kind: str, num_models: int = 1) -> None:
        """Frees slots on the device, except those of models that are held there."""
        models = self._kinds[kind]
        if models.slots is None:
            return
        num_leaving = len(models.on_device) + num_models - models.slots
        for model in [each for each in models.on_device if each not in self._held][: max(num_leaving, 0)]:
            with models.timed():
                self._to_host(models, model)
        self._bound_host(models)

    def remove(self, model: Trainable) -> None:
        models = self._kinds[model.kind]
        for place in (models.on_device, models.on_host, models.on_disk):
            place.pop(model, None)
        self._forget_page(model)

    def has_any(self, kind: str) -> bool:
        """True if there is a model of this kind, in any place."""
        models = self._kinds[kind]
        return bool(models.on_device or models.on_host or models.on_disk)

    @contextmanager
    def holding(self, wanted: Mapping[Trainable, frozenset[str]]) -> Iterator[None]:
        """Keeps at least the wanted vectors of these models on the device while inside.

        Raises:
            OperationError: one of them cannot be moved there.
        """
        before = self._held
        self._held = before.union(wanted)
        try:
            self._bring(wanted)
            yield
        finally:
            self._held = before

    def leave_device(self) -> None:
        """Moves all models to the host; on a CPU, whose memory that is, to the disk, except for those with gradients.

        Raises:
            OperationError: (server) the host has no room; the models moved before have left the device.
        """
        for models in self._kinds.values():
            self._leave_device(models)

    @property
    def moving_seconds(self) -> float:
        """Seconds spent moving models since the start."""
        return sum(models.moving_seconds for models in self._kinds.values())

    def memory(self) -> dict[str, int]:
        """Returns bytes in memory and by place, counts by place, and bytes and time of all moves, by kind."""
        return {name: number for kind in self._kinds for name, number in self._memory_of(kind).items()}

    def _memory_of(self, kind: str) -> dict[str, int]:
        models = self._kinds[kind]
        parked = sum(model.vectors.num_parked_bytes for model in models.on_device)
        on_device = sum(model.vectors.num_bytes for model in models.on_device) - parked
        on_host = sum(models.on_host.values()) + parked
        return {
            kind: on_device + on_host,
            f"{kind}_on_device": on_device,
            f"{kind}_on_host": on_host,
            f"{kind}_on_disk": sum(self._saved[model].page.num_bytes for model in models.on_disk),
            f"num_{kind}_on_device": len(models.on_device),
            f"num_{kind}_on_host": len(models.on_host),
            f"num_{kind}_on_disk": len(models.on_disk),
            f"{kind}_moved_bytes": models.moved_bytes,
            f"{kind}_moved_milliseconds": round(1000 * models.moving_seconds),
        }

    def _bring(self, wanted: Mapping[Trainable, frozenset[str]]) -> None:
        absent = [model.kind for model in wanted if model.vectors.place != "device"]
        for kind in dict.fromkeys(absent):
            num_held, slots = sum(model.kind == kind for model in self._held), self._kinds[kind].slots
            assert slots is None or num_held <= slots, (
                f"{num_held} models wanted on the device at a time, more than its {slots} slots"
            )
            self.make_room(kind, absent.count(kind))
        for model, vectors in wanted.items():
            models = self._kinds[model.kind]
            if model.vectors.place == "disk" or model.vectors.are_on_host(vectors):
                with models.timed():
                    self._to_device(models, model, vectors)
        for model in wanted:
            on_device = self._kinds[model.kind].on_device
            on_device[model] = on_device.pop(model)

    def _leave_device(self, models: ModelsOfKind) -> None:
        with (
            models.timed(),
            reporting_out_of_memory("the trained state of models, on the host", "serve with more host memory"),
        ):
            for model in tuple(models.on_device):
                self._to_host(models, model)
            for model in [each for each in models.on_host if each.gradients.is_empty]:
                if self._device.type == "cpu" and not self._to_disk(models, model):
                    return
        self._bound_host(models)

    def _bound_host(self, models: ModelsOfKind) -> None:
        if self._max_host_bytes is None:
            return
        surplus = sum(models.on_host.values()) - self._max_host_bytes
        idle = ((each, num_bytes) for each, num_bytes in tuple(models.on_host.items()) if each.gradients.is_empty)
        for model, num_bytes in idle:
            if surplus <= 0 or not self._to_disk(models, model):
                return
            surplus -= num_bytes

    def _to_host(self, models: ModelsOfKind, model: Trainable) -> None:
        live = model.live_vectors()
        if self._device.type != "cpu":
            models.moved_bytes += sum(each.nbytes for each in live.values()) - model.vectors.num_parked_bytes
        model.vectors.move("host", {}, {name: _on_host(vector) for name, vector in live.items()})
        del models.on_device[model]
        models.on_host[model] = model.vectors.num_bytes

    def _to_device(self, models: ModelsOfKind, model: Trainable, wanted: frozenset[str]) -> None:
        try:
            there = self._read(model) if model in models.on_disk else model.live_vectors()
            here = {name for name in there if model.vectors.is_on_device(name)}
            # A pinned vector is copied in stream order, before the device's next work; torch holds it until then.
            vectors = {
                name: vector.to(self._device, non_blocking=True)
                for name, vector in there.items()
                if name in wanted or name in here
            }
        except Exception as error:
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            place = model.vectors.place
            raise OperationError(
                f"a model's trained state cannot be brought back from {place}: {error}", "server"
            ) from None
        if self._device.type != "cpu" or model in models.on_disk:
            models.moved_bytes += sum(each.nbytes for name, each in vectors.items() if name not in here)
        parked = {name: vector for name, vector in there.items() if name not in vectors}
        model.vectors.move("device", vectors, parked)
        models.on_host.pop(model, None)
        models.on_disk.pop(model, None)
        models.on_device[model] = None

    def _to_disk(self, models: ModelsOfKind, model: Trainable) -> bool:
        """Moves a model to disk, and returns False if it cannot be written.

        If it has not changed since it was read, its page is still valid.
        """
        saved = self._saved.get(model)
        if saved is None or saved.num_changes != model.vectors.num_changes:
            self._forget_page(model)
            try:
                self._write(model)
            except OSError as error:
                num_bytes = model.vectors.num_bytes
                logger.warning("a model's trained state, %d bytes, stays in host memory: %s", num_bytes, error)
                return False
        model.vectors.move("disk", {}, {})
        del models.on_host[model]
        models.on_disk[model] = None
        return True

    def _write(self, model: Trainable) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        vectors = model.live_vectors()
        page = self._pages.write(list(vectors.values()))
        shapes = {name: vector.to("meta") for name, vector in vectors.items()}
        self._saved[model] = DiskPage(page, shapes, model.vectors.num_changes)

    def _read(self, model: Trainable) -> dict[str, Tensor]:
        saved = self._saved[model]
        pinned = self._device.type == "cuda"
        vectors = {
            name: torch.empty(each.shape, dtype=each.dtype, pin_memory=pinned) for name, each in saved.vectors.items()
        }
        self._pages.read(saved.page, list(vectors.values()))
        # An optimizer that was cleared on disk is still in the page.
        return {name: each for name, each in vectors.items() if model.num_steps or name not in MOMENT_VECTORS}

    def _forget_page(self, model: Trainable) -> None:
        saved = self._saved.pop(model, None)
        if saved is not None:
            self._pages.free(saved.page)


def _on_host(vector: Tensor) -> Tensor:
    """Copies to pinned memory while the device continues; the host must synchronize before it reads the copy."""
    if vector.device.type == "cpu":
        return vector
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True).copy_(vector, non_blocking=True)
