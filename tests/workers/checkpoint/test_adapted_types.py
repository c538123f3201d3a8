"""Adapters of every served model type: which layers they adapt, and that peft loads all of them."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainhouse.client.export_checkpoint import loaded_by
from trainhouse.schemas.adapters.adapter_files import write_for_cookbook, write_for_peft
from trainhouse.schemas.adapters.merged_model import merge_into_base
from trainhouse.schemas.adapters.peft import PeftConfig
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.workers.checkpoint import TrainedState, read_new_model, read_saved, save
from trainhouse.workers.checkpoint.peft_import import import_adapter
from trainhouse.workers.lora import Adapter
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.calls import AdapterFile
from transformers import AutoModelForCausalLM

from ..adapted import Adapted, load_in_peft, peft_gradients, peft_logits, probe, quieten_peft, relative_error, sequences
from ..models.tiny_types import SERVED, tiny_config_of

# In every run of the tests: dense, sparse in each way that peft distinguishes, and with unusual names.
CORE = ("dots1", "gpt_neox", "gpt_oss", "laguna", "llama", "mixtral", "phimoe", "qwen2_moe", "starcoder2")
EVERY = [each if each in CORE else pytest.param(each, marks=pytest.mark.full) for each in SERVED]

# Layers of which peft adapts none in these types.
REFUSED_BY_PEFT = {"falcon_h1": "out_proj", "nemotron_h": "out_proj"}

# Relative to the change of log-probabilities by the adapter. The distance is of all of them together: single positions
# of tiny models enlarge float32's rounding, so that the largest difference depends on the processor.
TOLERANCE = 1e-5


def tiny(model_type: str, directory: Path) -> Path:
    torch.manual_seed(0)
    config = tiny_config_of(model_type)
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = 512  # some are refused with one that sequences cross
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def adapted_tiny(model_type: str, directory: Path) -> Adapted:
    return Adapted(tiny(model_type, directory))


def exported(adapter: Adapter, directory: Path) -> Path:
    directory.mkdir()
    save(TrainedState.without_gradients(adapter, Mesh(), optimizer=True), directory, base_name="tiny/model")
    return directory


def in_peft_from(model: Path, directory: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings():
        quieten_peft()
        return PeftModel.from_pretrained(base, str(directory))


@torch.no_grad()
def distance(adapted: Adapted, adapter: Adapter | None, tuned: torch.nn.Module) -> float:
    """Returns the distance between our log-probabilities and those of tuned."""
    data = sequences(vocab_size=adapted.base.vocab_size)
    return distance_of_logits(adapted.logits(data, adapter), peft_logits(tuned, data))


def distance_of_logits(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.log_softmax(-1) - theirs.log_softmax(-1)).norm())


def numbers(tensors: Sequence[Tensor]) -> Tensor:
    """Returns all nonzero numbers, sorted, because peft arranges those of experts differently."""
    flat = torch.cat([each.detach().flatten() for each in tensors])
    return flat[flat != 0].sort().values


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_peft_loads_every_matrix_of_an_export(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_tiny(model_type, tmp_path / "model")
    adapter = adapted.create("run")
    directory = exported(adapter, tmp_path / "here")
    write_for_peft(directory)
    assert_merged_unchanged(adapted, adapter, directory, tmp_path / "merged")
    assert_reimported_unchanged(adapted, directory, tmp_path / "back")
    if model_type in REFUSED_BY_PEFT:
        with pytest.raises(
            ValueError, match=f"'{REFUSED_BY_PEFT[model_type]}' is incompatible with Mamba-based models"
        ):
            in_peft_from(tmp_path / "model", directory)
        leave_out(REFUSED_BY_PEFT[model_type], adapter, directory)
    tuned = in_peft_from(tmp_path / "model", directory)
    moved = distance(adapted, None, tuned)
    assert distance(adapted, adapter, tuned) < TOLERANCE * moved
    in_files = load_file(directory / "adapter_model.safetensors")
    parameters = {name: each for name, each in tuned.named_parameters() if ".lora_" in name}
    assert torch.equal(numbers([*in_files.values()]), numbers([*parameters.values()])), "none was dropped or added"
    assert_each_kind_matters(adapted, adapter, tuned, moved)
    with warnings.catch_warnings():
        quieten_peft()
        by_peft = distance(adapted, adapter, tuned.merge_and_unload())
    if adapter.tied_embedding is None:
        assert by_peft < TOLERANCE * moved
    else:  # peft merges into the embedding too
        assert by_peft > 100 * TOLERANCE * moved


def assert_merged_unchanged(adapted: Adapted, adapter: Adapter, directory: Path, target: Path) -> None:
    merge_into_base(directory, adapted.directory, target)
    merged = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert distance(adapted, adapter, merged) < TOLERANCE * distance(adapted, None, merged)


def leave_out(kind: str, adapter: Adapter, directory: Path) -> None:
    """Makes the adapter, and the exported one, adapt no layers of this kind."""
    description = json.loads((directory / "trainhouse.json").read_text())
    assert description["refused_by_peft"] == kind and kind in loaded_by(description, directory)
    for name, pair in adapter.pairs.items():
        if name.endswith(f".{kind}"):
            pair.b.zero_()
    tensors = load_file(directory / "adapter_model.safetensors")
    kept = {name: each for name, each in tensors.items() if f".{kind}.lora_" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    config["target_modules"].remove(kind)
    (directory / "adapter_config.json").write_text(json.dumps(config))


def assert_each_kind_matters(adapted: Adapted, adapter: Adapter, tuned: PeftModel, moved: float) -> None:
    """Checks that the comparison would fail without the matrices of a kind of layer, for each kind."""
    kinds = {name.split(".", 5)[-1]: each for name, each in tuned.named_parameters() if ".lora_B." in name}
    for name, parameter in kinds.items():
        value = parameter.data.clone()
        parameter.data.zero_()
        assert distance(adapted, adapter, tuned) > 10 * TOLERANCE * moved, name
        parameter.data.copy_(value)


def assert_reimported_unchanged(adapted: Adapted, directory: Path, target: Path) -> None:
    config = PeftConfig.read(json.loads((directory / "adapter_config.json").read_text()))
    target.mkdir()
    lora = LoraConfig(rank=config.rank, alpha=config.alpha, seed=0)
    file = AdapterFile(str(directory / "adapter_model.safetensors"), config.peft_version, config.parameters)
    import_adapter(adapted.lora, lora, file, target, "tiny/model")
    write_for_peft(target)
    before, after = (load_file(each / "adapter_model.safetensors") for each in (directory, target))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_peft_uses_the_ranks_of_experts_that_it_says_it_ignores(model_type: str, tmp_path: Path) -> None:
    """PEFT looks for matches of rank_pattern among modules alone, also of an entry of its own."""
    adapter = adapted_tiny(model_type, tmp_path / "model").create("run")
    directory = exported(adapter, tmp_path / "here")
    write_for_peft(directory)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match="_pattern keys did not match any targeted module and were ignored"):
        tuned = PeftModel.from_pretrained(base, str(directory))
    ranks = {name.split(".mlp.")[-1]: len(each) // 4 for name, each in tuned.named_parameters() if ".lora_A." in name}
    of_experts = {name.partition(".lora_A")[0]: rank for name, rank in ranks.items() if name.startswith("experts.")}
    assert of_experts == {"experts.base_layer": 8, "experts": 4}


@pytest.mark.parametrize("part", ["train_attn", "train_mlp"])
@pytest.mark.parametrize("model_type", ["dots1", "qwen2_moe", "gpt_bigcode"])
def test_peft_adapts_no_more_than_was_trained(model_type: str, part: str, tmp_path: Path) -> None:
    adapted = adapted_tiny(model_type, tmp_path / "model")
    adapter = adapted.create(
        "run", **({"train_attn": False, "train_mlp": False, "train_unembed": False} | {part: True})
    )
    directory = exported(adapter, tmp_path / "here")
    tuned = in_peft_from(tmp_path / "model", directory)
    parameters = [each for name, each in tuned.named_parameters() if ".lora_" in name]
    in_files = load_file(directory / "adapter_model.safetensors")
    assert torch.equal(numbers([*in_files.values()]), numbers(parameters))
    assert distance(adapted, adapter, tuned) < TOLERANCE * distance(adapted, None, tuned)


@pytest.mark.parametrize("model_type", ["minimax_m3_vl_text", "persimmon"])
def test_gradients_of_transformers_layers_equal_peft(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_tiny(model_type, tmp_path)
    assert not adapted.base.runs_own_layers
    adapter = adapted.create("run")
    tuned = load_in_peft(adapted.directory, adapter)
    data = sequences(vocab_size=adapted.base.vocab_size)
    logits, wanted = adapted.logits(data, adapter), peft_logits(tuned, data)
    adapter.gradients.begin_operation()
    (logits * probe(logits)).sum().backward()
    (wanted * probe(wanted)).sum().backward()
    gradients = adapter.layout.named_views(adapter.gradients.scratch)
    experts = [target for target in adapter.targets if target.num_experts is not None]
    linears = list(dict.fromkeys(target.saved_kind for target in experts))
    theirs = peft_gradients(tuned, max((target.num_experts or 0 for target in experts), default=0), linears)
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert relative_error(gradients[name], gradient) < 1e-4, name
    some = next(iter(theirs))
    assert relative_error(gradients[some] * 1.001, theirs[some]) > 5e-4


# Adapted layers


ADAPTED = {
    "starcoder2": {"mlp.c_fc", "mlp.c_proj"},
    "olmoe": {"mlp.experts"},
    "phimoe": {"mlp.experts"},
    "minimax_m2": {"mlp.experts"},
    "qwen2_moe": {"mlp.experts", "mlp.shared_expert"},
    "hunyuan_v1_moe": {"mlp.experts", "mlp.shared_mlp"},
    "glm4_moe": {"mlp", "mlp.experts", "mlp.shared_experts"},
    "dots1": {"mlp", "mlp.experts", "mlp.shared_experts"},
    "ernie4_5_moe": {"mlp", "mlp.experts", "mlp.shared_experts"},
}


@pytest.mark.parametrize("model_type", ADAPTED)
def test_all_parts_of_feed_forward_layers_are_adapted(model_type: str, tmp_path: Path) -> None:
    adapter = adapted_tiny(model_type, tmp_path).create("run", train_attn=False, train_unembed=False)
    found = {target.name.split(".", 3)[-1] for target in adapter.targets}
    kinds = {"gate_proj", "up_proj", "down_proj"}
    wanted = ADAPTED[model_type]
    assert found == (wanted if model_type == "starcoder2" else {f"{part}.{kind}" for part in wanted for kind in kinds})
    left = {name.rpartition(".")[2] for name in adapter.not_adapted}
    assert left <= {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "router", "wg", "shared_expert_gate", "moe_statics"}


@pytest.mark.parametrize("model_type", EVERY)
def test_group_without_adaptable_layers_is_refused(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_tiny(model_type, tmp_path)
    layers, found = adapted.lora, adapted.base.config.model_type
    for flag, group in (("train_attn", "attention"), ("train_mlp", "mlp")):
        lora = LoraConfig.model_validate({"train_attn": False, "train_mlp": False, flag: True})
        if any(target.group == group for target in layers.build(lora).targets):
            layers.check_groups(lora)
            continue
        with pytest.raises(OperationError, match=rf"{flag}=True would adapt nothing of {found} models such as "):
            layers.check_groups(lora)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "mixtral", "hy_v3", "bamba", "qwen3_5_text"])
def test_an_adapter_with_the_cookbooks_names_is_read_and_written_back(model_type: str, tmp_path: Path) -> None:
    adapted = adapted_tiny(model_type, tmp_path / "model")
    adapter = adapted.create("run")
    directory = exported(adapter, tmp_path / "here")
    before = load_file(directory / "adapter_model.safetensors")
    write_for_cookbook(directory)
    renamed = load_file(directory / "adapter_model.safetensors")
    assert (renamed.keys() != before.keys()) == (model_type not in ("llama", "mixtral"))
    assert torch.equal(numbers([*renamed.values()]), numbers([*before.values()]))
    loaded = read_new_model(adapted.models, directory)
    assert torch.equal(loaded.weights, adapter.weights)
    unchanged = exported(adapter, tmp_path / "there")
    for each in (directory, unchanged):
        write_for_peft(each)
    after, wanted = (load_file(each / "adapter_model.safetensors") for each in (directory, unchanged))
    assert wanted.keys() == after.keys() and all(torch.equal(after[name], wanted[name]) for name in wanted)


# Checkpoints of earlier versions


def test_adapter_saved_without_experts_loads_as_the_same_function(tmp_path: Path) -> None:
    """Earlier versions did not adapt experts in transformers' layers."""
    adapted = adapted_tiny("dots1", tmp_path / "model")
    adapter = adapted.create("run")
    for name, pair in adapter.pairs.items():
        if ".experts." in name:
            pair.b.zero_()
    directory = exported(adapter, tmp_path / "here")
    for file in ("adapter_model", "optimizer"):
        kept = {
            name: each for name, each in load_file(directory / f"{file}.safetensors").items() if ".experts." not in name
        }
        save_file(kept, directory / f"{file}.safetensors", metadata={"format": "pt"})
    description = json.loads((directory / "trainhouse.json").read_text())
    description["targets"] = [name for name in description["targets"] if ".experts." not in name]
    (directory / "trainhouse.json").write_text(json.dumps(description))
    loaded = read_new_model(adapted.models, directory)
    data = sequences(vocab_size=adapted.base.vocab_size)
    with torch.no_grad():
        assert torch.equal(adapted.logits(data, loaded), adapted.logits(data, adapter))
    a, b = loaded.vectors.weight_views()[next(name for name in loaded.vectors.weight_views() if ".experts." in name)]
    assert bool(a.any()) and not bool(b.any())
    read_saved(adapter, directory, optimizer=True).load_into(adapter)
    other = adapted.create("other", train_mlp=False)
    with pytest.raises(OperationError, match="adapts other layers than the model"):
        read_saved(other, directory, optimizer=True)


def test_tensor_names_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Laguna's shared experts have another name in its files, and peft renames their modules."""
    adapted = adapted_tiny("laguna", tmp_path / "model")
    adapter = adapted.create("run")
    directory = exported(adapter, tmp_path / "here")
    before = adapter.weights.clone()
    for file in ("adapter_model", "optimizer"):
        tensors = load_file(directory / f"{file}.safetensors")
        assert any("mlp.shared_expert." in name for name in tensors)
        renamed = {name.replace("mlp.shared_expert.", "mlp.shared_experts."): each for name, each in tensors.items()}
        save_file(renamed, directory / f"{file}.safetensors", metadata={"format": "pt"})
    read_saved(adapter, directory, optimizer=True).load_into(adapter)
    assert torch.equal(adapter.weights, before)
