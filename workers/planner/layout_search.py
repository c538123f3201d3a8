"""Finds the smallest layout that fits a device, and changes that would make another one fit. Imports no torch.

Among layouts of equally many ranks, and among ways to keep activations, it takes the one with the least time for a
token, see exchanges.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..protocol.parallel_spec import ParallelSpec
from ..resources.machine import gigabytes
from ..shapes.layouts.checks import divisors, valid_ep, valid_tp
from ..shapes.model_shape import ModelShape
from .estimate import MemoryEstimate, estimate
from .exchanges import TokenCost, sampling_cost, training_cost
from .group_memory import RankBytes, group_memory
from .largest_term import remedy_of
from .speeds import DEVICES_PER_NODE, NVLINK, Speeds
from .workload import Workload

# The share of device memory for CUDA and its libraries, collectives' buffers, and fragmentation. An estimate.
_RESERVE = 0.08

MAX_RANKS = 1024

# The token counts of micro-batches that are tried are multiples of this.
_STEP = 256


@dataclass(frozen=True)
class Candidate:
    """A layout that was considered. num_bytes: that each of its ranks needs. cost: None if these do not fit."""

    spec: ParallelSpec
    num_bytes: int
    cost: TokenCost | None = None


@dataclass(frozen=True)
class Way:
    """A way to keep activations, and the cost of the layout that was found for it."""

    activations: str
    spec: ParallelSpec
    cost: TokenCost


@dataclass(frozen=True)
class PlannedLayout:
    """A layout and what each of its ranks needs.

    smaller: the best layout with fewer ranks, which does not fit. candidates: all layouts of as many ranks, those that
    fit first, by cost. ways: those that were compared, by cost.
    """

    spec: ParallelSpec
    load: Workload
    memory: MemoryEstimate
    smaller: "PlannedLayout | None" = None
    candidates: tuple[Candidate, ...] = ()
    ways: tuple[Way, ...] = ()


@dataclass(frozen=True)
class SamplerLayout:
    """The layout of a sampler worker, and the layouts of as many ranks that were considered."""

    spec: ParallelSpec
    candidates: tuple[Candidate, ...]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of each rank."""
        return self.candidates[0].num_bytes


def usable_bytes(device_bytes: int) -> int:
    """Returns how much of its device a rank may use."""
    return int(device_bytes * (1 - _RESERVE))


def smallest_layout(
    shape: ModelShape,
    load: Workload,
    device_bytes: int,
    num_devices: int | None = None,
    speeds: Speeds = NVLINK,
) -> PlannedLayout | None:
    """Returns the layout with the fewest ranks that fits, None if none does.

    Among equals it takes the one with the least time for a token. Ranks along tp are of one node.
    """
    best: PlannedLayout | None = None
    for choices in _by_ranks(shape, load, num_devices):
        considered = _by_cost(
            [Candidate(each.spec, each.memory.total) for each in choices],
            device_bytes,
            lambda spec: training_cost(shape, spec, load, speeds),
        )
        if considered and considered[0].cost is not None:
            (cheapest,) = (each for each in choices if each.spec == considered[0].spec)
            return replace(cheapest, smaller=best, candidates=considered)
        best = min([*choices, *([best] if best else [])], key=_need)
    return None


