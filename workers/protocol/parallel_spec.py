"""ParallelSpec: how many ranks a base model has, and what each axis of them shares out. Imports no torch."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal

Unit = Literal["self_attn", "mlp", "experts"]
"""The layers between whose weights nothing is exchanged: they are shared out together, or not at all."""

_NO_PIPELINE = (
    "pipeline parallelism is not offered: passes of many tenants are too short and too uneven to keep its stages busy, "
    "and a step of decoding would wait for one stage after the other; use tp within a node and fsdp across nodes"
)


@dataclass(frozen=True)
class ParallelSpec:
    """The ranks of one base model: the product of all axes, of which the last varies fastest.

    replicas: copies of everything that the other axes share out; each takes other sequences.
    fsdp: ranks that each keep a part of every layer's weights, of the embedding and of the output head, and gather it
    for use; each takes other sequences. Those along sp keep a part of that part.
    ep: ranks that each keep some of the experts, and send each other their tokens; each takes other sequences.
    sp: ranks that each take some of the tokens of the same sequences.
    tp: ranks that each keep some of the heads and features of every layer, for the same tokens.
    replicated: of layers, what every rank has whole all the same along tp and ep (see styles.py).
    """

    replicas: int = 1
    fsdp: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1
    replicated: tuple[Unit, ...] = ()

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(f"{axis}={size}: an axis has 1 rank or more")

    def __str__(self) -> str:
        return f"{self.axes} ({' and '.join(self.replicated)} replicated)" if self.replicated else self.axes

    @property
    def axes(self) -> str:
        """As `parse` reads them."""
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "single"

    @staticmethod
    def parse(text: str) -> "ParallelSpec":
        """ "fsdp=4,tp=2", or "single". Raises ValueError."""
        sizes: dict[str, Any] = {}
        for part in text.split(",") if text != "single" else ():
            axis, _, size = (word.strip() for word in part.partition("="))
            _check_axis(axis, part)
            if axis in sizes:
                raise ValueError(f"{text}: {axis} is given twice")
            if not (size.isascii() and size.isdigit()):
                among = "" if text == part else f"{text}: "
                raise ValueError(f"{among}{axis}={size} is no number of ranks; give one such as {axis}=2")
            sizes[axis] = int(size)
        return ParallelSpec(**sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_ranks(self) -> int:
        return prod(self.sizes)

    @property
    def num_shares(self) -> int:
        """Into how many parts the sequences of a pass are split."""
        return prod(getattr(self, axis) for axis in SHARING_OUT)

    @property
    def num_kept_parts(self) -> int:
        """Of weights, of which a rank keeps one and gathers the others."""
        return self.fsdp * self.sp if self.fsdp > 1 else 1

    def tp_of(self, unit: Unit) -> int:
        """How many ranks along tp share out this part of a layer."""
        return 1 if unit in self.replicated else self.tp

    def ep_of(self, unit: Unit) -> int:
        """How many ranks along ep share out the experts that this part of a layer has."""
        return self.ep if unit == "experts" and unit not in self.replicated else 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of neighbours: those of a replica, and ever fewer that exchange ever more with each other, to 1."""
        along = [getattr(self, axis) for axis in AXES[1:]]
        return tuple(dict.fromkeys(prod(along[axis:]) for axis in range(len(along) + 1)))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Of a rank along each axis."""
        found: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return found

    def share_of(self, rank: int) -> int:
        """Which part of a pass's sequences a rank takes."""
        return self._number(self.coordinates(rank), SHARING_OUT)

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """The ranks that differ along these axes only, as one group for each place on the others."""
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

# Along these, each rank takes other sequences of a pass.
SHARING_OUT = ("replicas", "fsdp", "ep")


def _check_axis(axis: str, part: str) -> None:
    if axis in AXES:
        return
    if axis in ("pp", "pipeline"):
        raise ValueError(_NO_PIPELINE)
    near = difflib.get_close_matches(axis, AXES, 1, 0.5)
    raise ValueError(
        f"{part.strip() or 'nothing'} names no axis of a layout"
        + (f" (did you mean {near[0]}?)" if near else "")
        + f": give some of {', '.join(AXES)}, such as fsdp=4,tp=2"
    )
