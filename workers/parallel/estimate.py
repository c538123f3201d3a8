"""Memory: the bytes that each rank of a layout needs, from a model's config alone. Imports no torch."""

from dataclasses import dataclass
from math import prod

from .activations import Activations, activations
from .load import Load
from .parameters import OwnFeatures, Parameters, adapter_size, parameters
from .shape import ModelShape
from .spec import ParallelSpec

_FLOAT32 = 4


@dataclass(frozen=True)
class AdapterBytes:
    """Of all adapters on a device. gradients: of a window, and of an operation under way. copies: in the base's dtype,
    and stacked for the products of a micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    copies: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.copies


@dataclass(frozen=True)
class Memory:
    """Bytes on each rank: of what stays, and of the work that comes in turns.

    gathered: layers whose weights other ranks have parts of, and are whole at a time. arriving: the next of them, in
    one piece, from which it is copied. sampling: all such layers. step: the exchange of gradients.
    """

    base: int
    adapters: AdapterBytes
    kv_cache: int
    activations: Activations
    gathered: int
    arriving: int
    sampling: int
    step: int

    @property
    def work(self) -> int:
        """The most that is needed at a time beside what stays."""
        # What scores the last hidden states runs while the last layer stays for its way back.
        return max(self.activations.total + self.gathered + self.arriving, self.sampling, self.step)

    @property
    def total(self) -> int:
        return self.base + self.adapters.total + self.kv_cache + self.work


def estimate(shape: ModelShape, spec: ParallelSpec, load: Load) -> Memory:
    """Of the rank that needs most. The layout is one that `check_layout` lets pass."""
    table = parameters(shape, spec)
    adapters = load.adapter_slots * adapter_size(shape, spec, load.lora_rank)
    return Memory(
        base=sum(each.kept for each in table) * load.number_bytes,
        adapters=_adapters(adapters, load),
        kv_cache=load.kv_cache_bytes if load.samples else 0,
        activations=activations(shape, spec, load),
        gathered=_gathered(table, one_layer=load.zero_stage == "3") * load.number_bytes,
        arriving=_gathered(table, one_layer=True) * load.number_bytes,
        sampling=_gathered(table, one_layer=False) * load.number_bytes if load.samples else 0,
        step=_FLOAT32 * adapters if spec.num_ranks > 1 else 0,
    )


def kv_cache_tokens(shape: ModelShape, spec: ParallelSpec, load: Load) -> int:
    """That the cache of a rank holds."""
    bytes_per_token = 2 * OwnFeatures.of(shape, spec).keys * shape.num_layers * load.number_bytes
    return load.kv_cache_bytes // bytes_per_token


def _gathered(table: list[Parameters], one_layer: bool) -> int:
    """Numbers of those that are gathered for use: of one layer, or of all."""
    return sum(prod(each.own_shape) * (1 if one_layer else each.count) for each in table if each.fsdp > 1)


def _adapters(numbers: int, load: Load) -> AdapterBytes:
    cast = load.number_bytes if load.number_bytes < _FLOAT32 else 0
    stacked = load.number_bytes if load.adapter_slots > 1 else 0
    return AdapterBytes(
        weights=numbers * _FLOAT32,
        gradients=2 * numbers * _FLOAT32,
        optimizer=2 * numbers * _FLOAT32,
        copies=numbers * (cast + stacked),
    )
