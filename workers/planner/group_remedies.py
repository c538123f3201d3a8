"""Finds changes that make rank groups fit their devices. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.layouts.checks import valid_tp
from .groups_plan import CPU, GroupsPlan, PlannedGroup
from .layout_search import largest_that_fits, loads_with_fewer_activations
from .speeds import DEVICES_PER_NODE

# The token counts of micro-batches that are tried are multiples of this.
_STEP = 256


@dataclass(frozen=True)
class GroupRemedy:
    """A change of flags, and the plan with it."""

    flags: str
    plan: GroupsPlan


def group_remedies(plan: GroupsPlan, num_devices: int | None = None) -> list[GroupRemedy]:
    """Returns single changes that are each enough. If none is, each is combined with turns on shared devices, with a
    single slot, or with both."""
    for start in _starts(plan):
        found = [each for each in _changes(start.plan, num_devices) if each.plan.fits]
        if found:
            return [GroupRemedy(f"{start.flags} {each.flags}".strip(), each.plan) for each in found]
    return []


def _starts(plan: GroupsPlan) -> Iterator[GroupRemedy]:
    load = plan.groups[0].load
    few = GroupRemedy(f"{_slots_flag(plan)} 1", plan.with_loads(**{load.slots_knob: 1}))
    yield GroupRemedy("", plan)
    if _can_take_turns(plan):
        yield _in_turns(plan)
    if load.slots > 1:
        yield few
        if _can_take_turns(plan):
            turns = _in_turns(few.plan)
            yield GroupRemedy(f"{turns.flags} {few.flags}", turns.plan)


def _can_take_turns(plan: GroupsPlan) -> bool:
    return not plan.takes_turns and any(each.is_shared for each in plan.devices)


def _slots_flag(plan: GroupsPlan) -> str:
    return "--" + plan.groups[0].load.slots_knob.replace("_", "-")


def _changes(plan: GroupsPlan, num_devices: int | None) -> Iterator[GroupRemedy]:
    if _can_take_turns(plan):
        yield _in_turns(plan)
    yield from _apart(plan, num_devices)
    yield from _with_smaller_share(plan)
    yield from _with_less_work(plan)
    yield from _with_more_ranks(plan, num_devices)


def _in_turns(plan: GroupsPlan) -> GroupRemedy:
    return GroupRemedy("--shared-devices turns", replace(plan, takes_turns=True))


def _apart(plan: GroupsPlan, num_devices: int | None) -> Iterator[GroupRemedy]:
    """Yields plans in which one of the groups on a shared device has devices of its own."""
    shared = {name for each in plan.devices if each.is_shared for name in each.ranks}
    first = 1 + max(map(_number, (device for each in plan.groups for device in each.devices)), default=0)
    for group in plan.groups[1:]:
        last = first + group.spec.num_ranks
        has_room = num_devices is None or last <= num_devices
        if group.name in shared and CPU not in group.devices and has_room and _has_own_flags(plan, group):
            moved = replace(group, devices=tuple(f"cuda:{number}" for number in range(first, last)))
            yield GroupRemedy(_flags(moved, group.spec), _with_group(plan, moved))


def _with_smaller_share(plan: GroupsPlan) -> Iterator[GroupRemedy]:
    """Yields the plan in which vLLM takes a smaller share of its devices, in hundredths, if its weights fit into it."""
    for group in plan.groups:
        if group.reserved_bytes is None or plan.device_bytes is None:
            continue
        excess = max(plan.excess_on(each) for each in plan.devices if group.name in each.ranks)
        share = 100 * (group.reserved_bytes - excess) // plan.device_bytes / 100
        smaller = int(share * plan.device_bytes)
        if plan.memory[group.name].waiting.weights < smaller < group.reserved_bytes:
            changed = _with_group(plan, replace(group, reserved_bytes=smaller))
            yield GroupRemedy(f"--vllm-memory-share {share:g}", changed)


def _with_less_work(plan: GroupsPlan) -> Iterator[GroupRemedy]:
    load = plan.groups[0].load
    for less in loads_with_fewer_activations(load):
        changed = plan.with_loads(activations=less.activations)
        if changed.fits:
            yield GroupRemedy(f"--activations {less.activations}", changed)
            break

    def largest(limit: int, changed: Callable[[int], GroupsPlan]) -> GroupsPlan | None:
        most = largest_that_fits(limit, lambda number: bool(changed(number).fits))
        return changed(most) if most else None

    if any(each.load.samples for each in plan.groups) and (
        less := largest(load.kv_cache_bytes >> 20, lambda number: plan.with_loads(kv_cache_bytes=number << 20))
    ):
        yield GroupRemedy(f"--kv-cache-bytes {less.groups[0].load.kv_cache_bytes >> 20}MiB", less)
    if less := largest(load.tokens // _STEP, lambda number: _shorter(plan, _STEP * number)):
        of_less = less.groups[0].load
        words = f"--max-context-length {of_less.longest} --micro-batch-tokens {of_less.micro_batch_tokens}"
        yield GroupRemedy(words, less)
    if less := largest(load.slots - 1, lambda number: plan.with_loads(**{load.slots_knob: number})):
        yield GroupRemedy(f"{_slots_flag(plan)} {less.groups[0].load.slots}", less)


def _shorter(plan: GroupsPlan, tokens: int) -> GroupsPlan:
    load = plan.groups[0].load.with_max_tokens(tokens)
    return plan.with_loads(longest=load.longest, micro_batch_tokens=load.micro_batch_tokens)


def _with_more_ranks(plan: GroupsPlan, num_devices: int | None) -> Iterator[GroupRemedy]:
    """Yields plans in which tp divides more the group that needs most where there is no room."""
    heaviest = {each.heaviest for each in plan.devices if plan.excess_on(each)}
    for group in plan.groups:
        is_ours = CPU not in group.devices and group.reserved_bytes is None
        if group.name not in heaviest or not is_ours or not _has_own_flags(plan, group):
            continue
        taken = {device for each in plan.groups if each.name != group.name for device in each.devices}
        for tp in valid_tp(plan.shape, group.spec.replicated):
            spec = plan.shape.own_layout(replace(group.spec, tp=tp))
            first, last = _number(group.devices[0]), _number(group.devices[0]) + spec.num_ranks
            devices = tuple(f"cuda:{number}" for number in range(first, last))
            has_room = taken.isdisjoint(devices) and (num_devices is None or last <= num_devices)
            if group.spec.tp < tp <= DEVICES_PER_NODE and has_room:
                changed = _with_group(plan, replace(group, spec=spec, devices=devices))
                if changed.fits:
                    yield GroupRemedy(_flags(replace(group, devices=devices), spec), changed)
                    break


def _with_group(plan: GroupsPlan, group: PlannedGroup) -> GroupsPlan:
    return replace(plan, groups=tuple(group if each.name == group.name else each for each in plan.groups))


def _has_own_flags(plan: GroupsPlan, group: PlannedGroup) -> bool:
    """True unless several samplers share the flags of this one."""
    return bool(group.roles) or sum(not each.roles for each in plan.groups) == 1


def _flags(group: PlannedGroup, spec: ParallelSpec) -> str:
    if group.reserved_bytes is not None:
        return f"--sampler-device {','.join(group.devices)}"
    if not group.roles:
        layout = "" if spec.num_ranks == 1 else f" --sampler-parallel {spec.axes}"
        return f"--sampler-device {group.devices[0]}{layout}"
    if "policy" in group.roles:
        return f"--parallel {spec.axes}"
    return f"--role-group {'+'.join(group.roles)}={spec.axes}@{group.devices[0]}"


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)
