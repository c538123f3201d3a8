"""`trainhouse plan` with several rank groups: what each holds on its devices in each phase of reinforcement learning.

The groups are those that `serve` would start with the same flags, after the same checks.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from ...workers.planner.group_memory import Phase, RankBytes, largest_term, term_words
from ...workers.planner.groups_plan import CPU, DevicePlan, GroupsPlan, PlannedGroup
from ...workers.planner.workload import Workload
from ...workers.protocol.parallel_spec import ParallelSpec
from ...workers.protocol.worker_config import (
    DEFAULT_PREFILL_CHUNK_TOKENS,
    GPU_PREFILL_CHUNK_TOKENS,
    DispatchConfig,
    VllmConfig,
    WorkerConfig,
)
from ...workers.resources.devices import device_of
from ...workers.resources.machine import gigabytes, loaded_dtype, runs_on_cpu
from ...workers.scheduler.supervision.pool_factory import (
    check_layouts,
    named_sampler_configs,
    policy_configs,
    role_config,
    role_group_name,
    sampler_configs,
)
from ...workers.shapes.layouts.checks import check_layout
from ...workers.shapes.layouts.parameters import num_parameters
from ...workers.shapes.model_shape import ModelShape
from ..cli.output import aligned
from ..config.load import Flags, load_config
from ..config.option_values import ConfigError
from ..config.server_config import OPTIONS
from .auto_layout import with_sampler_layout

_COLUMNS = tuple(each.name for each in fields(RankBytes))
_TITLES = tuple(map(term_words, _COLUMNS))


@dataclass(frozen=True)
class PlannedGroups:
    """The plan of groups for the command line."""

    plan: GroupsPlan
    is_default_cache: bool
    """True for a GPU without --kv-cache-bytes."""
    said: tuple[str, ...]
    """The choice of `--sampler-parallel auto`."""

    @property
    def fits(self) -> bool | None:
        return self.plan.fits

    def as_json(self) -> dict[str, object]:
        plan = self.plan
        return {
            "model": {"name": plan.shape.name, "type": plan.shape.model_type},
            "shared_devices": "turns" if plan.takes_turns else "together",
            "groups": {each.name: self._group(each) for each in plan.groups},
            "devices": [self._device(each) for each in plan.devices],
            "moving": {name: asdict(moves) for name, moves in plan.moving.items()},
            "usable": plan.usable_bytes,
            "fits": plan.fits,
            "remedies": [words for each in plan.devices if plan.excess_on(each) for words in self._remedies(each)],
            "notes": [plan.shape.left_out] if plan.shape.left_out else [],
        }

    def text(self) -> Iterator[str]:
        plan = self.plan
        shape, load = plan.shape, plan.groups[0].load
        yield (
            f"{shape.name} ({shape.model_type}): {num_parameters(shape) / 1e9:.2f} billion parameters; sequences of "
            f"{load.longest} tokens"
        )
        if shape.left_out is not None:
            yield shape.left_out
        if self.is_default_cache:
            yield (
                f"serve gives the key/value cache a third of what a GPU has free; {gigabytes(load.kv_cache_bytes)} are "
                "counted: name --kv-cache-bytes to both"
            )
        yield ""
        rows = []
        for group in plan.groups:
            phases = ", ".join(plan.memory[group.name].phases)
            rows.append((group.name, str(group.spec), _shown(group.devices), group.load.dtype, phases))
        yield from aligned(("group", "layout", "devices", "base in", "phases"), rows)
        yield from self.said
        for device in plan.devices:
            yield ""
            yield from _device_lines(device)
            yield from self._verdict(device)
        if plan.takes_turns:
            yield ""
            yield from self._moves()

    def _group(self, group: PlannedGroup) -> dict[str, object]:
        memory = self.plan.memory[group.name]
        return {
            "roles": list(group.roles),
            "parallel": group.spec.axes,
            "devices": list(group.devices),
            "load": asdict(group.load),
            "waiting": asdict(memory.waiting) | {"total": memory.waiting.total},
            "phases": {phase: asdict(each) | {"total": each.total} for phase, each in memory.phases.items()},
        }

    def _device(self, device: DevicePlan) -> dict[str, object]:
        return {
            "names": list(device.names),
            "ranks": dict(device.ranks),
            "phases": {phase: device.needed_during(phase) for phase in device.phases},
            "other_processes": device.other_processes,
            "needed": device.needed,
            "usable": self.plan.usable_on(device),
        }

    def _remedies(self, device: DevicePlan) -> Iterator[str]:
        """Yields the largest term of the group that needs most with its remedy, and turns if the device is shared."""
        (group,) = (each for each in self.plan.groups if each.name == device.heaviest)
        if group.reserved_bytes is not None:
            yield f"vLLM takes {gigabytes(group.reserved_bytes)}: lower --vllm-memory-share"
        else:
            phases = self.plan.memory[group.name].phases.values()
            yield largest_term(max(phases, key=lambda each: each.total), group.load)
        if device.is_shared and not device.takes_turns:
            yield "or let the groups take turns: --shared-devices turns"

    def _verdict(self, device: DevicePlan) -> Iterator[str]:
        usable, excess = self.plan.usable_on(device), self.plan.excess_on(device)
        needed = gigabytes(device.needed)
        if usable is None:
            yield f"needs {needed}; --device-memory compares it with a device"
        elif not excess:
            yield f"fits: needs {needed} of {gigabytes(usable)}"
        else:
            most, memory = device.heaviest, self.plan.memory[device.heaviest]
            phase = max(memory.phases, key=lambda each: memory.phases[each].total)
            yield (
                f"does not fit: needs {needed}, {gigabytes(excess)} more than the {gigabytes(usable)} "
                f"that may be used; most is that of {most}, {gigabytes(memory.peak)} in its {phase}"
            )
            yield from self._remedies(device)

    def _moves(self) -> Iterator[str]:
        moving = self.plan.moving
        if not moving:
            yield "no two groups share a device: none moves"
            return
        rows = [
            (name, *map(gigabytes, (moves.arriving, moves.leaving, moves.first, moves.host, moves.pinned, moves.disk)))
            for name, moves in moving.items()
        ]
        titles = ("in", "out", "out at first", "in host memory", "pinned blocks", "on disk")
        yield from aligned(("moves at a turn, of each rank", *titles), rows)
        num_ranks = {group.name: group.spec.num_ranks for group in self.plan.groups}
        host = gigabytes(sum(num_ranks[name] * moves.host for name, moves in moving.items()))
        pinned = gigabytes(sum(num_ranks[name] * moves.pinned for name, moves in moving.items()))
        yield f"all ranks of these groups keep {host} in host memory, for which torch pins {pinned}"


def planned_groups(
    given: Flags, shape: ModelShape, load: Workload, device_bytes: int | None, num_devices: int | None
) -> PlannedGroups:
    """Returns the plan of the groups that `serve` starts with these flags. Raises ConfigError if a flag has a wrong
    value, ValueError if `serve` would refuse the groups or their memory cannot be planned.

    Args:
        given: as typed, by option; others are ignored.
        load: of the policies' group, with the slots of each role.
    """
    said: list[str] = []
    usual = {"device": "cuda"}
    if given.get("sampler") == "vllm" and "vllm_url" not in given:
        usual["vllm_python"] = sys.executable  # which Python has vLLM makes no difference here
    config = load_config(usual | {name: given[name] for name in given if name in OPTIONS}, {}, None)
    if config.ranks.parallel is None:
        raise ConfigError(
            "--parallel auto plans the policies alone: find their layout without the flags of other groups, and name it"
        )
    dispatch = config.dispatch_config()
    if config.sampling.sampler_parallel is None:
        if device_bytes is None:
            needs = "--sampler-parallel auto needs the memory of a device"
            raise ConfigError(f"{needs}: give --device-memory, such as 80GB")
        dispatch = with_sampler_layout(dispatch, device_bytes, num_devices, said.append)
    check_layouts(dispatch, num_devices)
    groups = []
    for name, roles, model in _groups(dispatch):
        if "draft" in roles:
            raise ValueError(
                f"{name}: drafts need an algorithm to be planned, and are planned apart: add --draft, such as --draft "
                "eagle3, for their ranks, and leave draft out of --role-group for those of the others"
            )
        check_layout(model.parallel, shape, None, model.max_context_length, model.dtype, model.activations)
        model = replace(model, parallel=shape.own_layout(model.parallel))
        groups.append(_rank_group(name, roles, model, load, samples=_samples(dispatch, roles, load)))
    if dispatch.sampling.vllm is not None:
        groups += _vllm_groups(dispatch, dispatch.sampling.vllm, load, device_bytes)
    _check_devices(groups, num_devices)
    plan = GroupsPlan(
        shape, tuple(groups), dispatch.shared_devices == "turns", device_bytes, config.memory.host_adapter_bytes
    )
    ours = (each for each in groups if each.reserved_bytes is None)
    has_gpu_cache = any(each.load.samples and CPU not in each.devices for each in ours)
    is_default_cache = has_gpu_cache and config.memory.kv_cache_bytes is None
    return PlannedGroups(plan, is_default_cache, tuple(said))


def _groups(config: DispatchConfig) -> Iterator[tuple[str, tuple[str, ...], WorkerConfig]]:
    """Yields names, roles and configs of the groups as `serve` starts them. Samplers have no role."""
    (model,) = policy_configs(config)
    yield model.model.name, ("policy",), model
    for group in config.role_groups:
        yield role_group_name(model, group), group.roles, role_config(config, model, group)
    if config.sampling.vllm is None:
        for name, sampler in named_sampler_configs(model, config.sampling):
            yield name, (), sampler


def _samples(config: DispatchConfig, roles: Sequence[str], load: Workload) -> bool:
    is_apart = bool(config.sampling.workers) or config.sampling.vllm is not None
    return not roles or ("policy" in roles and load.samples and not is_apart)


def _rank_group(name: str, roles: tuple[str, ...], model: WorkerConfig, load: Workload, samples: bool) -> PlannedGroup:
    spec, on_cpu = model.parallel, runs_on_cpu(model)
    devices = tuple(CPU if on_cpu else device_of(model.device, rank) for rank in range(spec.num_ranks))
    usual = DEFAULT_PREFILL_CHUNK_TOKENS if on_cpu else min(GPU_PREFILL_CHUNK_TOKENS, load.micro_batch_tokens)
    zero_stage = load.zero_stage if spec.fsdp > 1 else "3"
    own = replace(load, samples=samples, dtype=loaded_dtype(model), zero_stage=zero_stage)
    return PlannedGroup(name, roles, spec, own, devices, model.prefill_chunk_tokens or usual)


def _vllm_groups(
    config: DispatchConfig, vllm: VllmConfig, load: Workload, device_bytes: int | None
) -> Iterator[PlannedGroup]:
    """Yields the vLLM that `serve` starts, none if it runs elsewhere. It uses the first --vllm-tp of its devices."""
    for model in sampler_configs(policy_configs(config)[0], config.sampling):
        if runs_on_cpu(model):
            raise ValueError("a vLLM on CPUs has no fixed memory: name its GPUs with --sampler-device, such as cuda:1")
        if device_bytes is None:
            raise ConfigError("--sampler vllm takes a share of its devices: give --device-memory, such as 80GB")
        # Without a number it sees all devices.
        seen = range(vllm.tensor_parallel) if model.device == "cuda" else ()
        devices = [device_of("cuda", number) for number in seen] or model.device.split(",")
        if len(devices) < vllm.tensor_parallel:
            example = ",".join(f"cuda:{number}" for number in range(1, 1 + vllm.tensor_parallel))
            raise ValueError(
                f"--vllm-tp {vllm.tensor_parallel} needs as many devices, and vLLM has {model.device}: name them all, "
                f"as in --sampler-device {example}"
            )
        dtype = loaded_dtype(model) if vllm.dtype == "auto" else vllm.dtype
        yield PlannedGroup(
            name=f"{model.model.name} (vLLM)",
            roles=(),
            spec=ParallelSpec(tp=vllm.tensor_parallel),
            load=replace(load, samples=True, dtype=dtype),
            devices=tuple(device_of(each, 0) for each in devices[: vllm.tensor_parallel]),
            prefill_tokens=GPU_PREFILL_CHUNK_TOKENS,
            reserved_bytes=int(vllm.memory_share * device_bytes),
        )


def _check_devices(groups: Sequence[PlannedGroup], num_devices: int | None) -> None:
    """Raises ValueError if a group has a device that is not there."""
    for group in groups if num_devices is not None else ():
        there = {CPU, *(f"cuda:{number}" for number in range(num_devices or 0))}
        missing = [device for device in group.devices if device not in there]
        if missing:
            raise ValueError(
                f"{group.name} takes {_shown(group.devices)}, but with --num-devices {num_devices} there is no "
                f"{missing[0]}: name an earlier device for it"
            )


# Text output


def _device_lines(device: DevicePlan) -> Iterator[str]:
    rows = [row for phase in device.phases for row in _phase_rows(device, phase)]
    if device.is_shared and not device.takes_turns:
        rows.append(("all at once", *[""] * (len(_TITLES) + 1), gigabytes(device.needed)))
    yield from aligned((_shown(device.names), "group", *_TITLES, "in all"), rows)
    if device.other_processes:
        yield f"with {gigabytes(device.other_processes)} for the CUDA contexts of further processes"


def _phase_rows(device: DevicePlan, phase: Phase) -> Iterator[tuple[str, ...]]:
    for number, (name, each) in enumerate(device.during(phase).items()):
        copies = device.ranks[name]
        cells = [gigabytes(copies * size) if size else "-" for size in asdict(each).values()]
        title = name if copies == 1 else f"{name}, {copies} ranks"
        yield ("" if number else phase, title, *cells, gigabytes(copies * each.total))
    if device.is_shared:
        yield ("", "in all", *[""] * len(_TITLES), gigabytes(device.needed_during(phase)))


def _shown(devices: Sequence[str]) -> str:
    """Returns consecutive devices as a range, others as a list."""
    names = list(dict.fromkeys(devices))
    numbers = [int(name.partition(":")[2] or 0) for name in names]
    if len(names) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)
