"""Defines the parallel layout of a base model: the number of ranks and what each axis splits. Imports no torch."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any, Literal

ShardedUnit = Literal["self_attn", "linear_attn", "mamba", "mlp", "experts"]
"""A part of a layer with no communication inside: it is sharded as a unit, or not at all."""

_NO_PIPELINE = (
    "pipeline parallelism is not offered: passes of many tenants are too short and too uneven to keep its stages busy, "
    "and each decode step would wait for every stage in turn; use tp within a node and fsdp across nodes"
)


@dataclass(frozen=True)
class ParallelSpec:
    """The layout of one base model's ranks; their number is the product of all axes, and the last axis varies fastest.

    replicas: data parallelism (dp): copies of everything below; each takes different sequences.
    fsdp: each rank keeps a shard of every layer, the embedding and the output head, and gathers it for use; each takes
        different sequences. Ranks along sp split that shard further.
    ep: each rank keeps some of the experts and exchanges tokens with the others; each takes different sequences.
    sp: each rank takes some of the tokens of the same sequences.
    tp: each rank keeps some of the heads and features of every layer, for the same tokens.
    replicated: parts of a layer that every rank along tp and ep holds in full (see styles.py).
    """

    replicas: int = 1
    fsdp: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1
    replicated: tuple[ShardedUnit, ...] = ()

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(f"{axis}={size}: an axis needs at least 1 rank")

    def __str__(self) -> str:
        return f"{self.axes} ({' and '.join(self.replicated)} replicated)" if self.replicated else self.axes

    @property
    def axes(self) -> str:
        """Formats the axes as `parse` reads them."""
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "single"

    @staticmethod
    def parse(text: str) -> "ParallelSpec":
        """Parses "fsdp=4,tp=2" or "single".

        Raises:
            ValueError: an axis is unknown or repeated, or its size is not a positive number.
        """
        sizes: dict[str, Any] = {}
        for part in text.split(",") if text != "single" else ():
            axis, _, size = (word.strip() for word in part.partition("="))
            _check_axis(axis, part)
            if axis in sizes:
                raise ValueError(f"{text}: {axis} is given twice")
            if not (size.isascii() and size.isdigit()):
                among = "" if text == part else f"{text}: "
                raise ValueError(f"{among}{axis}={size} is not a number of ranks; give one such as {axis}=2")
            sizes[axis] = int(size)
        return ParallelSpec(**sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Returns the size of each axis, in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @cached_property
    def num_ranks(self) -> int:
        return prod(self.sizes)

    @property
    def has_forward_collectives(self) -> bool:
        """True if ranks exchange tensors within a forward pass, so that none can run alone."""
        return self.num_ranks > self.replicas

    @property
    def num_data_shares(self) -> int:
        """Returns the number of parts that the sequences of a pass are split into."""
        return prod(getattr(self, axis) for axis in DATA_AXES)

    @property
    def num_weight_shards(self) -> int:
        """Returns the number of fsdp shards of the weights: a rank keeps one and gathers the others."""
        return self.fsdp * self.sp if self.fsdp > 1 else 1

    def tp_size_of(self, unit: ShardedUnit) -> int:
        """Returns the number of tp ranks that split this part of a layer."""
        return 1 if unit in self.replicated else self.tp

    def ep_size_of(self, unit: ShardedUnit) -> int:
        """Returns the number of ep ranks that split the experts of this part of a layer."""
        return self.ep if unit == "experts" and unit not in self.replicated else 1

    @property
    def neighbour_blocks(self) -> tuple[int, ...]:
        """Returns sizes of blocks of neighbouring ranks, from a whole replica down to 1; smaller blocks communicate
        more.
        """
        along = [getattr(self, axis) for axis in AXES[1:]]
        return tuple(dict.fromkeys(prod(along[axis:]) for axis in range(len(along) + 1)))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the rank's coordinate along each axis."""
        found: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return found

    def data_share_of(self, rank: int) -> int:
        """Returns the number of the share of a pass's sequences that the rank takes."""
        return self._number(self.coordinates(rank), DATA_AXES)

    def rank_groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the groups of ranks that differ along these axes only, one for each coordinate on the others."""
        members: dict[int, list[int]] = {}
        others = [axis for axis in AXES if axis not in axes]
        for rank in range(self.num_ranks):
            members.setdefault(self._number(self.coordinates(rank), others), []).append(rank)
        return [tuple(ranks) for ranks in members.values()]

    def _number(self, coordinates: dict[str, int], axes: Sequence[str]) -> int:
        number = 0
        for axis in axes:
            number = number * getattr(self, axis) + coordinates[axis]
        return number


AXES = tuple(field.name for field in fields(ParallelSpec) if field.name != "replicated")

SINGLE = ParallelSpec()

# Along these axes, each rank takes different sequences of a pass.
DATA_AXES = ("replicas", "fsdp", "ep")


def _check_axis(axis: str, part: str) -> None:
    if axis in AXES:
        return
    if axis in ("pp", "pipeline"):
        raise ValueError(_NO_PIPELINE)
    near = difflib.get_close_matches(axis, AXES, 1, 0.5)
    raise ValueError(
        f"{part.strip() or 'nothing'} is not an axis of a layout"
        + (f" (did you mean {near[0]}?)" if near else "")
        + f": give some of {', '.join(AXES)}, such as fsdp=4,tp=2"
    )
