"""Learned: what a model has learned, as far as this rank writes it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ..lora import Adapter
from ..ops.memory import is_out_of_memory
from ..parallel.mesh import Mesh
from ..state.flat_params import Layout
from ..state.trainable import LEARNED, Learner, Window


class Tensors(Protocol):
    """Whole ones, by their names in files."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Tensors": ...

    def named(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Flat:
    """All of a vector [size] of a layout."""

    layout: Layout
    vector: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Flat":
        return Flat(self.layout, function(self.vector))

    def named(self) -> Mapping[str, Tensor]:
        return self.layout.named_views(self.vector)


@dataclass(frozen=True, eq=False)
class Apart:
    """Some of them."""

    tensors: Mapping[str, Tensor]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Apart":
        return Apart({name: function(tensor) for name, tensor in self.tensors.items()})

    def named(self) -> Mapping[str, Tensor]:
        return self.tensors


@dataclass(frozen=True, eq=False)
class Learned:
    """vectors: by name, those that there are; of an adapter the first rank writes all, of a model with weights of its
    own each rank writes some. Moments: before the first step a model has none: they are zeros, which it does not keep.

    Its own vectors, or others that stay as they are while it goes on. window: with the gradients since the last step,
    which are among the vectors then, where there are any. has_optimizer: whether with what a resumed training needs.
    part, num_parts: which of the writers this rank is, if any. target: of a draft, the weights that it guesses.
    """

    model: Learner
    vectors: Mapping[str, Tensors]
    num_steps: int
    window: Window | None = None
    has_optimizer: bool = True
    part: int = 0
    num_parts: int = 1
    target: "Learned | None" = None

    @staticmethod
    def by(model: Learner, mesh: Mesh, optimizer: bool = True) -> "Learned":
        """Of a model on the device, without its gradients. All ranks ask at once, here as in `with_window`. optimizer:
        whether with its moments."""
        live = model.live()
        learned = _learned(model, [name for name in LEARNED[: None if optimizer else 1] if name in live], mesh)
        return replace(learned, has_optimizer=optimizer)

    @staticmethod
    def with_window(model: Learner, mesh: Mesh) -> "Learned":
        """Of a model on the device that is in no operation."""
        window = replace(model.window, losses=dict(model.window.losses))
        target = None if model.of_trunk in (None, model) else Learned.by(model.of_trunk, mesh, optimizer=False)
        return replace(_learned(model, model.live(), mesh), window=window, target=target)

    @property
    def is_written_here(self) -> bool:
        """Whether this rank writes any of it."""
        return self.part < self.num_parts or (self.target is not None and self.target.is_written_here)

    def kept(self) -> "Learned":
        """Of vectors of its own, which stay as they are while the model goes on, and hold nothing else. What was put
        together has been made for it."""
        of_model = {vector.untyped_storage().data_ptr() for vector in self.model.live().values()}

        def kept(each: Tensor) -> Tensor:
            storage = each.untyped_storage()
            is_its_own = storage.data_ptr() not in of_model and storage.nbytes() == each.nbytes
            return each if is_its_own else _copied(each)

        own = replace(self, target=None).mapped(kept)
        return replace(own, target=None if self.target is None else self.target.kept())

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Learned":
        vectors = {name: vector.mapped(function) for name, vector in self.vectors.items()}
        return replace(self, vectors=vectors, target=None if self.target is None else self.target.mapped(function))


def _copied(vector: Tensor) -> Tensor:
    """Where the device has no memory for it, on the host."""
    try:
        return vector.clone()
    except Exception as error:
        if vector.device.type == "cpu" or not is_out_of_memory(error):
            raise
        return vector.cpu()


def _learned(model: Learner, names: Iterable[str], mesh: Mesh) -> Learned:
    layout, mesh = model.layout, model.mesh or mesh
    if isinstance(model, Adapter) or mesh.is_single:
        vectors = {name: Flat(layout.whole, layout.whole_vector(model.in_float32(name), mesh)) for name in names}
        return Learned(model, vectors, model.num_steps, part=mesh.rank)
    vectors = {name: Apart(_dealt(layout, model.in_float32(name), mesh)) for name in names}
    return Learned(model, vectors, model.num_steps, part=mesh.rank, num_parts=mesh.spec.num_ranks)


def _dealt(layout: Layout, vector: Tensor, mesh: Mesh) -> dict[str, Tensor]:
    """Of the matrices, whole, those that this rank writes: no rank has all of them at once, and no device several that
    ranks have parts of."""
    dealt: dict[str, Tensor] = {}
    for number, (matrix, whole) in enumerate(layout.whole_matrices(vector, mesh)):
        if number % mesh.spec.num_ranks == mesh.rank:
            has_parts = bool(layout.matrices[number].axes)
            dealt |= matrix.named(whole.cpu() if has_parts else whole)
    return dealt
