"""The memory that a plan estimates for a rank, against what ranks use."""

import json
import re
import struct
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import AdamParams
from trainhouse.workers.ops.linear import frozen_product, torch_linear
from trainhouse.workers.planner.activations import activations
from trainhouse.workers.planner.estimate import estimate, kv_cache_tokens
from trainhouse.workers.planner.layout_search import (
    loads_with_fewer_activations,
    remedies,
    smallest_layout,
    usable_bytes,
)
from trainhouse.workers.planner.trainable_memory import adapter_size
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.layouts.parameters import ParameterGroup, num_parameters, parameters
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model, read_model
from trainhouse.workers.shapes.parts import SoftmaxAttention
from transformers import AutoModelForCausalLM

from ...tiny import DEFAULT_ROPE, FAMILY_KINDS, KINDS, MORE_KINDS, tiny_config, tiny_model
from ..adapted import Adapted
from ..lineup import COUNTED, LINEUP
from ..parallel.measuring import LENGTH, LORA, Measured, measured
from ..parallel.rank_weights import model_size, shapes

ALL_KINDS = (*KINDS, *MORE_KINDS, *FAMILY_KINDS)
CONFIGS = Path(__file__).parents[1] / "configs"

# Large enough that what grows with the tokens is most of it.
SCALED = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}


def shape_at(directory: Path) -> ModelShape:
    shape = read_model(ServedModel("m", str(directory)))
    assert isinstance(shape, ModelShape)
    return shape


def public(name: str) -> ModelShape:
    return shape_at(CONFIGS / f"{name}.json")


# Parameters


def by_name(table: list[ParameterGroup], shape: ModelShape) -> dict[str, ParameterGroup]:
    """Returns the parameters of a model by their names."""
    of_layers, named = {f"model.{name}": weight.shape for name, weight in shape.placed_weights().items()}, {}
    for each in table:
        names = [name for name, size in of_layers.items() if fnmatchcase(name, each.pattern) and size == each.shape]
        names = names if each.is_of_layers else [each.pattern]
        assert len(names) == each.count, each.pattern
        named |= dict.fromkeys(names, each)
    return named


