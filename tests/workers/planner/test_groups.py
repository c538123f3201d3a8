"""The memory that a plan estimates for ranks of policies, critics and references, and for devices that they share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainhouse.schemas.models import Role
from trainhouse.workers.planner.activations import activations, forward_activations
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.group_memory import RankBytes, group_memory, largest_term
from trainhouse.workers.planner.groups_plan import GroupsPlan, PlannedGroup
from trainhouse.workers.planner.trainable_memory import adapter_size, value_head_size
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec

from ..parallel.measuring import LORA, Measured, measured
from .test_estimate import LOAD, OPTIONS, public, scaled_model, shape_at

FEWER, MORE = 512, 1536


def growth(where: Measured, role: Role) -> float:
    """Returns the bytes of a pass per further token."""
    fewer, more = (where.peak(tokens, role=role) for tokens in (FEWER, MORE))
    return (more - fewer) / (MORE - FEWER)


def planned_growth(estimated: Any, *arguments: Any, load: Workload) -> float:
    fewer, more = (estimated(*arguments, replace(load, micro_batch_tokens=tokens)) for tokens in (FEWER, MORE))
    return (more.total - fewer.total) / (MORE - FEWER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3", "single"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("qwen3_moe", "single"), ("olmo2", "single"))),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("qwen3", "tp=2"), ("gemma4", "tp=2"))),
    ],
)
def test_passes_of_references_and_critics_grow_as_planned(kind: str, layout: str, tmp_path: Path) -> None:
    model, spec = scaled_model(kind, tmp_path), ParallelSpec.parse(layout)
    shape, load = shape_at(model), replace(LOAD, dtype="float32")
    with measured(model, spec, dtype="float32", **OPTIONS) as where:
        roles: tuple[Role, ...] = ("reference", "critic")
        for role in roles:
            where.answers("create_run", RunSpec(role, LORA, role))
        scores, critics = growth(where, "reference"), growth(where, "critic")
    planned = planned_growth(forward_activations, shape, spec, load=load)
    assert 0.9 * scores < planned < 1.15 * scores
    of_training = planned_growth(activations, shape, spec, load=load)
    assert 0.9 * critics < of_training < 1.1 * critics
    # Control: the bounds detect that layers are kept, or states of the other dtype.
    assert of_training > 2 * scores
    assert not 0.9 * scores < planned_growth(forward_activations, shape, spec, load=replace(load, dtype="bfloat16"))


def test_adapters_of_each_role_take_the_planned_memory(tiny_models: dict[str, Path]) -> None:
    shape, load = shape_at(tiny_models["qwen3"]), replace(LOAD, dtype="bfloat16")
    sizes: dict[str, int] = {}
    for role in ("critic", "reference"):
        with measured(tiny_models["qwen3"], SINGLE, dtype="bfloat16") as where:
            where.answers("drop_run", "run")
            where.answers("create_run", RunSpec(role, LORA, role))
            where.pass_over(512, role=role)
            (sizes[role],) = (memory["adapters_on_device"] for memory in where.answers("memory"))
    numbers = adapter_size(shape, SINGLE, LORA.rank)
    planned = {role: group_memory(shape, SINGLE, load, [role], 512).waiting for role in sizes}
    assert sizes["reference"] == planned["reference"].models == 6 * numbers
    # Moments exist from the first step on.
    of_critic = planned["critic"]
    assert sizes["critic"] == of_critic.models + of_critic.gradients == 10 * (numbers + value_head_size(shape))
    assert of_critic.optimizer == 8 * (numbers + value_head_size(shape)) and planned["reference"].optimizer == 0


def test_the_policies_group_is_planned_as_without_other_groups() -> None:
    shape = public("Llama-3.1-8B")
    for layout in ("single", "tp=2", "fsdp=4"):
        for training in ("lora", "full"):
            spec = ParallelSpec.parse(layout)
            load = Workload(longest=8192, adapter_slots=3, full_slots=1, samples=False, training=training)
            whole, memory = estimate(shape, spec, load), group_memory(shape, spec, load, ["policy"], 512)
            assert memory.peak == memory.phases["policy pass"].total == whole.total
            assert list(memory.phases) == ["policy pass", "step"]
            assert memory.phases["step"].total < whole.total


def plan(*groups: PlannedGroup, takes_turns: bool = False, device_bytes: int | None = 80 * 10**9) -> GroupsPlan:
    return GroupsPlan(public("Llama-3.1-8B"), groups, takes_turns, device_bytes, 4 << 30)


def group(name: str, *devices: str, samples: bool = False, **changes: Any) -> PlannedGroup:
    load = replace(Workload(longest=8192, samples=samples), **changes)
    roles = {"sampler": ()}.get(name, (name,))
    return PlannedGroup(name, roles, ParallelSpec(tp=len(devices)), load, devices, 4096)


def test_groups_share_a_device_at_once_or_in_turns() -> None:
    groups = [group("policy", "cuda:0", samples=True), group("reference", "cuda:0"), group("critic", "cuda:1")]
    together, turns = plan(*groups), plan(*groups, takes_turns=True)
    shared, alone = together.devices
    assert shared.names == ("cuda:0",) and alone.names == ("cuda:1",)
    of_policy, of_reference = (together.memory[name] for name in ("policy", "reference"))
    process = shared.other_processes
    assert process == 5 * 10**8 and alone.other_processes == 0
    assert shared.needed == of_policy.peak + of_reference.peak + process
    assert turns.devices[0].needed == max(of_policy.peak, of_reference.peak) + process
    assert turns.devices[1].needed == alone.needed == together.memory["critic"].peak
    phase = "reference scores"
    assert shared.needed_during(phase) == of_reference.phases[phase].total + of_policy.waiting.total + process
    assert turns.devices[0].needed_during(phase) == of_reference.phases[phase].total + process
    assert "critic pass" not in shared.phases and "sampling" in shared.phases


def test_what_leaves_a_device_is_in_pinned_host_memory_and_on_disk() -> None:
    groups = [group("policy", "cuda:0", samples=True), group("reference", "cuda:0"), group("critic", "cuda:1")]
    assert plan(*groups).moving == {}
    moving, memory = plan(*groups, takes_turns=True).moving, plan(*groups).memory
    assert set(moving) == {"policy", "reference"}, "the critic has its device to itself"
    numbers = adapter_size(public("Llama-3.1-8B"), SINGLE, 32)
    base, cache = memory["policy"].waiting.weights, 1 << 30
    assert moving["reference"].arriving == base + 4 * numbers and moving["reference"].leaving == 4 * numbers
    assert moving["policy"].leaving == cache + (4 + 4 + 8) * numbers
    assert moving["policy"].host == moving["policy"].arriving == base + moving["policy"].leaving
    assert moving["policy"].host < moving["policy"].pinned < 2 * moving["policy"].host and moving["policy"].disk == 0
    # Full models exceed the host memory for models.
    full = [group(name, "cuda:0", training="full", full_slots=1) for name in ("policy", "reference")]
    of_policy = plan(*full, takes_turns=True).moving["policy"]
    assert of_policy.disk == 12 * base // 2 - (4 << 30)
    assert of_policy.host + of_policy.disk == of_policy.arriving
    # On a CPU all of it goes to disk.
    on_cpu = [group(name, "cpu") for name in ("policy", "reference")]
    of_policy = plan(*on_cpu, takes_turns=True).moving["policy"]
    assert of_policy.host == of_policy.pinned == 0
    assert of_policy.disk == of_policy.first == of_policy.arriving == base + 12 * numbers


def test_ranks_on_a_cpu_are_added() -> None:
    groups = [group("policy", "cpu", "cpu"), group("critic", "cpu")]
    (device,) = plan(*groups, device_bytes=None).devices
    memory = plan(*groups).memory
    assert device.ranks == {"policy": 2, "critic": 1} and device.other_processes == 0
    assert device.needed == 2 * memory["policy"].peak + memory["critic"].peak


@pytest.mark.parametrize(
    ("memory", "load", "words"),
    [
        (RankBytes(weights=9 * 10**9), {}, "most of it is weights, 9.0 GB: divide them among more ranks"),
        (RankBytes(kv_cache=5 * 10**8), {}, "key/value cache, 500 MB: lower --kv-cache-bytes"),
        (RankBytes(activations=2), {}, "activations, 0 MB: use --activations recompute"),
        (RankBytes(optimizer=2, models=1), {"adapter_slots": 2}, "optimizer, 0 MB: lower --adapter-slots"),
        (RankBytes(gradients=2), {"training": "full", "full_slots": 2}, "gradients, 0 MB: lower --full-slots"),
        (RankBytes(models=2), {"training": "full", "full_slots": 1}, "models, 0 MB: use larger devices"),
    ],
)
def test_the_largest_term_has_a_remedy(memory: RankBytes, load: dict[str, Any], words: str) -> None:
    assert words in largest_term(memory, Workload(longest=8192, **load))
