"""This rank's position among the ranks of its base model, and the teams of ranks that it exchanges tensors with."""

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from ..protocol.parallel_spec import AXES, SINGLE, ParallelSpec, ShardedUnit

LOOPBACK = "127.0.0.1"

# Linux's ioctl for the address of an interface (netdevice(7)): 16 bytes of its name, then a socket address.
_SIOCGIFADDR = 0x8915

# The timeout of collectives. The caller of the ranks knows how long they may take, and ends those that hang (see
# CallTimeouts).
_FOREVER = timedelta(days=365)

Value = TypeVar("Value")

# These had other names before torch 2.13, and later releases warn about the old ones.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


@dataclass(frozen=True)
class PendingCollective:
    """A collective in progress.

    received: the result, valid after `wait`. sent: this rank's contribution, which must not be modified before that.
    """

    works: Sequence[dist.Work]
    received: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        """Waits for the result and returns it. After that, `sent` may be modified."""
        for work in self.works:
            work.wait()
        return self.received


class Team:
    """The ranks that differ from this one only along some axes, including this rank. All of them make the same calls.

    size: their number. index: of this rank.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None) -> None:
        """Creates a team. `group` is None if the team has one rank."""
        self.ranks = ranks
        self.size, self.index = len(ranks), ranks.index(rank)
        self._group = group

    def all_gather_object(self, value: Value) -> list[Value]:
        """Returns each rank's value, in rank order. For small values, sent from host to host."""
        if self.size == 1:
            return [value]
        values: list[Value] = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gathers [n, ...] of each rank, equal in shape, to [size * n, ...] in rank order."""
        return tensor if self.size == 1 else self.start_all_gather(tensor).wait()

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> PendingCollective:
        """Starts what `all_gather` does, for a team of several ranks. The result is written to the memory of `into`, if
        given."""
        sent, shape = tensor.contiguous(), (self.size * tensor.shape[0], *tensor.shape[1:])
        whole = tensor.new_empty(shape) if into is None else into.view(shape)
        work = _all_gather(whole, sent, group=self._group, async_op=True)
        assert work is not None
        return PendingCollective([work], whole, sent)

    def gather_at_first(self, tensor: Tensor) -> list[Tensor] | None:
        """Gathers the ranks' tensors, equal in shape, on the first rank. Returns None on the others."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in self.ranks] if self.index == 0 else None
        dist.gather(tensor.contiguous(), parts, self.ranks[0], self._group)
        return parts

    def part(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of [size * n, ...], [n, ...]."""
        return tensor.chunk(self.size)[self.index]

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sums [size * n, ...] over all ranks and returns this rank's part, [n, ...]."""
        if self.size == 1:
            return tensor
        part = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        _reduce_scatter(part, tensor.contiguous(), group=self._group)
        return part

    def reduce(self, tensor: Tensor, index: int) -> Tensor:
        """Sums over all ranks, in place, for the rank with this index. On others the result is meaningless."""
        if self.size > 1:
            dist.reduce(tensor, self.ranks[index], dist.ReduceOp.SUM, group=self._group)
        return tensor

    def all_to_all(self, tensor: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Sends the first rows to the first rank, the next ones to the next, and receives this rank's rows in rank
        order.

        Args:
            sent, received: the number of rows for and from each rank; None = equally many.
        """
        if self.size == 1:
            return tensor
        rows = tensor.shape[0] if received is None else sum(received)
        arrived = tensor.new_empty(rows, *tensor.shape[1:])
        dist.all_to_all_single(arrived, tensor.contiguous(), received, sent, group=self._group)
        return arrived

    def start_ring_shift(self, tensor: Tensor, distance: int, tag: int = 0) -> PendingCollective:
        """Starts to send the tensor to the rank `distance` after this one, around the team, and to receive one from the
        rank as far before.

        Args:
            tag: must differ between transfers in progress at the same time.
        """
        sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        after, before = (self.ranks[(self.index + places) % self.size] for places in (distance, -distance))
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, sent, after, self._group, tag),
            dist.P2POp(dist.irecv, received, before, self._group, tag),
        ])  # fmt: skip
        return PendingCollective(works, received, sent)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcasts the first rank's tensor, in place."""
        if self.size > 1:
            dist.broadcast(tensor, self.ranks[0], group=self._group)
        return tensor


ALONE = Team((0,), 0, None)


class Mesh:
    """This rank's position in the layout `spec`, and its teams.

    is_single: true without other ranks. has_forward_collectives: see ParallelSpec. is_leader: true if this rank reports
    the results for all ranks that run the same sequences.
    """

    def __init__(self, spec: ParallelSpec = SINGLE, rank: int = 0) -> None:
        """Creates all teams. With more than one rank, `connect` must be called first."""
        self.spec, self.rank, self.is_single = spec, rank, spec.num_ranks == 1
        self.has_forward_collectives = spec.has_forward_collectives
        self.coordinates = spec.coordinates(rank)
        self.is_leader = self.coordinates["sp"] == self.coordinates["tp"] == 0
        self._teams = {axes: self._new_team(axes) for axes in _teams_of(spec)}
        self._torch_mesh: DeviceMesh | None = None
        self._object_group = None if self.is_single else dist.new_group(backend="gloo", timeout=_FOREVER)

    @property
    def is_first(self) -> bool:
        """True if this rank writes files for all ranks."""
        return self.rank == 0

    def all_gather_object(self, value: Value) -> list[Value]:
        """Returns each rank's value, in rank order. For small values, sent from host to host."""
        if self._object_group is None:
            return [value]
        values: list[Value] = [value] * self.spec.num_ranks
        dist.all_gather_object(values, value, group=self._object_group)
        return values

    def first_values(self, values: Sequence[Value | None]) -> list[Value | None]:
        """Returns for each position the value of the first rank where it is not None, None if it is None everywhere."""
        of_places = zip(*self.all_gather_object(list(values)), strict=True)
        return [next((value for value in of_place if value is not None), None) for of_place in of_places]

    def along(self, *axes: str) -> Team:
        """Returns the team of ranks that differ from this one only along these axes."""
        if axes not in self._teams:
            of_several = (axis for axis in AXES if axis in axes and getattr(self.spec, axis) > 1)
            self._teams[axes] = self._teams[tuple(of_several)]
        return self._teams[axes]

    def across(self, *axes: str) -> Team:
        """Returns the team of ranks that agree with this one along these axes."""
        return self.along(*(axis for axis in AXES if axis not in axes))

    @property
    def shard_team(self) -> Team:
        """Returns the team whose ranks each keep a part of the weights and gather the other parts."""
        return self.along("fsdp", "sp") if self.spec.num_weight_shards > 1 else self.along()

    def tensor_team(self, unit: ShardedUnit) -> Team:
        """Returns the team that divides this part of every layer along tp."""
        return self.along("tp" if self.spec.tp_size_of(unit) > 1 else "")

    def expert_team(self, unit: ShardedUnit) -> Team:
        """Returns the team that divides the experts of this part of every layer along ep."""
        return self.along("ep" if self.spec.ep_size_of(unit) > 1 else "")

    def torch_mesh(self, *axes: str) -> DeviceMesh:
        """Returns a DeviceMesh of all ranks for torch's DTensor. The axes must have more than one rank; sp is merged
        into fsdp."""
        if self._torch_mesh is None:
            ranks = torch.arange(self.spec.num_ranks).view(self.spec.sizes)
            joined = ranks.movedim(AXES.index("sp"), AXES.index("fsdp") + 1).flatten(1, 2)
            self._torch_mesh = DeviceMesh("cpu", joined, mesh_dim_names=tuple(axis for axis in AXES if axis != "sp"))
        return self._torch_mesh[axes]

    def _new_team(self, axes: tuple[str, ...]) -> Team:
        """Creates the teams of all ranks and returns this rank's. Every rank must create all of them, in the same
        order."""
        own = None
        for ranks in self.spec.rank_groups(axes):
            group = dist.new_group(list(ranks), timeout=_FOREVER) if len(ranks) > 1 else None
            if self.rank in ranks:
                own = Team(ranks, self.rank, group)  # pyright: ignore[reportArgumentType]
        assert own is not None, f"rank {self.rank} of {self.spec}"
        return own


class Rendezvous:
    """The rendezvous of the ranks: the first one opens it, and the others connect to its address."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store

    @property
    def address(self) -> str:
        return f"{self.store.host}:{self.store.port}"

    @staticmethod
    def open(host: str, timeout_seconds: float) -> "Rendezvous":
        """Opens a rendezvous on a free port of this address only. By default torch would listen on all addresses of the
        machine."""
        timeout = timedelta(seconds=timeout_seconds)
        with socket.create_server((host, 0)) as server:
            port, listening = server.getsockname()[1], server.detach()
        return Rendezvous(
            TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening
            )
        )  # fmt: skip

    @staticmethod
    def join(address: str, timeout_seconds: float) -> "Rendezvous":
        """Connects to a rendezvous. Raises RuntimeError if it was not opened."""
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=timeout_seconds)
        return Rendezvous(TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout))


def own_host(towards: str = "192.0.2.1") -> str:
    """Returns the address by which another machine reaches this one, loopback if there is no route to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """Returns this machine's network interface with the address, None if it is unknown."""
    if not sys.platform.startswith("linux"):
        return "lo0" if address == LOOPBACK else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if _address_of(name, probe) == address:
                return name
    return None


def _address_of(interface: str, probe: socket.socket) -> str | None:
    request = struct.pack("256s", interface.encode())
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def connect(
    rendezvous: Rendezvous, spec: ParallelSpec, rank: int, device: torch.device, timeout_seconds: float
) -> None:
    """Connects this process to the other ranks, once per process. Raises RuntimeError if they do not connect in
    time."""
    interface = interface_of(own_host(towards=rendezvous.store.host))
    if interface is not None:
        # By default gloo listens on the address of the machine's host name, which others often cannot reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=rendezvous.store,
        rank=rank,
        world_size=spec.num_ranks,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def _teams_of(spec: ParallelSpec) -> list[tuple[str, ...]]:
    """Returns the teams, each as the axes along which its ranks differ: all combinations of axes with more than one
    rank."""
    teams: list[tuple[str, ...]] = [()]
    for axis in AXES:
        if getattr(spec, axis) > 1:
            teams += [(*axes, axis) for axes in teams]
    return teams
