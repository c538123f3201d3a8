"""Chooses the sizes of micro-batches and passes by a device's memory and speed, for a rank and for a plan.

Imports no torch.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..protocol.parallel_spec import ParallelSpec
from ..protocol.worker_config import (
    DEFAULT_MICRO_BATCH_TOKENS,
    TRAININGS,
    Training,
    WorkerConfig,
    default_pass_tokens,
)
from ..resources.machine import loaded_dtype, runs_on_cpu
from ..shapes.layouts.flops import ModelFlops, OwnFlops
from ..shapes.model_shape import ModelShape
from ..shapes.parts import Layer
from .device_rates import rate_in_passes
from .estimate import estimate
from .layout_search import largest_that_fits, usable_bytes
from .workload import Workload

# The token counts of micro-batches that are tried are multiples of this.
_STEP = 256

# The memory that a loaded model leaves free is split in thirds: one for passes, two for caches, adapters and longer
# sequences.
_SHARES = 3

# Launching the kernels of a micro-batch takes this long or more, so a GPU that is done sooner waits.
_SECONDS = 0.1
_MOST_TOKENS = 1 << 16
# Of usual training data, for the operations of attention.
_USUAL_LENGTH = 1024


@dataclass(frozen=True)
class BatchSizes:
    """The default tokens of a micro-batch and of a pass.

    wanted: of a micro-batch if memory sets no limit; None if the size is set.
    """

    micro_batch_tokens: int
    pass_tokens: int
    wanted: int | None


def tokens_that_fit(
    config: WorkerConfig, shape: ModelShape, free_bytes: int, flops_per_second: float
) -> Mapping[Training, int]:
    """Returns the default size of a rank's micro-batches, by what is trained.

    Args:
        config: with the rank's own layout, device and dtype.
        free_bytes: that the loaded model leaves. flops_per_second: of large products.
    """
    dtype, on_cpu, rate = loaded_dtype(config), runs_on_cpu(config), rate_in_passes(flops_per_second)
    load = Workload.of(config, DEFAULT_MICRO_BATCH_TOKENS, dtype, samples=True, on_cpu=on_cpu)
    tokens: dict[Training, int] = {}
    for training in TRAININGS:
        own = replace(load, training=training)
        wanted = wanted_micro_batch_tokens(shape, config.parallel, own, rate)
        tokens[training] = fitting_micro_batch_tokens(
            shape, config.parallel, own, wanted, free_bytes, config.kv_cache_bytes
        )
    return tokens


def wanted_micro_batch_tokens(
    shape: ModelShape, spec: ParallelSpec, load: Workload, flops_per_second: float | None
) -> int:
    """Returns the tokens of a micro-batch, apart from memory: what a GPU computes in 0.1 s, and at least the default,
    below which launching kernels takes most of the time. CPUs and float32 keep the default.

    Args:
        flops_per_second: the GPU's rate in 16 bits during passes; None if unknown.
    """
    if load.on_cpu or load.dtype == "float32" or flops_per_second is None:
        return DEFAULT_MICRO_BATCH_TOKENS
    tokens = _SECONDS * flops_per_second / rank_flops(shape, spec, replace(load, longest=_USUAL_LENGTH))
    return min(_MOST_TOKENS, max(DEFAULT_MICRO_BATCH_TOKENS, _STEP * round(tokens / _STEP)))


def fitting_micro_batch_tokens(
    shape: ModelShape, spec: ParallelSpec, load: Workload, wanted: int, free_bytes: int, cache_bytes: int | None
) -> int:
    """Returns as many of the wanted tokens as fit a third of what a rank has free after its model is loaded, but at
    least 256.

    On a GPU a pass must also fit with the load's slots and cache, and one of more than the usual number with the whole
    cache of a worker. Slots that leave no room for any pass do not count.

    Args:
        cache_bytes: --kv-cache-bytes; None for a worker's default on a GPU, another third.
    """
    third = free_bytes // _SHARES
    base = estimate(shape, spec, load).base
    beside_load = usable_bytes(base + free_bytes) - base - load.kv_cache_bytes
    beside_cache = min(beside_load, free_bytes - (cache_bytes or third))

    def fits(number: int, slots: int) -> bool:
        tokens = _STEP * number
        own = replace(load.with_slots(max(1, slots)), longest=tokens, micro_batch_tokens=tokens)
        memory = estimate(shape, spec, own)
        room = beside_load if tokens <= DEFAULT_MICRO_BATCH_TOKENS else beside_cache
        has_room = load.on_cpu or not slots or memory.trainable.total + memory.in_pass <= room
        return has_room and memory.activations.total <= third

    slots = largest_that_fits(load.slots, lambda slots: fits(1, slots))
    most = wanted if slots else min(wanted, DEFAULT_MICRO_BATCH_TOKENS)
    return _STEP * max(1, largest_that_fits(most // _STEP, lambda number: fits(number, slots)))


def served_batch_sizes(
    shape: ModelShape,
    spec: ParallelSpec,
    load: Workload,
    device_bytes: int,
    flops_per_second: float | None,
    given: int | None = None,
    cache_bytes: int | None = None,
) -> BatchSizes:
    """Returns the sizes that `serve` chooses for ranks whose base model is alone on their devices.

    Args:
        load: whose micro-batches are of the given size, if there is one.
        flops_per_second: see `wanted_micro_batch_tokens`. cache_bytes: see `fitting_micro_batch_tokens`.
        given: --micro-batch-tokens.
    """

    def size(load: Workload) -> tuple[int, int]:
        wanted = wanted_micro_batch_tokens(shape, spec, load, flops_per_second)
        free = max(0, device_bytes - estimate(shape, spec, load).base)
        return wanted, given or fitting_micro_batch_tokens(shape, spec, load, wanted, free, cache_bytes)

    load = load.as_served
    wanted, tokens = size(load)
    _, of_adapters = size(replace(load, training="lora"))
    return BatchSizes(tokens, default_pass_tokens(of_adapters, spec, load.on_cpu), None if given else wanted)


def rank_flops(shape: ModelShape, spec: ParallelSpec, load: Workload) -> float:
    """Returns the operations of a rank for each of its tokens in a pass over sequences of the longest length.

    Counts adapters of all linear layers, the layers that the backward pass computes again, and what each of the ranks
    along tp computes for the same tokens.
    """
    import numpy as np  # imported late: the command line starts without it

    lengths, along_tp = np.array([load.longest]), ParallelSpec(tp=spec.tp, replicated=spec.replicated)
    counts = ModelFlops(shape, along_tp)
    own = OwnFlops(_adapter_flops(shape, along_tp, load.effective_lora_rank), trains_base=load.training == "full")
    of_pass = counts.of_pass(lengths, own, num_trained=load.longest)
    again = 0.0 if load.activations == "keep" else counts.trunk(lengths) + load.longest * own.trunk
    return (of_pass + again) / load.longest


def _adapter_flops(shape: ModelShape, spec: ParallelSpec, lora_rank: int) -> float:
    features = sum(number * _adapter_features(layer, spec) for layer, number in Counter(shape.layers).items())
    return 2.0 * lora_rank * features


def _adapter_features(layer: Layer, spec: ParallelSpec) -> int:
    return sum(sum(pair) for part in layer.parts for pair in part.of_token.adapter_pairs(spec))
