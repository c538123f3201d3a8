"""A 4-bit base against a base with the same rounded weights in full precision."""

from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.workers.ops.frozen import quantized
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.worker_config import Quantization, ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM

from ...drawn import assert_same_sample
from ...tiny import tiny_model
from ..adapted import relative_error
from ..model_state import change_weights, pending_gradients
from ..training.test_full import run, sampled, some_data, stepped, supervised

KINDS = ("qwen3", "qwen3_moe_mixed", "qwen2_moe", "phi3", "nemotron_h_latent")
LAYERS = ("_proj.weight", "experts.gate_up_proj", "experts.up_proj", "experts.down_proj")


def a_worker(directory: Path, quantization: Quantization = "none") -> Worker:
    worker = Worker(WorkerConfig(ServedModel("tiny", str(directory)), threads=1, base_quantization=quantization))
    worker.create_run(RunSpec("run", LoraConfig(rank=4, seed=1)))
    return worker


def rounded(weight: Tensor) -> Tensor:
    packed, state = bnb.quantize_4bit(weight.flatten(0, -2), blocksize=64, quant_type="nf4")
    return bnb.dequantize_4bit(packed, state).view(weight.shape)


def rounded_model(directory: Path, target: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(LAYERS):
            parameter.data = rounded(parameter.data)
    model.save_pretrained(target)
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_4bit_base_trains_and_samples_like_its_rounded_weights(kind: str, tmp_path: Path) -> None:
    directory = tiny_model(kind, tmp_path / "model")
    ours, plain = a_worker(directory, "nf4"), a_worker(directory)
    theirs = a_worker(rounded_model(directory, tmp_path / "rounded"))
    losses = []
    for worker in (ours, theirs, plain):
        change_weights(worker, "run", lambda each: each + 0.02)  # otherwise B is zero
        (output,) = run(worker, supervised("run", some_data(1)))
        losses.append(output.metrics["loss:sum"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] != pytest.approx(losses[2], rel=1e-5)
    gradients = [pending_gradients(worker, "run") for worker in (ours, theirs, plain)]
    assert relative_error(gradients[0], gradients[1]) < 1e-5 < relative_error(gradients[0], gradients[2])
    for worker in (ours, theirs):
        stepped(worker, "run")
        worker.copy_adapter("run", "sampler")
    for adapter_id in (None, "sampler"):
        (one,), (other,) = sampled(ours, adapter_id), sampled(theirs, adapter_id)
        assert_same_sample(one.sequences[0], other.sequences[0])


def test_quantized_weights_take_four_and_a_half_bits(tmp_path: Path) -> None:
    directory = tiny_model("qwen3_moe_mixed", tmp_path)
    ours, plain = a_worker(directory, "nf4"), a_worker(directory)
    parameters = dict(plain._base.model.named_parameters())
    layers = sum(each.numel() for name, each in parameters.items() if name.endswith(LAYERS))
    others = sum(each.numel() for name, each in parameters.items() if not name.endswith(LAYERS))
    assert ours.memory()["base_weights"] == layers * 4.5 / 8 + others * 4
    assert plain.memory()["base_weights"] == 4 * (layers + others)
    assert ours.info() == plain.info()


def test_full_fine_tuning_of_a_quantized_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="start the server without --base-quantization"):
        a_worker(tiny_model("qwen3", tmp_path), "nf4").create_run(RunSpec("full", FullConfig()))


def test_missing_bitsandbytes_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'trainhouse\[quantization\]'"):
        a_worker(tiny_model("qwen3", tmp_path), "nf4")