BIASES = {"attention_bias": True, "mlp_bias": True}
REFUSED_WITH_BIASES = ("falcon_h1", "nemotron_h_latent")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in ALL_KINDS),
        *((kind, BIASES) for kind in ALL_KINDS if kind not in REFUSED_WITH_BIASES),
        *((kind, {}) for kind in ("nemotron", "phimoe", "stablelm", "starcoder2")),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
        ("qwen3_moe", {"mlp_only_layers": [0], "num_hidden_layers": 3}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4, "attention_bias": True}),
    ],
)
def test_the_table_names_every_parameter_with_its_shape(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(kind, **changes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shape = shape_at(tmp_path)
    ours = {name: each.shape for name, each in by_name(parameters(shape, SINGLE), shape).items()}
    assert ours == theirs
    assert num_parameters(shape) == model.num_parameters()


NOT_PARAMETERS = ("__metadata__", "e_score_correction_bias")


def is_sparse(name: str) -> bool:
    """Returns True for experts and routers, which some files name differently, and each expert separately."""
    return ".experts." in name or ".block_sparse_moe." in name or name.endswith(".gate.weight")


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_table_matches_the_files(kind: str, tiny_models: dict[str, Path]) -> None:
    shape = shape_at(tiny_models[kind])
    (file,) = tiny_models[kind].glob("*.safetensors")
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header = {name: entry for name, entry in header.items() if not name.endswith(NOT_PARAMETERS)}
    # Nemotron-H's files name the trunk differently.
    stored = {name.replace("backbone.", "model."): tuple(entry["shape"]) for name, entry in header.items()}
    named = by_name(parameters(shape, SINGLE), shape)
    plain = {name: each.shape for name, each in named.items() if not is_sparse(name)}
    assert plain == {name: each for name, each in stored.items() if not is_sparse(name)}
    assert sum(prod(each) for each in stored.values()) == num_parameters(shape)
    base = estimate(shape, SINGLE, Workload(longest=1, dtype="float32")).base
    assert base == sum(
        entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values() if "shape" in entry
    )


# Parameters of adapters per rank of theirs that the hosted service publishes, in tinker-cookbook 0.6.1: of feed-forward
# layers and experts, of attention, of the output head.
PUBLISHED = {
    "Qwen3-30B-A3B": (14_450_688, 835_584, 153_984),
    "Qwen3-235B-A22B": (56_598_528, 3_176_448, 156_032),
    "Qwen3-4B": (1_327_104, 737_280, 154_496),
    "Qwen3-8B": (1_769_472, 958_464, 156_032),
    "Qwen3-32B": (5_898_240, 2_490_368, 157_056),
    "Qwen3-VL-30B-A3B": (14_450_688, 835_584, 153_984),
    "Qwen3-VL-235B-A22B": (56_598_528, 3_176_448, 156_032),
    "Llama-3.1-8B": (1_769_472, 851_968, 132_352),
    "Llama-3.1-70B": (8_847_360, 4_096_000, 136_448),
    "Llama-3.2-1B": (491_520, 212_992, 130_304),
    "Llama-3.2-3B": (946_176, 573_440, 131_328),
    "Qwen3.5-4B": (1_130_496, 897_024, 250_880),
    "Qwen3.5-9B": (1_572_864, 1_130_496, 252_416),
    "Qwen3.8-27B": (4_325_376, 2_965_504, 253_440),
    "Qwen3.6-35B-A3B": (16_281_600, 1_013_760, 250_368),
    "Qwen3.5-397B-A17B": (96_030_720, 2_841_600, 252_416),
    "gpt-oss-20b": (6_842_880, 497_664, 203_968),
    "gpt-oss-120b": (40_124_160, 746_496, 203_968),
    "DeepSeek-V3.1": (94_307_328, 2_440_000, 136_448),
    "GLM-5": (121_356_288, 2_920_320, 161_024),
    "Kimi-K2.6": (144_583_680, 1_940_288, 171_008),
    "Nemotron-3-Nano-30B-A3B": (11_346_176, 584_832, 133_760),
    "Nemotron-3-Super-120B-A12B": (111_349_760, 1_675_264, 135_168),
}
# Models whose adapters are as large as another's, by the other.
ALIKE = {
    "Llama-3.1-70B": ("Llama-3.3-70B",),
    "Qwen3.8-27B": ("Qwen3.5-27B", "Qwen3.6-27B"),
    "Qwen3.6-35B-A3B": ("Qwen3.5-35B-A3B",),
    "GLM-5": ("GLM-5.3",),
    "Kimi-K2.6": ("Kimi-K2-Thinking", "Kimi-K2.5"),
    "Nemotron-3-Nano-30B-A3B": ("Nemotron-3.5-Lightning-30B-A3B",),
    "Nemotron-3-Super-120B-A12B": ("Nemotron-3.5-Super-VL-120B-A12B",),
}
# The others that the cookbook lists, and why their adapters are not counted here.
NOT_COUNTED = {
    "Nemotron-3-Ultra-550B-A55B": "the sizes of its experts are not published; compared within 0.1 % below",
    "Inkling": "relative-position biases and short convolutions of keys are not implemented",
    "Inkling-Small": "as Inkling",
    "Inkling-2-Small": "as Inkling",
    "DeepSeek-V4.1-Flash": "compressed attention is not implemented",
    "GLM-5.3-Flash": "its config.json is not known here",
    "Kimi-K3.1-Pro": "its config.json is not known here",
}


def test_nemotron_ultra_is_as_large_as_its_publishers_say() -> None:
    """Adapters of attention and Mamba-2 are those that the hosted service publishes; of experts within 0.1 %."""
    shape = describe_model("Ultra", LINEUP["Nemotron-3-Ultra-550B-A55B"])
    assert isinstance(shape, ModelShape) and round(num_parameters(shape) / 1e9) == 549
    mixers = tuple(replace(layer, feed_forward=None) for layer in shape.layers if layer.mixer is not None)
    assert adapter_size(replace(shape, layers=mixers), SINGLE, 32) == 32 * 4_134_912
    published = 32 * (254_529_536 + 4_134_912)
    assert adapter_size(shape, SINGLE, 32) == pytest.approx(published, rel=1e-3)
    layers = next(shape.layers[:i] + shape.layers[i + 1 :] for i, each in enumerate(shape.layers) if each.feed_forward)
    assert adapter_size(replace(shape, layers=layers), SINGLE, 32) != pytest.approx(published, rel=1e-3)


def test_the_published_counts_are_all_those_of_the_cookbook() -> None:
    """Releases of a model have its name, and after it what they were trained for, or their precision."""
    cookbook: Any = pytest.importorskip("tinker_cookbook.hyperparam_utils", reason="make setup installs it")
    flags = ("train_mlp", "train_attn", "train_unembed")
    only = [{each: each == flag for each in flags} for flag in flags]
    counted = {alike: name for name in PUBLISHED for alike in (name, *ALIKE.get(name, ()))}
    known = sorted({*counted, *NOT_COUNTED}, key=len, reverse=True)
    used = set()
    for listed in cookbook._LORA_PARAMS_PER_RANK_BY_COMPONENT:
        name = next((each for each in known if re.search(rf"[/-]{re.escape(each)}(-|$)", listed)), None)
        assert name is not None, listed
        used.add(name)
        if name in counted:
            found = [cookbook.get_lora_param_count(listed, 1, **each) for each in only]
            assert found == [*PUBLISHED[counted[name]]], listed
    assert used >= {*counted, *NOT_COUNTED} - {"GLM-5"}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_adapters_are_as_large_as_planned(kind: str, tiny_models: dict[str, Path]) -> None:
    """The rank leaves no gaps between the matrices of the tiny models."""
    adapted, shape = Adapted(tiny_models[kind]), shape_at(tiny_models[kind])
    for rank in (16, 32):
        lora = LoraConfig(rank=rank, train_unembed=False, expert_factors="shared")
        assert adapted.lora.build(lora).layout.num_weights == adapter_size(shape, SINGLE, rank)


@pytest.mark.parametrize("name", PUBLISHED)
def test_adapters_are_as_large_as_those_of_the_hosted_service(name: str, tmp_path: Path) -> None:
    if (path := CONFIGS / f"{name}.json").exists():
        config = json.loads(path.read_text())
    elif name in LINEUP or name in COUNTED:
        config = {**LINEUP, **COUNTED}[name]
    else:
        config = json.loads((CONFIGS / "Qwen3-30B-A3B.json").read_text()) | {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "moe_intermediate_size": 1536,
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, (mlp, attention, head) = shape_at(tmp_path), PUBLISHED[name]
    assert adapter_size(shape, SINGLE, 32) == 32 * (mlp + attention)
    assert shape.vocab + shape.hidden == head
    assert adapter_size(replace(shape, layers=shape.layers[1:]), SINGLE, 32) != 32 * (mlp + attention)


# Ranks


OF_KIND = {
    "llama": {},
    "qwen3": {"head_dim": 64},
    # Mostly the embedding and the output head.
    "qwen3_wordy": {"head_dim": 64, "vocab_size": 1 << 15},
    # Two ranks cannot share out the heads.
    "qwen3_three": {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 3},
    # Every token uses all experts, so that all ranks have the same work.
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 256, "num_experts_per_tok": 4},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "cohere2": {"layer_types": ["full_attention"] * 4},
    "gemma4": {"head_dim": 64, "global_head_dim": 128, "layer_types": ["full_attention"] * 4},
    "gemma4_moe": {"head_dim": 64, "global_head_dim": 128, "layer_types": ["full_attention"] * 4}
    | {"top_k_experts": 4, "moe_intermediate_size": 256},
    "gemma2": {"head_dim": 64, "layer_types": ["full_attention"] * 4},
    "gemma3": {"head_dim": 64, "layer_types": ["full_attention"] * 4},
    "mixtral": {"sliding_window": None, "intermediate_size": 256, "num_experts_per_tok": 4},
    "phimoe": {"sliding_window": None, "intermediate_size": 256, "rope_parameters": DEFAULT_ROPE, "head_dim": 64},
    "stablelm": {"head_dim": 64},
    "starcoder2": {"sliding_window": None, "head_dim": 64},
}


def scaled_model(kind: str, directory: Path) -> Path:
    return tiny_model(kind.removesuffix("_three").removesuffix("_wordy"), directory, **(SCALED | OF_KIND[kind]))


def growth(where: Measured, shape: ModelShape, load: Workload, fewer: int, more: int) -> tuple[float, float]:
    """Returns bytes per token: measured, estimated."""
    peaks = [where.peak(tokens) for tokens in (fewer, more)]
    of_passes = [activations(shape, where.spec, replace(load, micro_batch_tokens=tokens)) for tokens in (fewer, more)]
    planned = [each.total + each.host for each in of_passes]
    return tuple((after - before) / (more - fewer) for before, after in (peaks, planned))  # pyright: ignore


OPTIONS: dict[str, Any] = {"micro_batch_tokens": 1 << 14, "head_chunk_tokens": 64}
LOAD = Workload(longest=LENGTH, head_chunk_tokens=64, lora_rank=LORA.rank, adapter_slots=1)


# Takes minutes on processors without bfloat16 instructions.
SLOW_IN_BFLOAT16 = [pytest.mark.full, pytest.mark.timeout(1800)]


def in_bfloat16(kind: str) -> Any:
    return pytest.param(kind, "bfloat16", marks=SLOW_IN_BFLOAT16)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "float32"), in_bfloat16("llama"), in_bfloat16("qwen3_moe")])
