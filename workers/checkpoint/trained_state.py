"""Collects the trained state of a model that this rank writes into a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ..lora import Adapter
from ..parallel.mesh import Mesh
from ..resources.memory import is_out_of_memory
from ..state.flat_params import FlatLayout
from ..state.gradients import GradientWindow
from ..state.trainable import Trainable
from ..state.vectors import TRAINED_VECTORS


class NamedTensors(Protocol):
    """Unsharded tensors by their names in files."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "NamedTensors": ...

    def named(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, eq=False)
class FlatTensors:
    """Holds all tensors of a layout, as one vector [size]."""

    layout: FlatLayout
    vector: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "FlatTensors":
        return FlatTensors(self.layout, function(self.vector))

    def named(self) -> Mapping[str, Tensor]:
        return self.layout.named_views(self.vector)


@dataclass(frozen=True, eq=False)
class SeparateTensors:
    """Holds some of the tensors, separately."""

    tensors: Mapping[str, Tensor]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "SeparateTensors":
        return SeparateTensors({name: function(tensor) for name, tensor in self.tensors.items()})

    def named(self) -> Mapping[str, Tensor]:
        return self.tensors


@dataclass(frozen=True, eq=False)
class TrainedState:
    """The trained state of a model: the model's own vectors, or copies that stay unchanged while it trains on.

    vectors: by name. The first rank writes all tensors of an adapter; each rank writes some of a fully trained model.
        Moments are missing before the first step: they are zeros, and a model does not allocate them until then.
    window: set if the gradients since the last step are included; these are among the vectors, if there are any.
    has_optimizer: whether the optimizer state is included.
    part, num_parts: this rank's number among the writing ranks, at least num_parts if it is not one of them.
    """

    model: Trainable
    vectors: Mapping[str, NamedTensors]
    num_steps: int
    window: GradientWindow | None = None
    has_optimizer: bool = True
    part: int = 0
    num_parts: int = 1

    @staticmethod
    def without_gradients(model: Trainable, mesh: Mesh, optimizer: bool = True) -> "TrainedState":
        """Returns the state of a model on the device, without gradients, and with moments if `optimizer` is set.

        All ranks call this together, as they do `with_window`.
        """
        live = model.live_vectors()
        learned = _learned(model, [name for name in TRAINED_VECTORS[: None if optimizer else 1] if name in live], mesh)
        return replace(learned, has_optimizer=optimizer)

    @staticmethod
    def with_window(model: Trainable, mesh: Mesh) -> "TrainedState":
        """Returns the state of a model on the device with gradients and moments, outside of any operation."""
        window = replace(model.gradients.window, losses=dict(model.gradients.window.losses))
        live = model.live_vectors()
        names = [name for name in (*TRAINED_VECTORS, "accumulator") if name in live]
        return replace(_learned(model, names, mesh), window=window)

    @property
    def has_part_to_write(self) -> bool:
        return self.part < self.num_parts

    def copied(self) -> "TrainedState":
        """Returns the state with tensors that stay unchanged while the model trains on, and whose storage holds nothing
        else. Tensors that were gathered from several ranks are already copies."""
        of_model = {vector.untyped_storage().data_ptr() for vector in self.model.live_vectors().values()}

        def kept(each: Tensor) -> Tensor:
            storage = each.untyped_storage()
            is_its_own = storage.data_ptr() not in of_model and storage.nbytes() == each.nbytes
            return each if is_its_own else _copied(each)

        return self.mapped(kept)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "TrainedState":
        return replace(self, vectors={name: vector.mapped(function) for name, vector in self.vectors.items()})


def _copied(vector: Tensor) -> Tensor:
    """Copies a vector, to the host if the device has no memory for it."""
    try:
        return vector.clone()
    except Exception as error:
        if vector.device.type == "cpu" or not is_out_of_memory(error):
            raise
        return vector.cpu()


def _learned(model: Trainable, names: Iterable[str], mesh: Mesh) -> TrainedState:
    layout, mesh = model.layout, model.mesh or mesh
    if isinstance(model, Adapter) or mesh.is_single:
        vectors = {
            name: FlatTensors(layout.unsharded, layout.whole_vector(model.in_float32(name), mesh)) for name in names
        }
        return TrainedState(model, vectors, model.num_steps, part=mesh.rank)
    vectors = {name: SeparateTensors(_matrices_to_write(layout, model.in_float32(name), mesh)) for name in names}
    return TrainedState(model, vectors, model.num_steps, part=mesh.rank, num_parts=mesh.spec.num_ranks)


def _matrices_to_write(layout: FlatLayout, vector: Tensor, mesh: Mesh) -> dict[str, Tensor]:
    """Returns the unsharded matrices that this rank writes.

    No rank ever holds all matrices, and no device holds more than one that was gathered from several ranks.
    """
    dealt: dict[str, Tensor] = {}
    for number, (matrix, whole) in enumerate(layout.whole_matrices(vector, mesh)):
        if number % mesh.spec.num_ranks == mesh.rank:
            has_parts = bool(layout.matrices[number].axes)
            dealt |= matrix.named_tensors(whole.cpu() if has_parts else whole)
    return dealt
