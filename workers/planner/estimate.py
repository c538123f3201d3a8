"""Memory: the bytes that each rank of a layout needs, from a model's config alone. Imports no torch."""

from dataclasses import dataclass
from math import prod

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.model_shape import ModelShape
from ..shapes.styles import placement_of
from .activations import Activations, activations
from .load import Load
from .parameters import OwnFeatures, Parameters, adapter_size, full_size, output_head, parameters
from .trainable import LearnedBytes, bytes_per_number

_FLOAT32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank: of what stays, and of the work that comes in turns.

    learned: what is in all slots. gathered: layers whose weights other ranks have parts of, and are whole at a time.
    arriving: the next of them, in one piece, from which it is copied. gathered_gradients: of a layer that runs back,
    and of the one behind it on the way to other ranks. gathered_head: the output head as it scores, with its gradient.
    sampling: all that is gathered then. saving: a matrix that ranks have parts of, as it is put together. step: the
    exchange of gradients.
    """

    base: int
    learned: LearnedBytes
    kv_cache: int
    activations: Activations
    gathered: int
    arriving: int
    gathered_gradients: int
    gathered_head: int
    sampling: int
    saving: int
    step: int

    @property
    def work(self) -> int:
        """The most that is needed at a time beside what stays."""
        of_pass = self.activations
        in_layers = of_pass.working + self.gathered + self.arriving + self.gathered_gradients
        # What scores the last hidden states runs while the last layer stays for its way back, and memory for the next.
        in_head = of_pass.head + self.gathered + self.arriving + self.gathered_head
        return max(of_pass.kept + max(in_layers, in_head), self.sampling, self.saving, self.step)

    @property
    def total(self) -> int:
        return self.base + self.learned.total + self.kv_cache + self.work


def estimate(shape: ModelShape, spec: ParallelSpec, load: Load) -> Memory:
    """Of the rank that needs most. The layout is one that `check_layout` lets pass."""
    table = parameters(shape, spec)
    numbers, is_full = num_learned(shape, spec, load), load.training == "full"
    of_layer = _gathered(table, one_layer=True)
    return Memory(
        base=round(sum(each.kept * _base_bytes(each, load) for each in table)),
        learned=bytes_per_number(load).times(numbers),
        kv_cache=load.kv_cache_bytes if load.samples else 0,
        activations=activations(shape, spec, load),
        gathered=_gathered(table, one_layer=load.zero_stage == "3") * load.number_bytes,
        arriving=of_layer * load.number_bytes,
        gathered_gradients=2 * of_layer * _FLOAT32 if is_full else 0,
        gathered_head=round(_gathered_head(output_head(table), load)),
        sampling=sum(_whole(each) for each in table) * load.number_bytes if load.samples else 0,
        saving=_FLOAT32 * max(map(_put_together, table)) if is_full else 0,
        step=_FLOAT32 * numbers if spec.num_ranks > 1 and not is_full else 0,
    )


def _base_bytes(parameters: Parameters, load: Load) -> float:
    """Of each number. What is quantised has a float32 for each 64 beside its 4 bits."""
    placement = placement_of(parameters.pattern.removeprefix("model."))
    is_linear = placement is not None and not parameters.pattern.endswith(".bias")
    return 0.5 + 4 / 64 if is_linear and load.base_quantization == "nf4" else load.number_bytes


def num_learned(shape: ModelShape, spec: ParallelSpec, load: Load) -> int:
    """Numbers that a rank has of what is trained."""
    is_full = load.training == "full"
    return load.slots * (full_size(shape, spec) if is_full else adapter_size(shape, spec, load.lora_rank))


def kv_cache_tokens(shape: ModelShape, spec: ParallelSpec, load: Load) -> int:
    """That the cache of a rank holds."""
    bytes_per_token = 2 * OwnFeatures.of(shape, spec).keys * shape.num_layers * load.number_bytes
    return load.kv_cache_bytes // bytes_per_token


def _gathered(table: list[Parameters], one_layer: bool) -> int:
    """Numbers of those that are gathered for use: of one layer, or of all."""
    return sum(_whole(each) // (each.count if one_layer else 1) for each in table if each.is_of_layers)


def _gathered_head(head: Parameters, load: Load) -> float:
    """With the gradient by it, of which this rank's part of the sum comes back."""
    of_gradient = _FLOAT32 * (1 + 1 / head.fsdp) if load.training == "full" else 0
    return _whole(head) * (load.number_bytes + of_gradient)


def _put_together(parameters: Parameters) -> int:
    """Numbers of one of them: as ranks give it, and once more for each axis by which its parts are put in order."""
    of_others = sum(own < whole for own, whole in zip(parameters.own_shape, parameters.shape, strict=True))
    num_cuts = of_others + (parameters.fsdp > 1)
    return (1 + num_cuts) * prod(parameters.shape) if num_cuts else 0


def _whole(parameters: Parameters) -> int:
    """Numbers of those that are gathered, when they are."""
    return parameters.count * prod(parameters.own_shape) if parameters.fsdp > 1 else 0