def test_activations_grow_with_the_tokens_as_planned(kind: str, dtype: str, tmp_path: Path) -> None:
    model = scaled_model(kind, tmp_path)
    shape = shape_at(model)
    with measured(model, SINGLE, dtype=dtype, **OPTIONS) as where:
        found, planned = growth(where, shape, replace(LOAD, dtype=dtype), 512, 1536)
    assert 0.9 * found < planned < 1.1 * found
    # Control: the bounds detect states of the other dtype, and a forgotten layer.
    wrong = replace(LOAD, dtype="float32" if dtype == "bfloat16" else "bfloat16")
    assert (
        not 0.9 * found < activations(shape, SINGLE, replace(wrong, micro_batch_tokens=1024)).total / 1024 < 1.1 * found
    )
    assert not 0.9 * found < planned * (shape.num_layers - 1) / shape.num_layers < 1.1 * found


@pytest.mark.full
@pytest.mark.parametrize(("way", "dtype"), [("recompute", "float32"), in_bfloat16("offload")])
def test_recomputed_activations_grow_with_the_tokens_as_planned(way: str, dtype: str, tmp_path: Path) -> None:
    """The model has more layers, so that most is their inputs. Here the device's memory is host memory."""
    model = tiny_model("llama", tmp_path, **(SCALED | {"num_hidden_layers": 12, "num_attention_heads": 4}))
    shape, load = shape_at(model), replace(LOAD, dtype=dtype, activations=way)
    with measured(model, SINGLE, dtype=dtype, activations=way, **OPTIONS) as where:
        found, planned = growth(where, shape, load, 512, 1536)
    assert 0.9 * found < planned < 1.15 * found
    # Control: the bounds detect that all is kept, and that the recomputed layer is forgotten.
    kept = activations(shape, SINGLE, replace(load, activations="keep", micro_batch_tokens=1024)).total / 1024
    assert kept > 2 * found
    assert planned - (kept - planned) / shape.num_layers < 0.9 * found


