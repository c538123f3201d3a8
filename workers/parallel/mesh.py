"""Mesh: this rank among the others of its base model, and the teams of them that it exchanges tensors with."""

import fcntl
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from ..protocol.parallel_spec import AXES, SINGLE, ParallelSpec, Unit

LOOPBACK = "127.0.0.1"

# Linux's request for the address of an interface (netdevice(7)): 16 bytes of its name, then a socket address.
_SIOCGIFADDR = 0x8915

# Of an exchange. Who calls the ranks knows how long they may take, and ends those that wait (see Patience).
_FOREVER = timedelta(days=365)

Value = TypeVar("Value")

# Before torch 2.13 these had other names, at which later releases warn.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Arriving:
    """A tensor on its way from other ranks, and the one that goes to them meanwhile, which nobody may change."""

    works: Sequence[dist.Work]
    received: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        """What was to come; the other has left."""
        for work in self.works:
            work.wait()
        return self.received


class Team:
    """The ranks that differ from this one along some axes only, itself among them; all of them make the same calls.

    size: how many they are. index: which of them this one is. sent: how often each kind of call was made.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None, sent: Counter[str]) -> None:
        """group: None of a rank that is alone."""
        self.ranks = ranks
        self.size, self.index = len(ranks), ranks.index(rank)
        self._group, self._sent = group, sent

    def exchange(self, value: Value) -> list[Value]:
        """What each rank gives, in their order: small values, from host to host."""
        if self.size == 1:
            return [value]
        self._sent["all_gather_object"] += 1
        values: list[Value] = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """In place, over all ranks."""
        if self.size > 1:
            self._sent["all_reduce"] += 1
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self._group)
        return tensor

    def joined(self, tensor: Tensor) -> Tensor:
        """[n, ...] of each rank, all alike in shape -> [size * n, ...], in the order of the ranks."""
        return tensor if self.size == 1 else self.joining(tensor).wait()

    def joining(self, tensor: Tensor, into: Tensor | None = None) -> Arriving:
        """Begins to do the same, of a team of several. into: memory for as many numbers, None = new one."""
        self._sent["all_gather"] += 1
        sent, shape = tensor.contiguous(), (self.size * tensor.shape[0], *tensor.shape[1:])
        whole = tensor.new_empty(shape) if into is None else into.view(shape)
        work = _all_gather(whole, sent, group=self._group, async_op=True)
        assert work is not None
        return Arriving([work], whole, sent)

    def at_first(self, tensor: Tensor) -> list[Tensor] | None:
        """That of each rank, all alike in shape, in the order of the ranks: for the first of them, None elsewhere."""
        if self.size == 1:
            return [tensor]
        self._sent["gather"] += 1
        parts = [torch.empty_like(tensor) for _ in self.ranks] if self.index == 0 else None
        dist.gather(tensor.contiguous(), parts, self.ranks[0], self._group)
        return parts

    def part(self, tensor: Tensor) -> Tensor:
        """[size * n, ...] -> the part [n, ...] that has this rank's index."""
        return tensor.chunk(self.size)[self.index]

    def summed_part(self, tensor: Tensor) -> Tensor:
        """[size * n, ...] -> the part [n, ...] of the sum over all ranks that has this one's index."""
        if self.size == 1:
            return tensor
        self._sent["reduce_scatter"] += 1
        part = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        _reduce_scatter(part, tensor.contiguous(), group=self._group)
        return part

    def exchanged(self, tensor: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """The first rows to the first rank, the next to the next, and theirs for this one in the same order.

        sent, received: how many for and from each rank; None = as many for each.
        """
        if self.size == 1:
            return tensor
        self._sent["all_to_all"] += 1
        rows = tensor.shape[0] if received is None else sum(received)
        arrived = tensor.new_empty(rows, *tensor.shape[1:])
        dist.all_to_all_single(arrived, tensor.contiguous(), received, sent, group=self._group)
        return arrived

    def passed_on(self, tensor: Tensor, distance: int, tag: int = 0) -> Arriving:
        """Begins to send the tensor to the rank `distance` behind this one, around the team, and to receive that of
        the one as far before. tag: of those that are under way at once each has another."""
        self._sent["pass_on"] += 1
        sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        after, before = (self.ranks[(self.index + places) % self.size] for places in (distance, -distance))
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, sent, after, self._group, tag),
            dist.P2POp(dist.irecv, received, before, self._group, tag),
        ])  # fmt: skip
        return Arriving(works, received, sent)

    def from_first(self, tensor: Tensor) -> Tensor:
        """In place, what the first of the ranks has."""
        if self.size > 1:
            self._sent["broadcast"] += 1
            dist.broadcast(tensor, self.ranks[0], group=self._group)
        return tensor


ALONE = Team((0,), 0, None, Counter())


