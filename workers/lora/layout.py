"""Layout: where the matrices of an adapter lie in its flat vectors, by the layers that it adapts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from ..parallel.split import Split

# Views start at multiples of 64 bytes; the gaps hold zeros, whose gradient and update are zero.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Target:
    """A linear layer that an adapter adapts. name: its path in the causal LM, such as model.layers.0.mlp.up_proj.

    in_split, out_split: how its inputs or outputs are shared out, where ranks have parts of it. num_experts: where it
    is one of each expert of a sparse layer, model.layers.0.mlp.experts.up_proj, each with a pair of matrices of its
    own. expert_split: how experts are shared out. saved_as: what the layer is called in PEFT's files, None = as here.
    is_repeated: whether all ranks along tp have all of it, and run the same tokens.
    """

    name: str
    in_features: int
    out_features: int
    in_split: Split | None = None
    out_split: Split | None = None
    num_experts: int | None = None
    expert_split: Split | None = None
    saved_as: str | None = None
    is_repeated: bool = False

    @property
    def saved_kind(self) -> str:
        return self.saved_as or self.kind

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def own_in(self) -> int:
        """Input features on this rank."""
        return self.in_split.own_size if self.in_split else self.in_features

    @property
    def own_out(self) -> int:
        """Output features on this rank."""
        return self.out_split.own_size if self.out_split else self.out_features

    @property
    def num_own(self) -> int:
        """Pairs of matrices on this rank: of a plain layer one."""
        return self.expert_split.own_size if self.expert_split else self.num_experts or 1

    @property
    def num_weights(self) -> int:
        """By rank of the adapter, on all ranks."""
        return (self.num_experts or 1) * (self.in_features + self.out_features)

    @property
    def sides(self) -> tuple["Side", "Side"]:
        """A and B^T."""
        return Side(self, "lora_A", self.in_split, self.own_in), Side(self, "lora_B", self.out_split, self.own_out)

    def whole(self) -> "Target":
        """As on a rank that has all of it."""
        return replace(self, in_split=None, out_split=None, expert_split=None, is_repeated=False)


@dataclass(frozen=True)
class Side:
    """A [rank, in], or B^T [rank, out], of a target; of one with experts, those of its experts one below the other.

    kind: its name in PEFT's files. split: of its features.
    """

    target: Target
    kind: Literal["lora_A", "lora_B"]
    split: Split | None
    own_features: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Along which ranks have different parts of it."""
        return tuple(split.axis for split in (self.target.expert_split, self.split) if split)

    def part(self, whole: Tensor) -> Tensor:
        """[experts * rank, features] -> this rank's part of it."""
        if self.split:
            whole = self.split.part(whole, 1)
        if not self.target.expert_split:
            return whole
        by_expert = whole.view(self.target.num_experts or 1, -1, whole.shape[1])
        return self.target.expert_split.part(by_expert, 0).flatten(0, 1)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Of the parts of all ranks along `axes`, in their order."""
        num = self.split.size if self.split else 1
        rows = [parts[i : i + num] for i in range(0, len(parts), num)]
        return torch.cat([self.split.whole(each, 1) if self.split else each[0] for each in rows])

    def named(self, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
        """This rank's part as the matrices of PEFT's files: B as [out, rank], and each expert's by itself."""
        by_expert = matrix.view(self.target.num_own, -1, matrix.shape[1])
        for name, each in zip(self._names(), by_expert.unbind(), strict=True):
            yield name, each if self.kind == "lora_A" else each.t()

    def _names(self) -> Iterator[str]:
        path = f"base_model.model.{self.target.name}"
        if self.target.num_experts is None:
            yield f"{path}.{self.kind}.weight"
            return
        experts, linear = path.rpartition(".")[0], self.target.saved_kind
        split, num_own = self.target.expert_split, self.target.num_own
        first = split.index * num_own if split else 0
        for number in range(first, first + num_own):
            yield f"{experts}.{number}.{linear}.{self.kind}.weight"


class Layout:
    """Where A and B of each target lie in the flat vectors [size] of an adapter.

    regions: by the axes along which ranks have different parts of a matrix (none, for many), where all such lie.
    repeated: where those lie of which each rank along tp has the whole gradient, and not a summand.
    """

    def __init__(self, targets: Sequence[Target], rank: int) -> None:
        self.targets = tuple(targets)
        self.size = 0
        self.regions: dict[tuple[str, ...], slice] = {}
        self._rank = rank
        self._starts: dict[tuple[str, str], int] = {}
        self.repeated = slice(0, 0)
        # What is repeated has no axes, and so lies at the beginning.
        sides = [side for target in sorted(targets, key=_is_not_repeated) for side in target.sides]
        for axes in sorted({side.axes for side in sides}):
            first = self.size
            for side in sides:
                if side.axes == axes:
                    self._place(side)
                    if side.target.is_repeated:
                        self.repeated = slice(0, self.size)
            self.regions[axes] = slice(first, self.size)

    def views(self, vector: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B^T [rank, out] in a vector [P], of experts [experts * rank, ...]. B lies transposed: its
        gradient is then twice as fast."""
        a, b = target.sides
        return self._view(vector, a), self._view(vector, b)

    def named_views(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector [P] as the matrices it holds, by their names in PEFT's files."""
        return {
            name: matrix
            for target in self.targets
            for side in target.sides
            for name, matrix in side.named(self._view(vector, side))
        }

    def copy_parts(self, vector: Tensor, matrices: Mapping[str, Tensor]) -> None:
        """Into a vector [P] this rank's parts of whole matrices, by those names."""
        for target in self.targets:
            for side, dim in zip(target.sides, (1, 0), strict=True):
                for name, own in side.named(self._view(vector, side)):
                    own.copy_(side.split.part(matrices[name], dim) if side.split else matrices[name])

    @cached_property
    def whole(self) -> "Layout":
        """As on a rank that has all of every matrix; this one, where it has."""
        return Layout([each.whole() for each in self.targets], self._rank) if any(self.regions) else self

    def whole_vector(self, vector: Tensor, mesh: Mesh) -> Tensor:
        """Of a vector [P] of each rank, which all of them give at once: as `whole` has it. The same one where a rank
        has all."""
        if self.whole is self:
            return vector
        result = vector.new_zeros(self.whole.size)
        for axes, region in self.regions.items():
            vectors = mesh.along(*axes).joined(vector[region][None]).unbind() if axes else (vector[region],)
            for target in self.targets:
                for own, whole in zip(target.sides, target.whole().sides, strict=True):
                    if own.axes == axes:
                        parts = [self._view(each, own, region.start) for each in vectors]
                        self.whole._view(result, whole).copy_(own.whole(parts))
        return result

    def _place(self, side: Side) -> None:
        self._starts[side.target.name, side.kind] = self.size
        self.size += _aligned(side.target.num_own * self._rank * side.own_features)

    def _view(self, vector: Tensor, side: Side, first: int = 0) -> Tensor:
        """first: where the vector begins, of one that is a part."""
        start, features = self._starts[side.target.name, side.kind] - first, side.own_features
        shape = (side.target.num_own * self._rank, features)
        return vector.as_strided(shape, (features, 1), vector.storage_offset() + start)


def _is_not_repeated(target: Target) -> bool:
    return not target.is_repeated


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