LAYOUTS = [
    ("qwen3", "tp=2", {}),
    ("qwen3", "tp=2", {"tp_activations": "whole"}),
    ("llama", "sp=2", {}),
    ("llama", "sp=2,tp=2", {}),
    ("qwen3_three", "sp=2", {}),
    ("qwen3", "single", {"activations": "recompute"}),
    ("qwen3_moe", "single", {"activations": "recompute"}),
    ("qwen3", "tp=2", {"activations": "recompute"}),
    ("llama", "sp=2", {"activations": "offload"}),
    ("qwen3", "fsdp=2", {}),
    *(("qwen3", spec, {}) for spec in ("fsdp=2,tp=2", "fsdp=2,sp=2")),
    ("qwen3_moe", "tp=2", {}),
    ("qwen3_moe", "ep=2", {}),
    ("qwen3_moe", "ep=2,tp=2", {}),
    *(("phi3", spec, {}) for spec in ("tp=2", "fsdp=2,tp=2")),
    *((kind, spec, {}) for kind in ("cohere2", "gemma2", "gemma3", "gemma4") for spec in ("single", "tp=2")),
    *(("gemma4_moe", spec, {}) for spec in ("single", "tp=2", "ep=2")),
    ("gemma4", "single", {"activations": "recompute"}),
    ("gemma4", "fsdp=2", {}),
    ("olmo2", "tp=2", {}),
    ("mixtral", "ep=2", {}),
    *((kind, "single", {}) for kind in ("phimoe", "stablelm", "starcoder2")),
    ("stablelm", "tp=2", {}),
    *(("qwen3", "tp=2", {"shard": ("self_attn",), "tp_activations": way}) for way in ("sharded", "whole")),
    ("qwen3", "fsdp=2,tp=2", {"shard": ("mlp",)}),
    ("qwen3_moe", "ep=2,tp=2", {"shard": ("experts",)}),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "options"), LAYOUTS, ids=str)
