"""Layout: where the matrices that a run learns lie in its flat vectors, and what of them each rank has."""

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
    """A tensor that a run learns, of which ranks may have parts."""

    @property
    def key(self) -> Hashable:
        """By which its views are asked for."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's part, as it lies in vectors."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """Along which ranks have different parts of it."""
        ...

    @property
    def is_repeated(self) -> bool:
        """Whether all ranks along tp have all of it, and run the same tokens."""
        ...

    def whole(self) -> "Matrix":
        """As on a rank that has all of it."""
        ...

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Of the parts of all ranks along `axes`, in their order."""
        ...

    def named(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """This rank's part as the tensors that files have of it: views."""
        ...

    def part_of(self, name: str, saved: Tensor) -> Tensor:
        """Of a whole tensor of a file, by this name, what of it this rank has."""
        ...


@dataclass(frozen=True)
class WholeMatrix:
    """One that every rank has all of. key: its name in transformers' model. shape: its own."""

    key: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()
    is_repeated: bool = False

    def whole(self) -> "WholeMatrix":
        return self

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def named(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As PEFT names modules that it saves beside adapters."""
        yield f"base_model.model.{self.key}", own

    def part_of(self, name: str, saved: Tensor) -> Tensor:
        return saved


class Layout:
    """Where each matrix lies in flat vectors [size].

    regions: by the axes along which ranks have different parts of a matrix (none, for many), where all such lie.
    repeated: where those lie of which each rank along tp has the whole gradient, and not a summand.
    """

    def __init__(self, matrices: Sequence[Matrix], multiple_of: int = 1) -> None:
        """multiple_of: what size is to be divisible by; zeros fill it up."""
        self.matrices = tuple(matrices)
        self.size = 0
        self.regions: dict[tuple[str, ...], slice] = {}
        self.repeated: list[slice] = []
        self._starts: dict[Hashable, int] = {}
        self._shapes = {matrix.key: matrix.shape for matrix in self.matrices}
        for axes in sorted({matrix.axes for matrix in self.matrices}):
            first = self.size
            self.repeated.append(self._placed(axes, is_repeated=True))
            self._placed(axes, is_repeated=False)
            self.regions[axes] = slice(first, self.size)
        self.size = -(-self.size // multiple_of) * multiple_of

    def view(self, vector: Tensor, key: Hashable, first: int = 0) -> Tensor:
        """Of the matrix with this key in a vector [size]. first: where the vector begins, of one that is a part."""
        shape = self._shapes[key]
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return vector.as_strided(shape, strides, vector.storage_offset() + self._starts[key] - first)

    def named_views(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector [size] as the tensors that it holds, by their names in files."""
        return {name: own for matrix in self.matrices for name, own in matrix.named(self.view(vector, matrix.key))}

    def copy_parts(self, vector: Tensor, saved: Mapping[str, Tensor], lacking: Collection[str] = ()) -> None:
        """Into a vector [size] this rank's parts of whole tensors, by those names. lacking: names of others, which stay
        as they are."""
        for matrix in self.matrices:
            for name, own in matrix.named(self.view(vector, matrix.key)):
                if name not in lacking:
                    own.copy_(matrix.part_of(name, saved[name]))

    @property
    def num_weights(self) -> int:
        """Of all matrices, on all ranks together."""
        return sum(prod(matrix.shape) for matrix in self.whole.matrices)

    @cached_property
    def whole(self) -> "Layout":
        """As on a rank that has all of every matrix; this one, where it has."""
        return Layout([matrix.whole() for matrix in self.matrices]) if any(self.regions) else self

    def whole_vector(self, vector: Tensor, mesh: Mesh) -> Tensor:
        """Of a vector [size] of each rank, which all of them give at once: as `whole` has it. The same one where a rank
        has all."""
        if self.whole is self:
            return vector
        result = vector.new_zeros(self.whole.size)
        for axes, region in self.regions.items():
            vectors = mesh.along(*axes).joined(vector[region][None]).unbind() if axes else (vector[region],)
            for matrix in self.matrices:
                if matrix.axes == axes:
                    parts = [self.view(each, matrix.key, region.start) for each in vectors]
                    self.whole.view(result, matrix.key).copy_(matrix.joined(parts))
        return result

    def whole_on_first(self, vector: Tensor, mesh: Mesh) -> Tensor | None:
        """As `whole_vector`, for the first rank alone, in host memory; None elsewhere, where nothing is put together.
        Matrices come one after the other."""
        if self.whole is self:
            return vector.cpu() if mesh.is_first else None
        result = vector.new_zeros(self.whole.size, device="cpu") if mesh.is_first else None
        for matrix in self.matrices:
            team = mesh.along(*matrix.axes)
            parts = team.at_first(self.view(vector, matrix.key)) if team.ranks[0] == 0 else None
            if result is not None and parts is not None:
                self.whole.view(result, matrix.key).copy_(matrix.joined(parts))
        return result

    def whole_matrices(self, vector: Tensor, mesh: Mesh) -> Iterator[tuple[Matrix, Tensor]]:
        """As `whole_vector`, one matrix after the other: each with what `whole` calls it. One that ranks have no parts
        of is a view of the vector."""
        for matrix, whole in zip(self.matrices, self.whole.matrices, strict=True):
            own = self.view(vector, matrix.key)
            if matrix.axes:
                own = matrix.joined(mesh.along(*matrix.axes).joined(own[None]).unbind())
            yield whole, own

    def _placed(self, axes: tuple[str, ...], is_repeated: bool) -> slice:
        """Where all such lie from now on, behind the others."""
        first = self.size
        for matrix in self.matrices:
            if matrix.axes == axes and matrix.is_repeated == is_repeated:
                self._starts[matrix.key] = self.size
                self.size += _aligned(prod(matrix.shape))
        return slice(first, self.size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
