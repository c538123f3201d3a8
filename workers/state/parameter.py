"""A model's parameter as a matrix that a run trains, of which ranks may have parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

from torch import Tensor

from ..parallel.split import Split
from ..protocol.parallel_spec import AXES


@dataclass(frozen=True)
class DimensionSplit:
    """A dimension of a parameter, split along these axes of the given sizes."""

    dim: int
    split: Split
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class ModelParameter:
    """A parameter of a model, which implements Matrix.

    key: its name in transformers' model. in_files: its name in files. shape: of this rank's part. cuts: the splits that
    make this part of the whole, in order. is_replicated_over_tp: see Matrix.
    """

    key: str
    in_files: str
    shape: tuple[int, ...]
    cuts: tuple[DimensionSplit, ...] = ()
    is_replicated_over_tp: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self._sizes)

    def unsharded(self) -> "ModelParameter":
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] *= cut.split.size
        return replace(self, shape=tuple(shape), cuts=(), is_replicated_over_tp=False)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the parts, given in rank order, in which the last axis varies fastest."""
        axes = list(self._sizes)
        by_place = dict(zip(product(*(range(size) for size in self._sizes.values())), parts, strict=True))
        for cut in reversed(self.cuts):
            along = [axes.index(axis) for axis in cut.sizes]
            by_place = _joined_along(by_place, along, cut)
            axes = [axis for axis in axes if axis not in cut.sizes]
        (whole,) = by_place.values()
        return whole

    def named_tensors(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield self.in_files, own

    def part_of(self, name: str, saved: Tensor) -> Tensor:
        for cut in self.cuts:
            saved = cut.split.part(saved, cut.dim)
        return saved

    @property
    def _sizes(self) -> dict[str, int]:
        """The sizes of the axes along which ranks have different parts, in the order of ranks."""
        sizes = {axis: size for cut in self.cuts for axis, size in cut.sizes.items()}
        return {axis: sizes[axis] for axis in AXES if axis in sizes}


@dataclass(frozen=True)
class ExpertParameter(ModelParameter):
    """A parameter of all experts of a sparse layer: [experts, ...].

    Files store each expert's separately, below in_files. linears: the names in files of the linear layers that are
    stacked in an expert's rows.
    """

    linears: tuple[str, ...] = ()

    def named_tensors(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        for number, expert in zip(self._own_experts, own.unbind(), strict=True):
            for linear, part in zip(self.linears, expert.chunk(len(self.linears)), strict=True):
                yield f"{self.in_files}.{number}.{linear}.weight", part

    def part_of(self, name: str, saved: Tensor) -> Tensor:
        """Returns this rank's part of the tensor of one of its experts.

        Files store an expert's sections separately, so the part is a chunk of the tensor.
        """
        for cut in self.cuts:
            if cut.dim:
                saved = saved.chunk(cut.split.size, cut.dim - 1)[cut.split.index]
        return saved

    @property
    def _own_experts(self) -> range:
        experts = range(self.unsharded().shape[0])
        for cut in self.cuts:
            if not cut.dim:
                size = len(experts) // cut.split.size
                experts = experts[cut.split.index * size : (cut.split.index + 1) * size]
        return experts


# Parts of ranks, by their coordinates along some axes.
Parts = dict[tuple[int, ...], Tensor]


def _joined_along(by_place: Parts, along: Sequence[int], cut: DimensionSplit) -> Parts:
    """Joins the parts of a cut's ranks.

    Args:
        along: indices in a coordinate of the cut's axes.
    """
    of_others: dict[tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]] = {}
    for place, part in by_place.items():
        others = tuple(number for at, number in enumerate(place) if at not in along)
        of_others.setdefault(others, []).append((tuple(place[at] for at in along), part))
    return {
        others: cut.split.whole([part for _, part in sorted(parts, key=itemgetter(0))], cut.dim)
        for others, parts in of_others.items()
    }
