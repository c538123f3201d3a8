"""Simulates faults on single ranks, and counts micro-batches."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from safetensors import SafetensorError
from torch import Tensor
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.training import FeatureLocation, ForwardBackwardRequest
from trainhouse.workers.checkpoint import TrainedState, tensor_files
from trainhouse.workers.drafts.model.draft_model import DraftModel
from trainhouse.workers.drafts.sequences.captured_features import CapturedFeatures
from trainhouse.workers.drafts.training.draft_pass import DraftStrategy
from trainhouse.workers.lora import Adapter, lora_layers
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.state import optim
from trainhouse.workers.state.optim import all_reduce_gradients
from trainhouse.workers.state.page_file import FilePage
from trainhouse.workers.state.vectors import STEP_VECTORS
from trainhouse.workers.worker import rank_memory

from .probe_worker import ProbeWorker


def _averaged(adapters: Sequence[Adapter], mesh: Mesh) -> None:
    all_reduce_gradients(adapters, mesh)
    for adapter in adapters:
        for axes, region in adapter.layout.regions.items():
            adapter.gradients.accumulator[region] /= mesh.across(*axes).size


def _left_alone(adapters: Sequence[Adapter], mesh: Mesh) -> None:
    pass


# How the ranks' gradients are combined at a step.
RULES = {"sum": all_reduce_gradients, "mean": _averaged, "own": _left_alone}

ERRORS = {
    "raised": RuntimeError("broken"),
    "out of memory": torch.OutOfMemoryError("no memory for 1 TiB"),
    "refused": OperationError("refused"),
}


class MicroBatches:
    """Counts the micro-batches of a rank, delays them, and makes them fail."""

    def __init__(self, rank: ProbeWorker) -> None:
        self._rank, self._error = rank, ""
        self._number = 0
        self._seconds_late = 0.0
        self._run = rank.base.shared_hidden_states
        rank.base.shared_hidden_states = self._watched

    def num(self) -> int:
        """Returns the number since the last call."""
        number, self._number = self._number, 0
        return number

    def fail(self, rank: int, error: str) -> None:
        """Raises one of ERRORS in each pass of that rank from now on; "" stops it."""
        self._error = error if self._rank.mesh.rank == rank else ""

    def be_late(self, rank: int, seconds: float) -> None:
        """Delays each micro-batch of that rank from now on."""
        if self._rank.mesh.rank == rank:
            self._seconds_late = seconds

    def _watched(self, *arguments: Any, **options: Any) -> Tensor:
        self._number += 1
        time.sleep(self._seconds_late)
        if self._error:
            raise ERRORS[self._error]
        return self._run(*arguments, **options)


def combine_gradients(_: ProbeWorker, rule: str) -> None:
    """Uses one of RULES from now on."""
    optim.all_reduce_gradients = RULES[rule]


def shortest_timeout(rank: ProbeWorker) -> float:
    """Returns the shortest timeout of exchanges with other ranks, in seconds."""
    groups = filter(None, (team._group for team in rank.mesh._teams.values()))
    backends = [group._get_backend(torch.device("cpu")) for group in [*groups, rank.mesh._object_group]]
    return min(backend.options._timeout.total_seconds() for backend in backends)


def lose_pages(worker: ProbeWorker, rank: int) -> None:
    """Makes the adapters that are on disk of that rank unreadable."""
    if worker.mesh.rank != rank:
        return
    residency = worker.models.residency
    pages = residency._pages
    lost, read = [saved.page for saved in residency._saved.values()], pages.read

    def read_others(page: FilePage, vectors: Sequence[Tensor]) -> None:
        if page in lost:
            raise OSError("input/output error")
        read(page, vectors)

    pages.read = read_others


def break_offload(worker: ProbeWorker, rank: int, call: str, heals: bool = True) -> None:
    """Makes that rank fail to "read" or "write" the offloaded base from now on; "" repairs it. heals: all ranks are
    repaired first.
    """
    rank_memory._RETRY_SECONDS = (0.0,)
    pages = worker.rank_memory._weights._pages
    for name in ("read", "write") if heals else ():
        vars(pages).pop(name, None)
    if call and worker.mesh.rank == rank:
        setattr(pages, call, mock.Mock(side_effect=OSError("input/output error")))


def call_unreadable(worker: ProbeWorker, rank: int, method: str, *arguments: object) -> object:
    """Calls the method while that rank cannot read saved files."""
    call = partial(getattr(worker, method), *arguments)
    if worker.mesh.rank != rank:
        return call()
    with mock.patch.object(tensor_files, "safe_open", side_effect=SafetensorError("input/output error")):
        return call()


def call_without_memory(worker: ProbeWorker, rank: int, method: str, *arguments: object) -> object:
    """Calls the method while that rank has no memory for a new adapter."""
    call = partial(getattr(worker, method), *arguments)
    if worker.mesh.rank != rank:
        return call()
    with mock.patch.object(lora_layers, "Adapter", side_effect=ERRORS["out of memory"]):
        return call()


def lack(worker: ProbeWorker, rank: int, *model_ids: str) -> None:
    """Makes that rank unable to bring these models to its device."""
    vars(worker.models).pop("resident", None)
    if worker.mesh.rank != rank:
        return
    resident = worker.models.resident

    def others(wanted: Sequence[str], vectors: frozenset[str] = STEP_VECTORS) -> AbstractContextManager[None]:
        if not set(model_ids).isdisjoint(wanted):
            raise OperationError("input/output error", "server")
        return resident(wanted, vectors)

    worker.models.resident = others


def snapshot_without_memory(worker: ProbeWorker, run_id: str, directory: str) -> None:
    """Begins a snapshot while no rank has memory for its contents."""
    with mock.patch.object(TrainedState, "with_window", side_effect=ERRORS["out of memory"]):
        worker.begin_snapshot(1, run_id, directory)


def miss_features(worker: ProbeWorker, rows: Mapping[int, Sequence[int]]) -> None:
    """Makes ranks miss the stored features of these rows, by rank."""
    draft_runner = worker.passes.strategies[DraftModel.kind]
    assert isinstance(draft_runner, DraftStrategy)
    vars(draft_runner).pop("find_stored", None)
    find, missed = draft_runner.find_stored, rows.get(worker.mesh.rank, ())

    def others(
        request: ForwardBackwardRequest, place: FeatureLocation, numbers: Sequence[int]
    ) -> dict[int, CapturedFeatures]:
        return {row: each for row, each in find(request, place, numbers).items() if row not in missed}

    draft_runner.find_stored = others
