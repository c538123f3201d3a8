"""Checkpoints of adapters: exact round trips, PEFT's layout, and refusals that leave the adapter alone."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from trainhouse.schemas.adapters.adapter_files import write_for_peft
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.training import AdamParams
from trainhouse.workers.checkpoint import TrainedState, read_new_model, read_saved, save
from trainhouse.workers.lora import Adapter
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.calls import Failure, OptimizerStep
from trainhouse.workers.state.optim import apply_steps
from transformers import AutoModelForCausalLM

from ...faults.disk import filled, small_disk
from ...tiny import KINDS, tiny_model
from ..adapted import Adapted, peft_logits, quieten_peft, relative_error, sequences

STEP = OptimizerStep("run", AdamParams(learning_rate=1e-2))


def accumulate(adapter: Adapter, seed: int) -> None:
    adapter.gradients.begin_operation()
    adapter.gradients.scratch.copy_(torch.randn(adapter.weights.shape, generator=torch.Generator().manual_seed(seed)))
    adapter.gradients.commit()


def trained(adapted: Adapted, adapter_id: str = "run", **lora: object) -> Adapter:
    adapter = adapted.create(adapter_id, **lora)
    for seed in range(2):
        accumulate(adapter, seed)
        apply_steps([adapter], [STEP])
    return adapter


def saved(adapter: Adapter, directory: Path, optimizer: bool = True) -> Path:
    directory.mkdir()
    save(TrainedState.without_gradients(adapter, Mesh(), optimizer=optimizer), directory, base_name="tiny/model")
    return directory


def matrices(adapter: Adapter, vector: torch.Tensor) -> torch.Tensor:
    """Joins the views without the gaps between them, which the test fills, too."""
    return torch.cat([view.flatten() for view in adapter.layout.named_views(vector).values()])


def test_round_trip_with_optimizer_is_bit_exact_and_training_continues(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    adapted = Adapted(tiny_models["qwen3"])
    adapter, other = trained(adapted), adapted.create("other")
    read_saved(other, saved(adapter, tmp_path / "checkpoint"), optimizer=True).load_into(other)
    assert other.num_steps == 2
    for _ in range(2):
        for name in ("weights", "exp_avg", "exp_avg_sq"):
            assert torch.equal(matrices(other, getattr(other, name)), matrices(adapter, getattr(adapter, name))), name
        for one in (adapter, other):
            accumulate(one, seed=7)
            apply_steps([one], [STEP])


def test_loading_without_the_optimizer_starts_it_fresh(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    adapted = Adapted(tiny_models["qwen3"])
    adapter = trained(adapted)
    directory = saved(adapter, tmp_path / "checkpoint", optimizer=False)
    read_saved(adapter, directory, optimizer=False).load_into(adapter)
    assert adapter.num_steps == 0
    assert not adapter.exp_avg.any() and not adapter.exp_avg_sq.any()
    assert not (directory / "optimizer.safetensors").exists()


def test_saving_leaves_pending_gradients_and_loading_discards_them(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    adapted = Adapted(tiny_models["llama"])
    adapter, undisturbed = trained(adapted), trained(adapted, "und")
    for one in (adapter, undisturbed):
        accumulate(one, seed=5)
    directory = saved(adapter, tmp_path / "checkpoint")
    stored = load_file(directory / "adapter_model.safetensors")
    for name, view in adapter.layout.named_views(adapter.weights).items():
        assert torch.equal(stored[name], view)
    for one in (adapter, undisturbed):
        apply_steps([one], [STEP])
    assert torch.equal(adapter.weights, undisturbed.weights)

    accumulate(adapter, seed=6)
    read_saved(adapter, directory, optimizer=True).load_into(adapter)
    (refused,) = apply_steps([adapter], [STEP])
    assert isinstance(refused, Failure) and "no gradients" in refused.message
    assert adapter.num_steps == 2


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_the_export_with_the_same_logits(kind: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    assert_peft_loads_the_export(tiny_models[kind], tmp_path)


def test_peft_loads_dense_layers_next_to_experts(tmp_path: Path) -> None:
    assert_peft_loads_the_export(tiny_model("qwen3_moe", tmp_path / "model", mlp_only_layers=[0]), tmp_path)


def assert_peft_loads_the_export(model_directory: Path, tmp_path: Path, expert_factors: str = "each") -> None:
    adapted = Adapted(model_directory)
    adapter = trained(adapted, expert_factors=expert_factors)
    directory = saved(adapter, tmp_path / "checkpoint", optimizer=False)
    write_for_peft(directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    bare = peft_logits(model, sequences()).detach()
    with warnings.catch_warnings():
        quieten_peft()
        loaded = PeftModel.from_pretrained(model, directory)
    logits = adapted.logits(sequences(), adapter)
    assert relative_error(logits, peft_logits(loaded, sequences())) < 2e-6
    assert relative_error(logits, bare) > 1e-1


def test_checkpoint_loads_as_a_sampler_adapter_without_optimizer(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    adapted = Adapted(tiny_models["qwen2"])
    adapter = trained(adapted, rank=3)
    directory = saved(adapter, tmp_path / "checkpoint")
    sampler = read_new_model(adapted.models, directory)
    assert torch.equal(sampler.weights, adapter.weights)
    assert sampler.vectors.num_bytes == sampler.weights.nbytes


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


A_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no description": (lambda d: (d / "trainhouse.json").unlink(), "no trainhouse.json"),
    "broken description": (lambda d: (d / "trainhouse.json").write_text("{"), "is damaged"),
    "other format": (lambda d: (d / "trainhouse.json").write_text(json.dumps({"format": 99})), "has format 99"),
    "no weights": (lambda d: (d / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    "torn weights": (lambda d: (d / "adapter_model.safetensors").write_bytes(b"torn"), "is damaged"),
    "missing tensor": (
        lambda d: rewrite(d / "adapter_model.safetensors", lambda tensors: tensors.pop(A_NAME)),
        f"it lacks {A_NAME}",
    ),
    "unknown tensor": (
        lambda d: rewrite(d / "adapter_model.safetensors", lambda tensors: tensors.update(more=torch.zeros(1))),
        "has more in addition",
    ),
    "other shape": (
        lambda d: rewrite(d / "adapter_model.safetensors", lambda t: t.update({A_NAME: torch.zeros(4, 32)})),
        r"has shape \[4, 32\], the model needs \[4, 64\]",
    ),
    "no optimizer": (lambda d: (d / "optimizer.safetensors").unlink(), "saved without optimizer state"),
    "torn optimizer": (lambda d: (d / "optimizer.safetensors").write_bytes(b"torn"), "is damaged"),
    "missing moment": (
        lambda d: rewrite(d / "optimizer.safetensors", lambda tensors: tensors.pop(f"exp_avg_sq.{A_NAME}")),
        f"it lacks exp_avg_sq.{A_NAME}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused_and_the_adapter_unchanged(
    damage: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    adapter = trained(Adapted(tiny_models["llama"]))
    directory = saved(adapter, tmp_path / "checkpoint")
    accumulate(adapter, seed=3)
    before = [vector.clone() for vector in (adapter.weights, adapter.exp_avg, adapter.gradients.accumulator)]
    spoil, reason = DAMAGES[damage]
    spoil(directory)
    with pytest.raises(OperationError, match=reason):
        read_saved(adapter, directory, optimizer=True)
    after = (adapter.weights, adapter.exp_avg, adapter.gradients.accumulator)
    assert all(map(torch.equal, before, after))
    assert (adapter.num_steps, adapter.gradients.window.num_operations) == (2, 1)


@pytest.mark.parametrize(
    "lora, reason",
    [
        ({"rank": 8}, "saved with rank 4, the model has rank 8: create a model with rank 4"),
        ({"alpha": 16.0}, "saved with alpha 32.0, the model has alpha 16.0"),
        ({"train_unembed": False}, "only the checkpoint has lm_head"),
        ({"train_attn": False}, "only the checkpoint has model.layers.0.self_attn.k_proj.* and 5 more"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    lora: dict[str, object], reason: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    adapted = Adapted(tiny_models["llama"])
    directory = saved(adapted.create("run"), tmp_path / "checkpoint")
    with pytest.raises(OperationError, match=reason):
        read_saved(adapted.create("other", **lora), directory, optimizer=False)


def test_a_checkpoint_of_another_base_is_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    directory = saved(Adapted(tiny_models["llama"]).create("run"), tmp_path / "checkpoint")
    wider = Adapted(tiny_model("llama", tmp_path / "wider", hidden_size=128))
    with pytest.raises(OperationError, match="the checkpoint belongs to another base model"):
        read_new_model(wider.models, directory)


def test_save_on_a_full_disk_is_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    adapter = trained(Adapted(tiny_models["qwen3"]))
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        saved(adapter, disk / "first")
        (disk / "second").mkdir()
        with filled(disk):
            with pytest.raises(OperationError, match=r"the server's disk is full.*try again") as failed:
                save(TrainedState.without_gradients(adapter, Mesh()), disk / "second", base_name="tiny/model")
            assert failed.value.category == "server"
