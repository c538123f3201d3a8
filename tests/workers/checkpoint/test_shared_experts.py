"""Files of adapters whose experts share factors: round trips, other readers, and files of earlier versions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainhouse.schemas.adapters.adapter_files import write_for_peft
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.workers.checkpoint import read_new_model, read_saved
from trainhouse.workers.checkpoint.peft_import import import_adapter
from trainhouse.workers.lora import Adapter
from trainhouse.workers.protocol.calls import AdapterFile
from transformers import AutoModelForCausalLM

from ...tiny import tiny_model
from ..adapted import Adapted, sequences
from .test_checkpoint import STEP, accumulate, apply_steps, assert_peft_loads_the_export, matrices, saved, trained

EXPERTS = "base_model.model.model.layers.0.mlp.experts"
NUM_EXPERTS, RANK = 4, 4


@pytest.fixture(scope="module")
def adapted(tiny_models: dict[str, Path]) -> Adapted:
    return Adapted(tiny_models["qwen3_moe"])


def same(one: Adapter, other: Adapter) -> bool:
    """Compares weights and optimizer state bit by bit."""
    names = ("weights", "exp_avg", "exp_avg_sq")
    return all(torch.equal(matrices(one, getattr(one, name)), matrices(other, getattr(other, name))) for name in names)


def test_files_hold_one_tensor_for_all_experts(adapted: Adapted, tmp_path: Path) -> None:
    adapter = trained(adapted, "stacked", expert_factors="shared")
    directory = saved(adapter, tmp_path / "a")
    shapes = {name: tuple(each.shape) for name, each in load_file(directory / "adapter_model.safetensors").items()}
    of_experts = {name.removeprefix(f"{EXPERTS}."): shape for name, shape in shapes.items() if name.startswith(EXPERTS)}
    assert of_experts == {
        "w1.lora_A.weight": (1, RANK, 64),
        "w1.lora_B.weight": (NUM_EXPERTS, 32, RANK),
        "w3.lora_A.weight": (1, RANK, 64),
        "w3.lora_B.weight": (NUM_EXPERTS, 32, RANK),
        "w2.lora_A.weight": (NUM_EXPERTS, RANK, 32),
        "w2.lora_B.weight": (1, 64, RANK),
    }
    other = adapted.create("other", expert_factors="shared")
    read_saved(other, directory, optimizer=True).load_into(other)
    assert other.num_steps == 2 and same(other, adapter)
    for one in (adapter, other):
        accumulate(one, seed=7)
        apply_steps([one], [STEP])
    assert same(other, adapter)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_peft_loads_the_expanded_files(kind: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    assert_peft_loads_the_export(tiny_models[kind], tmp_path, "shared")


def test_files_for_peft_are_imported_with_separate_factors(adapted: Adapted, tmp_path: Path) -> None:
    adapter = trained(adapted, "expanded", expert_factors="shared")
    directory = saved(adapter, tmp_path / "a", optimizer=False)
    linked = tmp_path / "linked.safetensors"
    linked.hardlink_to(directory / "adapter_model.safetensors")
    before = linked.read_bytes()
    write_for_peft(directory)
    assert linked.read_bytes() == before != (directory / "adapter_model.safetensors").read_bytes()
    expanded = imported(adapted, directory, tmp_path / "b")
    assert expanded.lora.expert_factors == "each"
    logits, wanted = (adapted.logits(sequences(), each) for each in (expanded, adapter))
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_files_of_earlier_versions_resume_bit_for_bit(adapted: Adapted, tmp_path: Path) -> None:
    """Each expert has both matrices, and nothing mentions expert_factors."""
    adapter = trained(adapted, "earlier", expert_factors="each")
    directory = saved(adapter, tmp_path / "a")
    description = json.loads((directory / "trainhouse.json").read_text())
    del description["lora"]["expert_factors"]
    (directory / "trainhouse.json").write_text(json.dumps(description))
    resumed = adapted.models.build(LoraConfig.model_validate(description["lora"]))
    sampled = read_new_model(adapted.models, directory)
    assert isinstance(resumed, Adapter) and isinstance(sampled, Adapter)
    assert not resumed.shares_factors and not sampled.shares_factors
    read_saved(resumed, directory, optimizer=True).load_into(resumed)
    assert torch.equal(matrices(sampled, sampled.weights), matrices(adapter, adapter.weights))
    for seed in (7, 8):
        assert same(resumed, adapter)
        for one in (adapter, resumed):
            accumulate(one, seed)
            apply_steps([one], [STEP])


@pytest.mark.parametrize("factors", ["each", "shared"])
def test_a_checkpoint_of_other_factors_is_refused_with_the_remedy(
    factors: str, adapted: Adapted, tmp_path: Path
) -> None:
    other = "each" if factors == "shared" else "shared"
    directory = saved(adapted.create(f"saved-{factors}", expert_factors=factors), tmp_path / "a", optimizer=False)
    with pytest.raises(OperationError, match=f"saved with expert_factors '{factors}'.*one with expert_factors"):
        read_saved(adapted.create(f"model-{factors}", expert_factors=other), directory, optimizer=False)
    # Attention alone is the same for both.
    directory = saved(adapted.create("attn", expert_factors=factors, train_mlp=False), tmp_path / "b", optimizer=False)
    read_saved(adapted.create("x", expert_factors=other, train_mlp=False), directory, optimizer=False)


def test_a_dense_model_is_the_same_with_either(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    dense = Adapted(tiny_models["qwen3"])
    adapter, other = dense.create("a", expert_factors="shared"), dense.create("b", expert_factors="each")
    directory = saved(adapter, tmp_path / "a", optimizer=False)
    read_saved(other, directory, optimizer=False).load_into(other)
    assert torch.equal(other.weights, adapter.weights)


def imported(adapted: Adapted, source: Path, target: Path) -> Adapter:
    target.mkdir()
    lora = LoraConfig(rank=RANK, seed=0)
    import_adapter(adapted.lora, lora, AdapterFile(str(source / "adapter_model.safetensors")), target, "tiny")
    model = read_new_model(adapted.models, target)
    assert isinstance(model, Adapter)
    return model


def test_files_of_the_tinker_protocol_are_imported(adapted: Adapted, tmp_path: Path) -> None:
    """The output head has another name there."""
    adapter = trained(adapted, "import", expert_factors="shared")
    file = saved(adapter, tmp_path / "a", optimizer=False) / "adapter_model.safetensors"
    tensors = {name.replace(".lm_head.", ".model.unembed_tokens."): each for name, each in load_file(file).items()}
    assert any("unembed_tokens" in name for name in tensors)
    save_file(tensors, file)
    found = imported(adapted, tmp_path / "a", tmp_path / "b")
    assert found.lora.expert_factors == "shared" and found.lora.train_unembed
    assert torch.equal(matrices(found, found.weights), matrices(adapter, adapter.weights))

    # With both matrices for each expert, which are stacked too.
    name = f"{EXPERTS}.w1.lora_A.weight"
    separate = {
        each: tensor.expand(NUM_EXPERTS, -1, -1) if len(tensor) == 1 else tensor for each, tensor in tensors.items()
    }
    save_file({each: tensor.contiguous() for each, tensor in separate.items()}, file)
    found = imported(adapted, tmp_path / "a", tmp_path / "c")
    assert found.lora.expert_factors == "each"
    logits, wanted = (adapted.logits(sequences(), each) for each in (found, adapter))
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max()

    save_file(tensors | {name: tensors[name].expand(NUM_EXPERTS, -1, -1).contiguous()}, file)
    with pytest.raises(OperationError, match=r"w1.lora_A.weight has shape \[4, 4, 64\].*needs \[1, 4, 64\]"):
        imported(adapted, tmp_path / "a", tmp_path / "d")


def test_empty_tensors_of_experts_without_gates_are_left_out(tmp_path: Path) -> None:
    without_gates = Adapted(tiny_model("nemotron_h_latent", tmp_path / "model"))
    adapter = trained(without_gates, "empty", expert_factors="shared")
    file = saved(adapter, tmp_path / "a", optimizer=False) / "adapter_model.safetensors"
    tensors, layer = load_file(file), "base_model.model.model.layers.1.mixer.experts"
    shapes = {name: tuple(each.shape) for name, each in tensors.items() if name.startswith(layer)}
    assert shapes == {
        f"{layer}.w1.lora_A.weight": (1, RANK, 40),
        f"{layer}.w1.lora_B.weight": (NUM_EXPERTS, 32, RANK),
        f"{layer}.w2.lora_A.weight": (NUM_EXPERTS, RANK, 32),
        f"{layer}.w2.lora_B.weight": (1, 40, RANK),
    }
    empty = {f"{layer}.w3.lora_{side}.weight": torch.zeros(0) for side in "AB"}
    save_file(tensors | empty, file)
    found = imported(without_gates, tmp_path / "a", tmp_path / "b")
    assert torch.equal(matrices(found, found.weights), matrices(adapter, adapter.weights))


def test_tinker_cookbook_merges_our_files(tmp_path: Path) -> None:
    """tinker-cookbook's own reader gives a model that computes what our adapter does."""
    weights = pytest.importorskip("tinker_cookbook.weights")
    adapted = Adapted(tiny_model("qwen3_moe", tmp_path / "model"))
    adapter = trained(adapted, "merge", expert_factors="shared")
    directory = saved(adapter, tmp_path / "a", optimizer=False)
    weights.build_hf_model(
        base_model=str(tmp_path / "model"), adapter_path=str(directory), output_path=str(tmp_path / "merged")
    )
    weights.build_lora_adapter(
        base_model=str(tmp_path / "model"), adapter_path=str(directory), output_path=str(tmp_path / "peft")
    )
    write_for_peft(directory)
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (directory, tmp_path / "peft"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    wanted = torch.cat([merged(input_ids=each[None]).logits[0] for each in sequences()]).detach()
    logits, bare = (adapted.logits(sequences(), each).detach() for each in (adapter, None))
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max() < (logits - bare).abs().max()
