"""Finds the smallest layout that fits a device, and changes that would make another one fit. Imports no torch.

Among layouts of equally many ranks it takes the one that exchanges least, by the order of the axes in `_exchanged`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..protocol.parallel_spec import ParallelSpec
from ..resources.machine import gigabytes
from ..shapes.layouts.checks import divisors, valid_ep, valid_tp
from ..shapes.model_shape import ModelShape
from .device_rates import DEVICES_PER_NODE
from .estimate import MemoryEstimate, estimate
from .group_memory import RankBytes, group_memory, remedy_of
from .workload import Workload

# The share of device memory for CUDA and its libraries, collectives' buffers, and fragmentation. An estimate.
_RESERVE = 0.08

MAX_RANKS = 1024

# The token counts of micro-batches that are tried are multiples of this.
_STEP = 256

# A pass that computes its layers again has at most this part of the speed.
_RECOMPUTED_SPEED = 0.75


@dataclass(frozen=True)
class PlannedLayout:
    """A layout and what each of its ranks needs. smaller: the best layout with fewer ranks, which does not fit."""

    spec: ParallelSpec
    load: Workload
    memory: MemoryEstimate
    smaller: "PlannedLayout | None" = None


@dataclass(frozen=True)
class SamplerLayout:
    """The layout of a sampler worker, and the bytes of each rank."""

    spec: ParallelSpec
    num_bytes: int


def usable_bytes(device_bytes: int) -> int:
    return int(device_bytes * (1 - _RESERVE))


def smallest_layout(
    shape: ModelShape, load: Workload, device_bytes: int, num_devices: int | None = None, link: str = "nvlink"
) -> PlannedLayout | None:
    """Returns the layout with the fewest ranks that fits, of equals the one that exchanges least; None if none does.

    Ranks along tp are of one node.
    """
    best: PlannedLayout | None = None
    for choices in _by_ranks(shape, load, num_devices):
        fitting = [each for each in choices if _need(each) <= usable_bytes(device_bytes)]
        if fitting:
            return replace(min(fitting, key=lambda each: _exchanged(each.spec, load, link)), smaller=best)
        best = min([*choices, *([best] if best else [])], key=_need)
    return None


def smallest_sampler_layout(
    shape: ModelShape, load: Workload, prefill_tokens: int, device_bytes: int, num_devices: int | None = None
) -> SamplerLayout:
    """Returns the layout of tp and ep with the fewest ranks that can sample on these devices, of equals the one with
    most ranks along tp. Raises ValueError if none fits.

    Args:
        prefill_tokens: most tokens of prompts that run at a time.
    """
    load = replace(load, samples=True)
    least: SamplerLayout | None = None
    for num_ranks in numbers_of_ranks(num_devices or MAX_RANKS):
        specs = (spec for spec in layouts(shape, num_ranks) if spec.tp * spec.ep == num_ranks)
        every = [SamplerLayout(each, group_memory(shape, each, load, (), prefill_tokens).peak) for each in specs]
        fitting = [each for each in every if each.num_bytes <= usable_bytes(device_bytes)]
        if fitting:
            return min(fitting, key=lambda each: each.spec.ep)
        least = min([*every, *([least] if least else [])], key=lambda each: each.num_bytes, default=None)
    assert least is not None, "one rank has a layout"
    where = f" on {num_devices} devices" if num_devices else ""
    raise ValueError(
        f"no layout of tp and ep of {shape.name} fits its samplers{where}: {least.spec} needs least, "
        f"{gigabytes(least.num_bytes)} on each rank: lower --kv-cache-bytes, or use larger devices"
    )


def _exchanged(spec: ParallelSpec, load: Workload, link: str) -> tuple[int, int, int]:
    """Returns the ranks along the axes that exchange most for such a load, these first.

    Ranks that sample read weights at each step, which tp divides and then ep; over slow links its sums take longer
    than that. Full models have a gradient for each weight, so parts of weights (fsdp, ep) cost little more. Adapters
    have nearly none: tokens (sp) cost least, across nodes tp inside each of them.
    """
    if load.samples and link == "nvlink":
        return spec.fsdp, spec.sp, spec.ep
    if load.training == "full":
        return spec.tp, spec.sp, spec.fsdp
    return spec.fsdp, spec.ep, spec.tp if spec.num_ranks <= DEVICES_PER_NODE else spec.sp


def loads_with_fewer_activations(load: Workload) -> list[Workload]:
    """Returns loads that keep fewer activations, the fastest first."""
    return [replace(load, activations=way) for way in ("recompute", "offload")] if load.activations == "keep" else []


def smallest_memory_layout(shape: ModelShape, load: Workload, num_devices: int | None = None) -> PlannedLayout:
    return min((choice for choices in _by_ranks(shape, load, num_devices) for choice in choices), key=_need)


def layout_that_fits(
    shape: ModelShape,
    loads: Sequence[Workload],
    device_bytes: int,
    num_devices: int | None = None,
    link: str = "nvlink",
    with_replicas: bool = True,
) -> PlannedLayout:
    """Returns the smallest layout for one of the loads, which differ in the activations that they keep, see
    `recomputing_pays`. Raises ValueError if none fits.

    Activations in host memory are the last resort, as neither that memory nor the copies are counted.

    Args:
        with_replicas: whether replicas run on the other devices, of num_devices.
    """
    best: PlannedLayout | None = None
    for load in loads:
        if load.activations == "offload" and best is not None:
            break
        choice = smallest_layout(shape, load, device_bytes, num_devices, link)
        if choice is not None and (
            best is None or recomputing_pays(choice.spec, best.spec, num_devices if with_replicas else None)
        ):
            best = choice
    if best is not None:
        return best
    least = smallest_memory_layout(shape, loads[-1], num_devices)
    memory = least.memory
    where, more = (f" on {num_devices} devices", ", or take more devices") if num_devices else ("", "")
    learned = "adapters" if least.load.training == "lora" else "models' own weights"
    terms = RankBytes(memory.base, memory.trainable.total, kv_cache=memory.kv_cache, activations=memory.work)
    raise ValueError(
        f"no layout of {shape.name} fits{where}: {least.spec} with --activations {least.load.activations} needs least, "
        f"{gigabytes(memory.total)} on each rank (base {gigabytes(memory.base)}, {learned} "
        f"{gigabytes(memory.trainable.total)}, key/value cache {gigabytes(memory.kv_cache)}, work "
        f"{gigabytes(memory.work)}): {remedy_of(terms, least.load)}{more}"
    )


def recomputing_pays(fewer: ParallelSpec, kept: ParallelSpec, num_devices: int | None) -> bool:
    """True if layers should be computed again because fewer ranks then fit: to keep them would take several nodes, or
    leave devices idle that replicas of the smaller layout use."""
    if fewer.num_ranks >= kept.num_ranks:
        return False
    used, used_by_kept = ((num_devices or kept.num_ranks) // each.num_ranks * each.num_ranks for each in (fewer, kept))
    return kept.num_ranks > DEVICES_PER_NODE or _RECOMPUTED_SPEED * used > used_by_kept


@dataclass(frozen=True)
class Remedy:
    """A change that is enough to make a layout fit.

    load, spec: with the change applied.
    """

    flags: str
    spec: ParallelSpec
    load: Workload


def remedies(
    shape: ModelShape, spec: ParallelSpec, load: Workload, device_bytes: int, num_devices: int | None = None
) -> list[Remedy]:
    """Returns single changes that are each enough. If none is, each is combined with a single slot."""
    found = list(_single_changes(shape, spec, load, device_bytes, num_devices))
    if found or load.slots == 1:
        return found
    load = load.with_slots(1)
    found = _single_changes(shape, spec, load, device_bytes, num_devices)
    return [replace(remedy, flags=f"{load.slots_flag} 1 {remedy.flags}") for remedy in found]


def _single_changes(
    shape: ModelShape, spec: ParallelSpec, load: Workload, device_bytes: int, num_devices: int | None
) -> Iterator[Remedy]:
    def largest(limit: int, changed: Callable[[int], Workload]) -> Workload | None:
        most = largest_that_fits(limit, lambda number: _fits(shape, spec, changed(number), device_bytes))
        return changed(most) if most else None

    if fewer := largest(load.slots - 1, load.with_slots):
        yield Remedy(f"{load.slots_flag} {fewer.slots}", spec, fewer)
    if less := largest(load.kv_cache_bytes >> 20, lambda number: replace(load, kv_cache_bytes=number << 20)):
        yield Remedy(f"--kv-cache-bytes {less.kv_cache_bytes >> 20}MiB", spec, less)
    if shorter := largest(load.tokens // _STEP, lambda number: load.with_max_tokens(_STEP * number)):
        words = f"--max-context-length {shorter.longest} --micro-batch-tokens {shorter.micro_batch_tokens}"
        yield Remedy(words, spec, shorter)
    for less in loads_with_fewer_activations(load):
        if _fits(shape, spec, less, device_bytes):
            yield Remedy(f"--activations {less.activations}", spec, less)
            break
    if load.samples and _fits(shape, spec, only := replace(load, samples=False), device_bytes):
        yield Remedy("--train-only", spec, only)
    if choice := smallest_layout(shape, load, device_bytes, num_devices):
        yield Remedy(f"--parallel {choice.spec.axes}", choice.spec, load)


def _fits(shape: ModelShape, spec: ParallelSpec, load: Workload, device_bytes: int) -> bool:
    return estimate(shape, spec, load).total <= usable_bytes(device_bytes)


def largest_that_fits(limit: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number up to `limit` that fits, found by bisection; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _by_ranks(shape: ModelShape, load: Workload, num_devices: int | None) -> Iterator[list[PlannedLayout]]:
    for num_ranks in numbers_of_ranks(num_devices or MAX_RANKS):
        yield [PlannedLayout(spec, load, estimate(shape, spec, load)) for spec in layouts(shape, num_ranks)]


def _need(choice: PlannedLayout) -> int:
    return choice.memory.total


def numbers_of_ranks(most: int) -> Iterator[int]:
    """Yields powers of two, and last the number of all devices."""
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most


def layouts(shape: ModelShape, num_ranks: int) -> Iterator[ParallelSpec]:
    for tp in valid_tp(shape):
        if tp > DEVICES_PER_NODE or num_ranks % tp:
            continue
        for ep in valid_ep(shape):
            if num_ranks // tp % ep:
                continue
            rest = num_ranks // tp // ep
            for sp in divisors(rest):
                spec = shape.own_layout(ParallelSpec(fsdp=rest // sp, ep=ep, sp=sp, tp=tp))
                if all(each.suits_sp(spec) for each in shape.divisible()):
                    yield spec
