"""The planner's memory estimate for full fine-tuning equals what ranks use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainhouse.schemas.models import FullConfig
from trainhouse.schemas.training import AdamParams
from trainhouse.workers.planner.activations import activations
from trainhouse.workers.planner.estimate import MemoryEstimate, estimate
from trainhouse.workers.planner.layout_search import smallest_layout, usable_bytes
from trainhouse.workers.planner.trainable_memory import TrainableBytes, bytes_per_number, full_size
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import OptimizerStep
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.layouts.parameters import num_parameters, parameters
from trainhouse.workers.shapes.parts import Dense
from trainhouse.workers.worker.worker import Worker

from ...tiny import tiny_model
from ..planner.test_estimate import ALL_KINDS, OPTIONS, SLOW_IN_BFLOAT16, growth, public, scaled_model, shape_at
from .measuring import Measured, measured
from .rank_bytes import RunBytes
from .rank_weights import model_size

FULL = FullConfig(seed=0)
LENGTH = 256
LOAD = Workload(
    longest=LENGTH, micro_batch_tokens=LENGTH, head_chunk_tokens=64, samples=False, training="full", full_slots=1
)

DTYPES = ("float32", "bfloat16")


def near(planned: float, found: float, within: float = 0.1) -> bool:
    return (1 - within) * found < planned < (1 + within) * found


def take_step(where: Measured) -> None:
    where.answers("apply_steps", (OptimizerStep("run", AdamParams()),))


def held(where: Measured) -> int:
    """Returns the most live bytes of any rank."""
    return max(where.probe(RunBytes.alive))


@pytest.mark.parametrize("kind", sorted({*ALL_KINDS}))
def test_vectors_are_as_long_as_planned(kind: str, tiny_models: dict[str, Path]) -> None:
    shape = shape_at(tiny_models[kind])
    worker = Worker(WorkerConfig(ServedModel("m", str(tiny_models[kind])), device="cpu", threads=1))
    assert worker._models.build(FULL).layout.size == full_size(shape, SINGLE) >= num_parameters(shape)


LAYOUTS = [
    *(("qwen3", layout) for layout in ("tp=2", "sp=2", "fsdp=2", "fsdp=2,tp=2", "fsdp=2,sp=2")),
    *(("qwen3_moe", layout) for layout in ("ep=2", "fsdp=2,ep=2", "ep=2,tp=2")),
    *((kind, "tp=2") for kind in ("phi3", "gemma3", "olmo2")),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_ranks_hold_the_planned_parts(kind: str, layout: str, tiny_models: dict[str, Path]) -> None:
    shape, spec = shape_at(tiny_models[kind]), ParallelSpec.parse(layout)
    with measured(tiny_models[kind], spec) as where:
        assert where.probe(model_size, FULL) == [full_size(shape, spec)] * spec.num_ranks
    assert spec.num_weight_shards * spec.tp * spec.ep == 1 or full_size(shape, spec) < 0.9 * full_size(shape, SINGLE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_trainable_memory_is_as_planned(dtype: str, tiny_models: dict[str, Path]) -> None:
    planned = estimate(shape_at(tiny_models["qwen3"]), SINGLE, replace(LOAD, dtype=dtype)).trainable
    with measured(tiny_models["qwen3"], SINGLE, FULL, dtype=dtype) as where:
        take_step(where)
        for _ in range(2):  # a window, and the gradients of an operation
            where.pass_over(LENGTH, LENGTH)
        assert [each["full_models_on_device"] for each in where.answers("memory")] == [planned.total]


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_tied", marks=pytest.mark.full)])
def test_fsdp_ranks_share_a_large_vocabulary(kind: str, tmp_path: Path) -> None:
    model, held_by = tiny_model(kind, tmp_path, vocab_size=1 << 14), {}
    for layout in ("single", "fsdp=2"):
        with measured(model, ParallelSpec.parse(layout), FULL) as where:
            take_step(where)
            found = where.answers("memory")
        held_by[layout] = [each["base_weights"] + each["full_models_on_device"] for each in found]
    (alone,) = held_by["single"]
    assert all(0.49 * alone < rank_bytes < 0.51 * alone for rank_bytes in held_by["fsdp=2"]), held_by


# Kind, layout, dtype and states of the optimizer.
RANKS = [
    ("qwen3", "single", "float32", "float32"),
    pytest.param("qwen3", "single", "float32", "8bit", marks=pytest.mark.full),
    pytest.param("qwen3", "single", "bfloat16", "float32", marks=SLOW_IN_BFLOAT16),
    pytest.param("qwen3_wordy", "fsdp=2", "float32", "float32", marks=pytest.mark.full),
    pytest.param("qwen3_wordy", "fsdp=2", "bfloat16", "float32", marks=SLOW_IN_BFLOAT16),
    pytest.param("qwen3_moe", "single", "float32", "float32", marks=pytest.mark.full),
    pytest.param("qwen3_moe", "single", "bfloat16", "float32", marks=SLOW_IN_BFLOAT16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "dtype", "states"), RANKS)
def test_memory_of_a_rank_is_as_planned(kind: str, layout: str, dtype: str, states: Any, tmp_path: Path) -> None:
    model, spec = scaled_model(kind, tmp_path), ParallelSpec.parse(layout)
    planned = estimate(shape_at(model), spec, replace(LOAD, dtype=dtype, optimizer_states=states))
    learned = planned.trainable
    window_bytes = learned.weights + learned.gradients // 2 + learned.copies
    options = OPTIONS | {"dtype": dtype, "optimizer_states": states}
    with measured(model, spec, FULL, RunBytes, **options) as where:
        assert near(window_bytes, held(where))
        assert not near(window_bytes - learned.gradients // 2, held(where))
        take_step(where)
        assert near(window_bytes + learned.optimizer, held(where))
        assert not near(window_bytes, held(where))
        where.pass_over(LENGTH, LENGTH)
        found = where.peak(LENGTH, LENGTH) + max(each["base_weights"] for each in where.answers("memory"))
    print(f"| {kind} | {layout} | {dtype}, states {states} | {found / 1e6:.1f} | {planned.total / 1e6:.1f} |")
    assert near(planned.total, found, within=0.05)
    large = [learned.weights, learned.gradients // 2, *([learned.optimizer] if states == "float32" else [])]
    if kind == "qwen3_wordy":
        large.append(planned.gathered_head)
    for forgotten in large:
        assert not near(planned.total - forgotten, found, within=0.05)


@pytest.mark.slow
def test_activations_grow_with_tokens_as_planned(tmp_path: Path) -> None:
    check_growth(scaled_model("qwen3", tmp_path), "float32", {})


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        *((kind, "float32", {}) for kind in ("llama", "qwen3_moe", "phi3", "olmo2", "gemma3", "mixtral")),
        *((kind, "float32", {}) for kind in ("gemma4", "gemma4_moe")),
        *((kind, "float32", {"activations": "recompute"}) for kind in ("qwen3", "qwen3_moe", "gemma4")),
        *(pytest.param(kind, "bfloat16", {}, marks=SLOW_IN_BFLOAT16) for kind in ("llama", "qwen3_moe")),
    ],
    ids=str,
)
def test_activations_of_all_families_grow_as_planned(
    kind: str, dtype: str, options: dict[str, Any], tmp_path: Path
) -> None:
    check_growth(scaled_model(kind, tmp_path), dtype, options)


def check_growth(model: Path, dtype: str, options: dict[str, Any]) -> None:
    shape, load = shape_at(model), replace(LOAD, dtype=dtype, **options)
    with measured(model, SINGLE, FULL, dtype=dtype, **OPTIONS, **options) as where:
        where.pass_over(LENGTH, LENGTH)  # allocates the gradients that later operations reuse
        found, planned = growth(where, shape, load, 512, 1536)
    print(f"| {', '.join((shape.model_type, dtype, *options.values()))} | {found:.0f} | {planned:.0f} |")
    assert near(planned, found)
    if "activations" not in options:  # of one layer at a time
        assert not near(planned * (shape.num_layers - 1) / shape.num_layers, found)


# Consequences of the estimate


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_parameter_takes_24_bytes_including_the_base(dtype: str) -> None:
    load = replace(LOAD, dtype=dtype)
    assert load.number_bytes + bytes_per_number(load).total == 24


def test_ranks_hold_parts_of_every_vector() -> None:
    shape, load = public("Qwen3-30B-A3B"), LOAD
    alone = estimate(shape, SINGLE, load).trainable
    for layout in ("tp=2", "ep=2", "fsdp=2"):
        assert parts(estimate(shape, ParallelSpec.parse(layout), load).trainable, alone) == pytest.approx(
            4 * [0.5], 0.1
        )
    for layout in ("sp=2", "replicas=2"):
        assert estimate(shape, ParallelSpec.parse(layout), load).trainable == alone


def parts(own: TrainableBytes, whole: TrainableBytes) -> list[float]:
    names = ("weights", "gradients", "optimizer", "copies")
    return [getattr(own, name) / getattr(whole, name) for name in names]


def test_gathered_layers_need_gradients_of_two_layers() -> None:
    shape, spec = public("Llama-3.1-8B"), ParallelSpec(fsdp=4)
    layer_size = sum(each.size // each.count for each in parameters(shape, spec) if each.is_of_layers and each.fsdp > 1)
    planned = estimate(shape, spec, replace(LOAD, longest=65536))
    assert planned.gathered_gradients == 2 * 4 * layer_size
    assert planned.work == planned.activations.total + 2 * planned.gathered + planned.gathered_gradients
    assert estimate(shape, spec, replace(LOAD, training="lora")).gathered_gradients == 0
    assert estimate(shape, ParallelSpec(tp=4), LOAD).gathered_gradients == 0


@pytest.mark.parametrize("tied", [False, True])
def test_head_is_gathered_together_with_the_last_layer(tied: bool) -> None:
    shape, spec = replace(public("Llama-3.1-8B"), tied_embeddings=tied), ParallelSpec(fsdp=4)
    planned, size = estimate(shape, spec, LOAD), shape.vocab * shape.hidden
    assert planned.gathered_head == (2 + 4 + 1) * size
    of_pass = planned.activations
    assert planned.work == of_pass.kept + of_pass.head + planned.gathered + planned.prefetched + planned.gathered_head
    assert estimate(shape, spec, replace(LOAD, training="lora")).gathered_head == 2 * size
    assert estimate(replace(shape, vocab=shape.vocab + 1), spec, LOAD).gathered_head == 0, "4 does not divide it"
    assert estimate(shape, ParallelSpec(tp=4), LOAD).gathered_head == 0


def test_saving_assembles_one_matrix_at_a_time() -> None:
    shape = public("Llama-3.1-8B")
    (features,) = {each.features for layer in shape.layers if isinstance(each := layer.feed_forward, Dense)}
    of_vocabulary, of_features = shape.vocab * shape.hidden, features * shape.hidden
    for layout, numbers in (("fsdp=4", 2 * of_vocabulary), ("tp=4", 2 * of_features), ("replicas=2", 0)):
        assert estimate(shape, ParallelSpec.parse(layout), LOAD).saving == 4 * numbers
    assert estimate(shape, ParallelSpec(fsdp=2, tp=2), LOAD).saving == 4 * max(2 * of_vocabulary, 3 * of_features)
    assert estimate(shape, ParallelSpec(fsdp=4), replace(LOAD, training="lora")).saving == 0


def test_full_passes_keep_only_the_embedding_more_than_lora() -> None:
    shape = public("Llama-3.1-8B")
    full, lora = (activations(shape, SINGLE, replace(LOAD, training=each, lora_rank=1)) for each in ("full", "lora"))
    state_bytes = (2 * shape.hidden + 4) * LOAD.tokens
    assert 0.9 * state_bytes < full.kept - lora.kept < state_bytes


def test_smallest_layout_that_fits_is_chosen() -> None:
    shape, device = public("Llama-3.1-8B"), 80 * 10**9
    loads = [replace(LOAD, training=each, adapter_slots=1) for each in ("full", "lora")]
    full, lora = (smallest_layout(shape, load, device) for load in loads)
    assert full is not None and lora is not None and lora.spec == SINGLE
    assert full.spec.num_ranks > 1 and full.memory.total <= usable_bytes(device)
    assert full.smaller is not None and fits_not(full.smaller.memory, device)


def fits_not(memory: MemoryEstimate, device_bytes: int) -> bool:
    return memory.total > usable_bytes(device_bytes)
