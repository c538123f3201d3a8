"""Plans the memory of devices on which rank groups run side by side or in turns. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.layouts.parameters import num_parameters, parameters
from ..shapes.model_shape import ModelShape
from .estimate import num_learned
from .group_memory import PHASES, GroupMemory, Phase, RankBytes, group_memory, reserved_memory
from .layout_search import usable_bytes
from .workload import Workload

CPU = "cpu"

_FLOAT32 = 4

# Of a process on a CUDA device: its context and libraries. An estimate.
_PROCESS_BYTES = 500_000_000


@dataclass(frozen=True)
class PlannedGroup:
    """A group of ranks to plan.

    roles: of the runs that it trains or scores; none if it only samples. devices: of its ranks, in order.
    prefill_tokens: most tokens of prompts that run at a time.
    reserved_bytes: that vLLM takes of each device, however little it needs; None if the ranks are ours.
    """

    name: str
    roles: tuple[str, ...]
    spec: ParallelSpec
    load: Workload
    devices: tuple[str, ...]
    prefill_tokens: int
    reserved_bytes: int | None = None

    def memory(self, shape: ModelShape) -> GroupMemory:
        """Returns the bytes of each rank. Raises ValueError if vLLM's weights exceed what it takes."""
        if self.reserved_bytes is None:
            return group_memory(shape, self.spec, self.load, self.roles, self.prefill_tokens)
        # vLLM divides embedding and output head, too.
        weights = -(-num_parameters(shape) * self.load.number_bytes // self.spec.tp)
        return reserved_memory(weights, self.reserved_bytes)


@dataclass(frozen=True)
class Moves:
    """Bytes of a rank whose group is offloaded and reloaded.

    first: to leave for the first time. leaving, arriving: at each turn. host: kept in host memory, base weights also
    while the group has the device. pinned: what the allocator of pinned memory takes for them. disk: on disk.
    """

    first: int
    leaving: int
    arriving: int
    host: int
    pinned: int
    disk: int


@dataclass(frozen=True)
class DevicePlan:
    """Devices on which the same groups have ranks.

    names: of the devices. ranks: how many ranks of each group are on each of them.
    """

    names: tuple[str, ...]
    ranks: Mapping[str, int]
    memory: Mapping[str, GroupMemory]
    takes_turns: bool

    @property
    def is_shared(self) -> bool:
        return len(self.ranks) > 1

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Returns the phases in which one of the groups works, in the order of a training loop."""
        return tuple(phase for phase in PHASES if any(phase in self.memory[name].phases for name in self.ranks))

    def during(self, phase: Phase) -> dict[str, RankBytes]:
        """Returns what each group's rank has on the device. A phase that several groups have is counted for all of
        them, if they do not take turns."""
        found = {name: self.memory[name].during(phase) for name in self.ranks}
        if not self.takes_turns:
            return found
        return {
            name: each for name, each in found.items() if phase in self.memory[name].phases or self.memory[name].stays
        }

    def needed_during(self, phase: Phase) -> int:
        """Returns the bytes on one device, of which groups that take turns use those of the largest."""
        return self._together({name: each.total for name, each in self.during(phase).items()})

    @property
    def needed(self) -> int:
        """Returns the bytes that one device needs.

        Groups that do not take turns may work at the same time, and torch's allocator keeps for each process what its
        passes have used, so their peaks are added.
        """
        return self._together({name: self.memory[name].peak for name in self.ranks})

    @property
    def heaviest(self) -> str:
        return max(self.ranks, key=lambda name: self.ranks[name] * self.memory[name].peak)

    @property
    def other_processes(self) -> int:
        """Returns the bytes of the CUDA contexts of all processes but one, whose context the reserve has room for."""
        return 0 if self.names == (CPU,) else (sum(self.ranks.values()) - 1) * _PROCESS_BYTES

    def _together(self, of_groups: Mapping[str, int]) -> int:
        taking_turns = {name for name in of_groups if self.takes_turns and not self.memory[name].stays}
        staying = sum(self.ranks[name] * each for name, each in of_groups.items() if name not in taking_turns)
        most = max((self.ranks[name] * of_groups[name] for name in taking_turns), default=0)
        return self.other_processes + staying + most


@dataclass(frozen=True)
class GroupsPlan:
    """Rank groups of one base model on their devices.

    device_bytes: memory of each device; None if the plan is not compared with one. host_model_bytes: most bytes of
    offloaded models in host memory, of each rank.
    """

    shape: ModelShape
    groups: tuple[PlannedGroup, ...]
    takes_turns: bool
    device_bytes: int | None
    host_model_bytes: int

    @cached_property
    def memory(self) -> Mapping[str, GroupMemory]:
        return {each.name: each.memory(self.shape) for each in self.groups}

    @cached_property
    def devices(self) -> Sequence[DevicePlan]:
        """Returns the devices, those with the same groups together."""
        by_ranks: dict[tuple[tuple[str, int], ...], list[str]] = {}
        for device in dict.fromkeys(device for each in self.groups for device in each.devices):
            there = tuple((each.name, each.devices.count(device)) for each in self.groups if device in each.devices)
            by_ranks.setdefault(there, []).append(device)
        return [
            DevicePlan(tuple(names), dict(ranks), self.memory, self.takes_turns) for ranks, names in by_ranks.items()
        ]

    @property
    def usable_bytes(self) -> int | None:
        """Returns how much of a device our ranks may use. On a CPU it is all of it."""
        if self.device_bytes is None or self.devices[0].names == (CPU,):
            return self.device_bytes
        return usable_bytes(self.device_bytes)

    def usable_on(self, device: DevicePlan) -> int | None:
        """Returns how much of a device its groups may use: of one that vLLM has alone, all but a CUDA context, as its
        share already has what its passes need."""
        is_reserved = all(each.reserved_bytes is not None for each in self.groups if each.name in device.ranks)
        if self.device_bytes is None or not is_reserved:
            return self.usable_bytes
        return self.device_bytes - _PROCESS_BYTES

    def excess_on(self, device: DevicePlan) -> int:
        """Returns the bytes by which the groups exceed what they may use; 0 if they fit or no device is given."""
        usable = self.usable_on(device)
        return 0 if usable is None else max(0, device.needed - usable)

    @property
    def fits(self) -> bool | None:
        """True if every device has room; None if no device is given."""
        return None if self.device_bytes is None else not any(map(self.excess_on, self.devices))

    @property
    def moving(self) -> Mapping[str, Moves]:
        """Returns what groups that share their devices in turns move."""
        shared = {device for each in self.devices if self.takes_turns and each.is_shared for device in each.names}
        moving = (each for each in self.groups if each.reserved_bytes is None)
        return {each.name: self._moves(each) for each in moving if not shared.isdisjoint(each.devices)}

    def _moves(self, group: PlannedGroup) -> Moves:
        moved = self.memory[group.name].moved
        of_models, is_cpu = moved.models + moved.optimizer, group.devices[0] == CPU
        beyond = max(0, of_models - self.host_model_bytes)
        # On a CPU, models that have gradients stay in memory.
        at_turn = replace(moved, gradients=0) if is_cpu else moved
        on_disk = at_turn.total if is_cpu else beyond
        return Moves(
            first=at_turn.total,
            leaving=at_turn.total - moved.weights,
            arriving=at_turn.total,
            host=at_turn.total - on_disk,
            pinned=0 if is_cpu else self._pinned_bytes(group, moved, of_models - beyond + moved.gradients),
            disk=on_disk,
        )

    def _pinned_bytes(self, group: PlannedGroup, moved: RankBytes, of_vectors: int) -> int:
        """Returns what torch allocates for base weights, the cache and vectors of models: each block is rounded up to a
        power of two. The cache's blocks are not known here, and counted as they are."""
        table, number_bytes = parameters(self.shape, group.spec), group.load.number_bytes
        plain = sum(each.kept for each in table) * number_bytes
        rounded = sum(each.count * _power_of_two(each.kept // each.count * number_bytes) for each in table)
        vector = num_learned(self.shape, group.spec, group.load) // group.load.slots * _FLOAT32
        weights, vectors = moved.weights * rounded // plain, of_vectors * _power_of_two(vector) // vector
        return weights + moved.kv_cache + vectors


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
