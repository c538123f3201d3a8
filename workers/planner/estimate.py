"""Estimates the bytes that each rank of a layout needs, from a model's config alone. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.layouts.parameters import ParameterGroup, parameters
from ..shapes.model_shape import ModelShape
from .activations import Activations, activations
from .trainable_memory import TrainableBytes, adapter_size, bytes_per_number, full_size
from .workload import Workload

_FLOAT32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each rank, permanent and temporary.

    trainable: what is trained, in all slots.
    dequantized: the largest packed weight as numbers, for a product.
    gathered: weights that are whole at the same time, of layers whose parts are on other ranks.
    prefetched: the next layer's weights, in the buffer from which they are copied.
    gathered_gradients: of the layer in its backward pass, and of the layer after it while these are being sent.
    gathered_head: the output head while it scores, with its gradient. sampling: everything that is gathered to sample.
    saving: a matrix that is assembled from the ranks' parts. step: the exchange of gradients.
    """

    base: int
    trainable: TrainableBytes
    kv_cache: int
    activations: Activations
    dequantized: int
    gathered: int
    prefetched: int
    gathered_gradients: int
    gathered_head: int
    sampling: int
    saving: int
    step: int

    @property
    def in_pass(self) -> int:
        """Returns the peak of temporary memory while a pass runs."""
        of_pass = self.activations
        in_layers = of_pass.working + self.dequantized + self.gathered + self.prefetched + self.gathered_gradients
        # The head runs while the last layer is kept for its backward pass, with the buffer for the next layer.
        in_head = of_pass.head + self.gathered + self.prefetched + self.gathered_head
        return of_pass.kept + max(in_layers, in_head)

    @property
    def work(self) -> int:
        return max(self.in_pass, self.sampling, self.saving, self.step)

    @property
    def total(self) -> int:
        return self.base + self.trainable.total + self.kv_cache + self.work


def estimate(shape: ModelShape, spec: ParallelSpec, load: Workload) -> MemoryEstimate:
    """Returns the bytes of the rank that needs most. The layout must have passed `check_layout`."""
    table = parameters(shape, spec)
    numbers, is_full = num_learned(shape, spec, load), load.training == "full"
    of_layer = _gathered(table, one_layer=True)
    return MemoryEstimate(
        base=round(sum(_base_bytes(each, shape, load) for each in table)),
        trainable=bytes_per_number(load).times(numbers),
        kv_cache=load.kv_cache_bytes if load.samples else 0,
        activations=activations(shape, spec, load),
        dequantized=_dequantized(table, shape, load) * load.number_bytes,
        gathered=_gathered(table, one_layer=load.zero_stage == "3") * load.number_bytes,
        prefetched=of_layer * load.number_bytes,
        gathered_gradients=2 * of_layer * _FLOAT32 if is_full else 0,
        gathered_head=round(_gathered_head(output_head(table), load)),
        sampling=sum(_whole(each) for each in table) * load.number_bytes if load.samples else 0,
        saving=_FLOAT32 * max(map(_assembled, table)) if is_full else 0,
        step=_FLOAT32 * numbers if spec.num_ranks > 1 and not is_full else 0,
    )


def _base_bytes(parameters: ParameterGroup, shape: ModelShape, load: Workload) -> float:
    """Returns the bytes of frozen parameters."""
    packed, share = _packed_bytes(parameters, shape, load), _packed_share(parameters, load)
    plain = parameters.kept * load.number_bytes
    return plain if packed is None else (1 - share) * plain + share * parameters.count * packed / parameters.fsdp


def _packed_bytes(parameters: ParameterGroup, shape: ModelShape, load: Workload) -> float | None:
    """Returns the bytes of one of these parameters if it is packed, None if it cannot be."""
    if load.base_quantization == "none" or not parameters.is_quantizable:
        return None
    if load.base_quantization == "nf4":  # 4 bits, and a float32 for each 64 of them
        return prod(parameters.own_shape) * (0.5 + 4 / 64)
    return shape.released.bytes_of(parameters.own_shape)


def _packed_share(parameters: ParameterGroup, load: Workload) -> float:
    """Returns the share of these parameters that is packed, of those that can be."""
    return 1.0 if load.base_quantization == "nf4" else 1 - parameters.num_unpacked / parameters.count


def _dequantized(table: Sequence[ParameterGroup], shape: ModelShape, load: Workload) -> int:
    """Returns the numbers of the largest weight that is packed."""
    packed = (each for each in table if _packed_share(each, load) and _packed_bytes(each, shape, load) is not None)
    return max((prod(each.own_shape) for each in packed), default=0)


def num_learned(shape: ModelShape, spec: ParallelSpec, load: Workload) -> int:
    is_full = load.training == "full"
    return load.slots * (full_size(shape, spec) if is_full else adapter_size(shape, spec, load.lora_rank))


def kv_cache_tokens(shape: ModelShape, spec: ParallelSpec, load: Workload) -> int:
    return load.kv_cache_bytes // max(1, shape.cache_size(spec, load.number_bytes).bytes_per_token)


def _gathered(table: list[ParameterGroup], one_layer: bool) -> int:
    """Returns the numbers that are gathered, of one layer or of all layers."""
    return sum(_whole(each) // (each.count if one_layer else 1) for each in table if each.is_of_layers)


def _gathered_head(head: ParameterGroup, load: Workload) -> float:
    """Returns the bytes of the gathered head and of its gradient, whose sum is scattered back to the ranks."""
    of_gradient = _FLOAT32 * (1 + 1 / head.fsdp) if load.training == "full" else 0
    return _whole(head) * (load.number_bytes + of_gradient)


def _assembled(parameters: ParameterGroup) -> int:
    """Returns the numbers needed to assemble one parameter: one copy, and another for each axis along which its parts
    are reordered."""
    of_others = sum(own < whole for own, whole in zip(parameters.own_shape, parameters.shape, strict=True))
    num_cuts = of_others + (parameters.fsdp > 1)
    return (1 + num_cuts) * prod(parameters.shape) if num_cuts else 0


def _whole(parameters: ParameterGroup) -> int:
    """Returns the numbers of gathered parameters, 0 if they are not gathered."""
    return parameters.count * prod(parameters.own_shape) if parameters.fsdp > 1 else 0


def output_head(table: Sequence[ParameterGroup]) -> ParameterGroup:
    """Returns the output head, which may be the embedding."""
    by_pattern = {each.pattern: each for each in table}
    return by_pattern.get("lm_head.weight") or table[0]