def test_ranks_use_the_planned_memory(kind: str, layout: str, options: dict[str, Any], tmp_path: Path) -> None:
    replicated, options = (
        options.get("shard", ()),
        {name: option for name, option in options.items() if name != "shard"},
    )
    model, spec = scaled_model(kind, tmp_path), replace(ParallelSpec.parse(layout), replicated=replicated)
    shape, load = shape_at(model), replace(LOAD, dtype="float32", **options)
    with measured(model, spec, dtype="float32", **OPTIONS, **options) as where:
        table = by_name(parameters(shape, spec), shape)
        planned = {name: (each.own_shape[0] // each.fsdp, *each.own_shape[1:]) for name, each in table.items()}
        assert where.probe(shapes) == [planned] * spec.num_ranks
        assert {info.num_parameters for info in where.answers("info")} == {num_parameters(shape)}
        sizes = where.probe(model_size, LORA)
        assert sizes == [adapter_size(shape, spec, LORA.rank)] * spec.num_ranks
        found, grows = growth(where, shape, load, 2048, 4096)
        assert 0.9 * found < grows < 1.1 * found
        of_pass = estimate(shape, spec, replace(load, micro_batch_tokens=2048, samples=False))
        # The gradients of an operation, and what is offloaded: the device's memory is host memory.
        beside = of_pass.trainable.weights + of_pass.activations.host
        assert 0.9 * where.peak(2048) < of_pass.work + beside < 1.1 * where.peak(2048)


@pytest.mark.full
def test_micro_batches_of_several_adapters_use_the_planned_memory(tmp_path: Path) -> None:
    """One adapter is added to the weights before the products, several have products of their own."""
    model = scaled_model("qwen3", tmp_path)
    shape, load = shape_at(model), replace(LOAD, dtype="float32", activations="recompute")
    with measured(model, SINGLE, dtype="float32", activations="recompute", **OPTIONS) as where:
        alone, planned = growth(where, shape, load, 2048, 4096)
        where.answers("create_run", RunSpec("other", LORA))
        where.runs = ("run", "other")
        together, planned_together = growth(where, shape, replace(load, adapter_slots=2), 2048, 4096)
    assert 0.95 * alone < planned < 1.05 * alone
    if frozen_product(torch.device("cpu"), torch.float32) is torch_linear:
        # Intel's processors: it is summed into the adapters' product in place. The plan counts the others'.
        assert planned < 1.05 * together and 1.05 * together < planned_together < 1.1 * together
    else:
        assert 0.95 * together < planned_together < 1.05 * together
        assert planned < 0.95 * together and planned_together > 1.05 * alone


def test_adapter_takes_the_planned_memory(tiny_models: dict[str, Path]) -> None:
    shape = shape_at(tiny_models["qwen3"])
    load = replace(LOAD, dtype="bfloat16")
    with measured(tiny_models["qwen3"], SINGLE, dtype="bfloat16") as where:
        assert where.probe(model_size, LORA) == [adapter_size(shape, SINGLE, LORA.rank)]
        where.answers("apply_steps", (OptimizerStep("run", AdamParams()),))
        for _ in range(2):  # a window, and the gradients of an operation
            where.pass_over(LENGTH)
        (memory,) = where.answers("memory")
    planned = estimate(shape, SINGLE, load)
    assert memory["adapters_on_device"] == planned.trainable.total
    assert memory["base_weights"] == planned.base
    assert (
        memory["adapters_on_device"] != estimate(shape, SINGLE, replace(load, lora_rank=LORA.rank + 1)).trainable.total
    )


# Decisions based on the estimate


def test_each_axis_reduces_memory() -> None:
    load = Workload(longest=32768, adapter_slots=4)
    shape = public("Qwen3-30B-A3B")
    alone = estimate(shape, SINGLE, load)
    for layout in ("tp=2", "ep=2", "fsdp=2"):
        assert estimate(shape, ParallelSpec.parse(layout), load).base < 0.55 * alone.base
    halved = estimate(shape, ParallelSpec(sp=2), load)
    assert halved.base == alone.base
    assert 0.5 < halved.activations.total / alone.activations.total < 0.55
    assert estimate(shape, ParallelSpec(replicas=2), load).activations == alone.activations
    whole = estimate(shape, ParallelSpec(tp=4), replace(load, tp_activations="whole"))
    assert estimate(shape, ParallelSpec(tp=4), load).activations.total < whole.activations.total
    assert kv_cache_tokens(shape, ParallelSpec(tp=4), load) // 4 == kv_cache_tokens(shape, SINGLE, load)


def test_ranks_that_sample_gather_the_model() -> None:
    shape, spec = public("Llama-3.1-70B"), ParallelSpec(fsdp=8)
    load = Workload(longest=4096, adapter_slots=1)
    base = estimate(shape, SINGLE, load).base
    assert 0.99 * base < estimate(shape, spec, load).sampling < base, "norms are whole"
    elsewhere = estimate(shape, spec, replace(load, samples=False))
    assert elsewhere.sampling == elsewhere.kv_cache == 0
    assert elsewhere.gathered > 0


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Llama-3.1-8B", "Llama-3.1-70B"])
@pytest.mark.parametrize("longest", [4096, 32768])
def test_the_smallest_layout_fits_and_no_smaller_one_does(name: str, longest: int) -> None:
    shape, load, device = public(name), Workload(longest=longest, adapter_slots=4), 80 * 10**9
    choice = smallest_layout(shape, load, device)
    assert choice is not None and choice.memory == estimate(shape, choice.spec, load)
    assert choice.memory.total <= usable_bytes(device)
    assert smallest_layout(shape, load, device, choice.spec.num_ranks) == choice
    if choice.smaller is not None:
        assert choice.smaller.spec.num_ranks < choice.spec.num_ranks
        assert choice.smaller.memory.total > usable_bytes(device)
        assert smallest_layout(shape, load, device, choice.spec.num_ranks - 1) is None
    assert choice.spec.tp <= 8


def with_mixers(shape: ModelShape, **changes: int | None) -> ModelShape:
    """Returns the model with these settings in all its attention."""
    mixers = [each.mixer for each in shape.layers if isinstance(each.mixer, SoftmaxAttention)]
    changed = [replace(mixer, **changes) for mixer in mixers]  # pyright: ignore[reportArgumentType]
    layers = [replace(layer, mixer=mixer) for layer, mixer in zip(shape.layers, changed, strict=True)]
    return replace(shape, layers=tuple(layers))


def test_tp_is_preferred_and_fsdp_is_the_last_choice() -> None:
    shape, load = public("Llama-3.1-70B"), Workload(longest=4096, adapter_slots=4)
    choice = smallest_layout(shape, load, 80 * 10**9)
    assert choice is not None and str(choice.spec) == f"tp={choice.spec.num_ranks}"
    odd = with_mixers(shape, kv_heads=1)  # tp cannot share out anything
    choice = smallest_layout(odd, replace(load, samples=False), 80 * 10**9)
    assert choice is not None and choice.spec.tp == 1 and choice.spec.fsdp > 1


def test_recomputed_layers_make_smaller_layouts_fit() -> None:
    shape, load, device = public("Llama-3.1-70B"), Workload(longest=8192, adapter_slots=4), 80 * 10**9
    assert smallest_layout(shape, load, device, num_devices=8) is None
    again, offloaded = loads_with_fewer_activations(load)
    choice = smallest_layout(shape, again, device, num_devices=8)
    assert choice is not None and choice.load.activations == "recompute" and choice.memory.activations.host == 0
    there = estimate(shape, choice.spec, offloaded).activations
    assert there.kept + there.host > choice.memory.activations.kept > there.kept
    assert loads_with_fewer_activations(again) == []


@pytest.mark.parametrize("slots", [4, 64])
def test_every_remedy_fits(slots: int) -> None:
    shape, load, device = public("Llama-3.1-8B"), Workload(longest=16384, adapter_slots=slots), 24 * 10**9
    assert estimate(shape, SINGLE, load).total > usable_bytes(device)
    found = remedies(shape, SINGLE, load, device)
    assert found
    for remedy in found:
        assert estimate(shape, remedy.spec, remedy.load).total <= usable_bytes(device), remedy.flags


def test_window_costs_a_mask_where_kernels_need_one() -> None:
    shape = with_mixers(public("Llama-3.1-8B"), window=1024)
    load = Workload(longest=4096, dtype="float32")
    more = activations(shape, SINGLE, load).working - activations(with_mixers(shape, window=None), SINGLE, load).working
    assert 512 * 1024 * 4 < more < 8 << 20
    assert activations(with_mixers(shape, window=4096), SINGLE, load) == activations(
        with_mixers(shape, window=None), SINGLE, load
    )
    longer = replace(load, longest=8192)
    assert (
        activations(shape, SINGLE, longer).working
        - activations(with_mixers(shape, window=None), SINGLE, longer).working
        == more
    )
    short = replace(load, dtype="bfloat16")
    assert activations(shape, SINGLE, short) == activations(with_mixers(shape, window=None), SINGLE, short)


def test_load_has_the_workers_options() -> None:
    options = {"zero_stage": "2", "activations": "offload", "tp_activations": "whole", "adapter_slots": 3}
    load = Workload.of(WorkerConfig(ServedModel("m", "m"), **options), 100, "float32", samples=True)
    assert {name: getattr(load, name) for name in options} == options
    assert (load.dtype, load.longest) == ("float32", 100)
