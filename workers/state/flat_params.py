"""The layout of a run's trained matrices in flat vectors, and the parts of them that each rank has."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

from torch import Tensor

from ..parallel.mesh import Mesh

# Views start at multiples of 64 bytes; the gaps hold zeros, whose gradient and update are zero.
_ALIGNMENT = 16


class Matrix(Protocol):
    """A tensor that a run trains, of which ranks may have parts."""

    @property
    def key(self) -> Hashable:
        """The key of its views in a layout."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part in a vector."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which ranks have different parts of it."""
        ...

    @property
    def is_replicated_over_tp(self) -> bool:
        """True if all ranks along tp have all of it, and run the same tokens."""
        ...

    def unsharded(self) -> "Matrix":
        """Returns the unsplit matrix."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the parts of all ranks along `axes`, given in rank order."""
        ...

    def named_tensors(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields views of this rank's part as the tensors that files have of it."""
        ...

    def part_of(self, name: str, saved: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor that files have under this name."""
        ...


@dataclass(frozen=True)
class WholeMatrix:
    """A matrix that every rank has whole. key: its name in transformers' model."""

    key: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()
    is_replicated_over_tp: bool = False

    def unsharded(self) -> "WholeMatrix":
        return self

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def named_tensors(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields it under the name that PEFT gives to modules saved with adapters."""
        yield f"base_model.model.{self.key}", own

    def part_of(self, name: str, saved: Tensor) -> Tensor:
        return saved


class FlatLayout:
    """Places the matrices in flat vectors [size].

    regions: the range of all matrices that ranks have different parts of along the same axes, by these axes (often
    none). replicated: the ranges of matrices for which each rank along tp has the whole gradient, and not a summand.
    """

    def __init__(self, matrices: Sequence[Matrix], multiple_of: int = 1) -> None:
        """Places the matrices, and pads the size with zeros to a multiple of `multiple_of`."""
        self.matrices = tuple(matrices)
        self.size = 0
        self.regions: dict[tuple[str, ...], slice] = {}
        self.replicated: list[slice] = []
        self._starts: dict[Hashable, int] = {}
        self._shapes = {matrix.key: matrix.shape for matrix in self.matrices}
        for axes in sorted({matrix.axes for matrix in self.matrices}):
            first = self.size
            self.replicated.append(self._placed(axes, is_repeated=True))
            self._placed(axes, is_repeated=False)
            self.regions[axes] = slice(first, self.size)
        self.size = -(-self.size // multiple_of) * multiple_of

    def view(self, vector: Tensor, key: Hashable, first: int = 0) -> Tensor:
        """Returns a view of the matrix with this key.

        Args:
            vector: [size], or a part of one.
            first: where the part begins.
        """
        shape = self._shapes[key]
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return vector.as_strided(shape, strides, vector.storage_offset() + self._starts[key] - first)

    def start_of(self, key: Hashable) -> int:
        """Returns where the matrix with this key begins in a vector."""
        return self._starts[key]

    def named_views(self, vector: Tensor) -> dict[str, Tensor]:
        """Returns views of the tensors in a vector [size], by their names in files."""
        return {
            name: own for matrix in self.matrices for name, own in matrix.named_tensors(self.view(vector, matrix.key))
        }

    def copy_parts(self, vector: Tensor, saved: Mapping[str, Tensor], lacking: Collection[str] = ()) -> None:
        """Copies this rank's parts of whole tensors, given by name, into a vector [size].

        Args:
            lacking: names of tensors that keep their values.
        """
        for matrix in self.matrices:
            for name, own in matrix.named_tensors(self.view(vector, matrix.key)):
                if name not in lacking:
                    own.copy_(matrix.part_of(name, saved[name]))

    @property
    def num_weights(self) -> int:
        """Weights of all matrices, on all ranks together."""
        return sum(prod(matrix.shape) for matrix in self.unsharded.matrices)

    @cached_property
    def unsharded(self) -> "FlatLayout":
        """The unsplit layout; this one if it is not split."""
        return FlatLayout([matrix.unsharded() for matrix in self.matrices]) if any(self.regions) else self

    def whole_vector(self, vector: Tensor, mesh: Mesh) -> Tensor:
        """Returns the vector in the unsplit layout, given each rank's vector [size].

        All ranks call it together. If the layout is not split, the result is the vector itself.
        """
        if self.unsharded is self:
            return vector
        result = vector.new_zeros(self.unsharded.size)
        for axes, region in self.regions.items():
            vectors = mesh.along(*axes).all_gather(vector[region][None]).unbind() if axes else (vector[region],)
            for matrix in self.matrices:
                if matrix.axes == axes:
                    parts = [self.view(each, matrix.key, region.start) for each in vectors]
                    self.unsharded.view(result, matrix.key).copy_(matrix.join(parts))
        return result

    def whole_on_first(self, vector: Tensor, mesh: Mesh) -> Tensor | None:
        """Returns the result of `whole_vector` in host memory on the first rank, and None on others.

        Matrices are gathered one at a time, to the first rank only.
        """
        if self.unsharded is self:
            return vector.cpu() if mesh.is_first else None
        result = vector.new_zeros(self.unsharded.size, device="cpu") if mesh.is_first else None
        for matrix in self.matrices:
            team = mesh.along(*matrix.axes)
            parts = team.gather_at_first(self.view(vector, matrix.key)) if team.ranks[0] == 0 else None
            if result is not None and parts is not None:
                self.unsharded.view(result, matrix.key).copy_(matrix.join(parts))
        return result

    def whole_matrices(self, vector: Tensor, mesh: Mesh) -> Iterator[tuple[Matrix, Tensor]]:
        """Yields the matrices of `whole_vector` one at a time, each with its unsplit matrix.

        A matrix that ranks have no parts of is a view of the vector.
        """
        for matrix, whole in zip(self.matrices, self.unsharded.matrices, strict=True):
            own = self.view(vector, matrix.key)
            if matrix.axes:
                own = matrix.join(mesh.along(*matrix.axes).all_gather(own[None]).unbind())
            yield whole, own

    def _placed(self, axes: tuple[str, ...], is_repeated: bool) -> slice:
        first = self.size
        for matrix in self.matrices:
            if matrix.axes == axes and matrix.is_replicated_over_tp == is_repeated:
                self._starts[matrix.key] = self.size
                self.size += _aligned(prod(matrix.shape))
        return slice(first, self.size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