def smallest_sampler_layout(
    shape: ModelShape,
    load: Workload,
    prefill_tokens: int,
    device_bytes: int,
    num_devices: int | None = None,
    speeds: Speeds = NVLINK,
) -> SamplerLayout:
    """Returns the layout of tp and ep with the fewest ranks that can sample on these devices, and with the least time
    for a token among these. Raises ValueError if none fits.

    Args:
        prefill_tokens: most tokens of prompts that run at a time.
    """
    load = replace(load, samples=True)
    least: Candidate | None = None
    for num_ranks in numbers_of_ranks(num_devices or MAX_RANKS):
        specs = [spec for spec in layouts(shape, num_ranks) if spec.tp * spec.ep == num_ranks]
        needs = [Candidate(spec, group_memory(shape, spec, load, (), prefill_tokens).peak) for spec in specs]
        considered = _by_cost(needs, device_bytes, lambda spec: sampling_cost(shape, spec, load, speeds))
        if considered and considered[0].cost is not None:
            return SamplerLayout(considered[0].spec, considered)
        every = [*considered, *([least] if least else [])]
        least = min(every, key=lambda each: each.num_bytes, default=None)
    assert least is not None, "one rank has a layout"
    where = f" on {num_devices} devices" if num_devices else ""
    raise ValueError(
        f"no layout of tp and ep of {shape.name} fits its samplers{where}: {least.spec} needs least, "
        f"{gigabytes(least.num_bytes)} on each rank: lower --kv-cache-bytes, or use larger devices"
    )


def _by_cost(
    candidates: Sequence[Candidate], device_bytes: int, cost: Callable[[ParallelSpec], TokenCost]
) -> tuple[Candidate, ...]:
    """Returns those that fit with their costs, the cheapest first, and then the others by what they need."""
    usable = usable_bytes(device_bytes)
    fitting = [replace(each, cost=cost(each.spec)) for each in candidates if each.num_bytes <= usable]
    others = sorted((each for each in candidates if each.num_bytes > usable), key=lambda each: each.num_bytes)
    return (*sorted(fitting, key=_rank_of_candidate), *others)


def _rank_of_candidate(candidate: Candidate) -> tuple[float, int, int, int]:
    """Returns the time for a token, and of equals the layout that gathers and moves least often first."""
    spec, cost = candidate.spec, candidate.cost
    assert cost is not None
    return cost.seconds, spec.fsdp, spec.sp, spec.ep


def loads_with_fewer_activations(load: Workload) -> list[Workload]:
    """Returns loads that keep fewer activations, the fastest first."""
    return [replace(load, activations=way) for way in ("recompute", "offload")] if load.activations == "keep" else []


def smallest_memory_layout(shape: ModelShape, load: Workload, num_devices: int | None = None) -> PlannedLayout:
    """Returns the layout whose ranks need the least memory."""
    return min((choice for choices in _by_ranks(shape, load, num_devices) for choice in choices), key=_need)


def layout_that_fits(
    shape: ModelShape,
    loads: Sequence[Workload],
    device_bytes: int,
    num_devices: int | None = None,
    speeds: Speeds = NVLINK,
    with_replicas: bool = True,
) -> PlannedLayout:
    """Returns the smallest layout for one of the loads, which differ in the activations that they keep: the one that
    takes least time for a token. Raises ValueError if none fits.

    Activations in host memory are the last resort, as neither that memory nor the copies are counted.

    Args:
        with_replicas: whether layouts are compared with replicas on the other devices: of num_devices, or of as many
            as the largest layout has.
    """
    found: list[PlannedLayout] = []
    for load in loads:
        if load.activations != "offload" or not found:
            choice = smallest_layout(shape, load, device_bytes, num_devices, speeds)
            found += [] if choice is None else [choice]
    if found:
        filled = (num_devices or max(each.spec.num_ranks for each in found)) if with_replicas else 1
        ways = [_way(shape, each, filled, speeds) for each in found]
        seconds = [each.cost.seconds for each in ways]
        fastest = found[seconds.index(min(seconds))]
        return replace(fastest, ways=tuple(sorted(ways, key=lambda each: each.cost.seconds)))
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


def _way(shape: ModelShape, choice: PlannedLayout, num_devices: int, speeds: Speeds) -> Way:
    """Returns the cost of the layout with as many replicas as these devices have room for."""
    spec = replace(choice.spec, replicas=max(1, num_devices // choice.spec.num_ranks))
    return Way(choice.load.activations, spec, training_cost(shape, spec, choice.load, speeds))


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
    """Yields all layouts, grouped by number of ranks in ascending order."""
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