class Mesh:
    """spec, rank: which of its ranks this one is. sent: by kind, how often this rank has exchanged tensors."""

    def __init__(self, spec: ParallelSpec = SINGLE, rank: int = 0) -> None:
        """Of more than one rank, `connect` comes first."""
        self.spec, self.rank = spec, rank
        self.coordinates = spec.coordinates(rank)
        self.sent: Counter[str] = Counter()
        self._teams = {axes: self._new_team(axes) for axes in _teams_of(spec)}
        self._torch_mesh: DeviceMesh | None = None
        self._words = None if self.is_single else dist.new_group(backend="gloo", timeout=_FOREVER)

    @property
    def is_single(self) -> bool:
        return self.spec.num_ranks == 1

    @property
    def is_coupled(self) -> bool:
        """Whether ranks exchange tensors within a forward pass, so that none goes on alone."""
        return self.along("fsdp", "ep", "sp", "tp").size > 1

    @property
    def speaks(self) -> bool:
        """Whether this rank tells what those that run the same sequences have found."""
        return self.coordinates["sp"] == self.coordinates["tp"] == 0

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files for all of them."""
        return self.rank == 0

    def exchange(self, value: Value) -> list[Value]:
        """What each rank gives, by rank: small values, from host to host."""
        if self._words is None:
            return [value]
        values: list[Value] = [value] * self.spec.num_ranks
        dist.all_gather_object(values, value, group=self._words)
        return values

    def found(self, values: Sequence[Value | None]) -> list[Value | None]:
        """In each place what the first rank has that has something there; None where none has."""
        of_places = zip(*self.exchange(list(values)), strict=True)
        return [next((value for value in of_place if value is not None), None) for of_place in of_places]

    def along(self, *axes: str) -> Team:
        """Those that differ along these axes only."""
        return self._teams[self._needed(axes)]

    def beside(self, *axes: str) -> Team:
        """Those that do not differ along these axes."""
        return self.along(*(axis for axis in AXES if axis not in axes))

    @property
    def keeping_team(self) -> Team:
        """Those that each keep a part of weights, and gather the others."""
        return self.along("fsdp", "sp") if self.spec.num_kept_parts > 1 else self.along()

    def tensor_team(self, unit: Unit) -> Team:
        """Those along tp that share out this part of every layer."""
        return self.along("tp" if self.spec.tp_of(unit) > 1 else "")

    def expert_team(self, unit: Unit) -> Team:
        """Those along ep that share out the experts that this part of every layer has."""
        return self.along("ep" if self.spec.ep_of(unit) > 1 else "")

    def torch_mesh(self, *axes: str) -> DeviceMesh:
        """These ranks as torch's distributed tensors want them; each axis has more than one, and fsdp those of sp."""
        if self._torch_mesh is None:
            ranks = torch.arange(self.spec.num_ranks).view(self.spec.sizes)
            joined = ranks.movedim(AXES.index("sp"), AXES.index("fsdp") + 1).flatten(1, 2)
            self._torch_mesh = DeviceMesh("cpu", joined, mesh_dim_names=tuple(axis for axis in AXES if axis != "sp"))
        return self._torch_mesh[axes]

    def _needed(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in AXES if axis in axes and getattr(self.spec, axis) > 1)

    def _new_team(self, axes: tuple[str, ...]) -> Team:
        """All ranks make all teams, in the same order."""
        own = None
        for ranks in self.spec.groups(axes):
            group = dist.new_group(list(ranks), timeout=_FOREVER) if len(ranks) > 1 else None
            if self.rank in ranks:
                own = Team(ranks, self.rank, group, self.sent)  # pyright: ignore[reportArgumentType]
        assert own is not None, f"rank {self.rank} of {self.spec}"
        return own


class Meeting:
    """Where the ranks find each other: the first of them opens it, the others come to its address."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store

    @property
    def address(self) -> str:
        return f"{self.store.host}:{self.store.port}"

    @staticmethod
    def opened(host: str, timeout_seconds: float) -> "Meeting":
        """On a free port of this address alone: by itself torch would listen on all that the machine has."""
        timeout = timedelta(seconds=timeout_seconds)
        with socket.create_server((host, 0)) as server:
            port, listening = server.getsockname()[1], server.detach()
        return Meeting(
            TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening
            )
        )  # fmt: skip

    @staticmethod
    def at(address: str, timeout_seconds: float) -> "Meeting":
        """Raises RuntimeError where nobody has opened it."""
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=timeout_seconds)
        return Meeting(TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout))


def own_host(towards: str = "192.0.2.1") -> str:
    """The address by which another machine reaches this one; that of loopback where there is no way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the address; None where that cannot be told."""
    if not sys.platform.startswith("linux"):
        return "lo0" if address == LOOPBACK else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            if _address_of(name, asking) == address:
                return name
    return None


def _address_of(interface: str, asking: socket.socket) -> str | None:
    """None: it has none."""
    request = struct.pack("256s", interface.encode())
    try:
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def connect(meeting: Meeting, spec: ParallelSpec, rank: int, device: torch.device, timeout_seconds: float) -> None:
    """Once in a process. Raises RuntimeError when the others are not there in time."""
    interface = interface_of(own_host(towards=meeting.store.host))
    if interface is not None:
        # Else gloo listens on the address that the machine's name stands for, often one that others cannot reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=meeting.store,
        rank=rank,
        world_size=spec.num_ranks,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def _teams_of(spec: ParallelSpec) -> list[tuple[str, ...]]:
    """By the axes along which their ranks differ: all combinations of those that have more than one rank."""
    teams: list[tuple[str, ...]] = [()]
    for axis in AXES:
        if getattr(spec, axis) > 1:
            teams += [(*axes, axis) for axes in teams]
    return teams
