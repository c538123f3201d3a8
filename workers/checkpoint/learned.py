"""Collects the trained state of a model that this rank writes into a checkpoint."""

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
    """Unsharded tensors by their names in files."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Tensors": ...

    def named(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Flat:
    """Holds all tensors of a layout, as one vector [size]."""

    layout: Layout
    vector: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Flat":
        return Flat(self.layout, function(self.vector))

    def named(self) -> Mapping[str, Tensor]:
        return self.layout.named_views(self.vector)


@dataclass(frozen=True, eq=False)
class Apart:
    """Holds some of the tensors, separately."""

    tensors: Mapping[str, Tensor]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Apart":
        return Apart({name: function(tensor) for name, tensor in self.tensors.items()})

    def named(self) -> Mapping[str, Tensor]:
        return self.tensors


@dataclass(frozen=True, eq=False)
class Learned:
    """The trained state of a model: the model's own vectors, or copies that stay unchanged while it trains on.

    vectors: by name. The first rank writes all tensors of an adapter; each rank writes some of a fully trained model.
        Moments are missing before the first step: they are zeros, and a model does not allocate them until then.
    window: set if the gradients since the last step are included; these are among the vectors, if there are any.
    has_optimizer: whether the optimizer state is included.
    part, num_parts: this rank's number among the writing ranks, at least num_parts if it is not one of them.
    target: for a draft, the weights of its target.
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
        """Returns the state of a model on the device, without gradients, and with moments if `optimizer` is set.

        All ranks call this together, as they do `with_window`.
        """
        live = model.live()
        learned = _learned(model, [name for name in LEARNED[: None if optimizer else 1] if name in live], mesh)
        return replace(learned, has_optimizer=optimizer)

    @staticmethod
    def with_window(model: Learner, mesh: Mesh) -> "Learned":
        """Returns the state of a model on the device with gradients and moments, outside of any operation."""
        window = replace(model.window, losses=dict(model.window.losses))
        target = None if model.of_trunk in (None, model) else Learned.by(model.of_trunk, mesh, optimizer=False)
        return replace(_learned(model, model.live(), mesh), window=window, target=target)

    @property
    def is_written_here(self) -> bool:
        """True if this rank writes any of it."""
        return self.part < self.num_parts or (self.target is not None and self.target.is_written_here)

    def kept(self) -> "Learned":
        """Returns the state with tensors that stay unchanged while the model trains on, and whose storage holds nothing
        else. Tensors that were gathered from several ranks are already copies."""
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
    """Copies a vector, to the host if the device has no memory for it."""
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
    """Returns the unsharded matrices that this rank writes.

    No rank ever holds all matrices, and no device holds more than one that was gathered from several ranks.
    """
    dealt: dict[str, Tensor] = {}
    for number, (matrix, whole) in enumerate(layout.whole_matrices(vector, mesh)):
        if number % mesh.spec.num_ranks == mesh.rank:
            has_parts = bool(layout.matrices[number].axes)
            dealt |= matrix.named(whole.cpu() if has_parts else whole)
    return dealt
