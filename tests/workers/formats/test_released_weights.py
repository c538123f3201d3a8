"""A base whose weights are held as released equals, bit for bit, one that holds their numbers unpacked."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE
from trainhouse.workers.protocol.worker_config import Quantization, ServedModel, WorkerConfig
from trainhouse.workers.shapes.model_shape import ModelShape, read_model
from trainhouse.workers.worker.worker import Worker

from ...tiny import tiny_model
from ..model_state import change_weights, pending_gradients, weights_of
from ..training.test_full import run, sampled, some_data, stepped, supervised
from .releases import RELEASES
from .test_packed_tensors import mxfp4_release

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
EXPERTS = SHAPE | {"moe_intermediate_size": 128}
RELEASED = ["DeepSeek's FP8", "Kimi's INT4", "NVFP4 of ModelOpt", "MXFP4 of compressed-tensors"]


def released(release: str, directory: Path, kind: str = "qwen3_moe") -> Path:
    model = tiny_model(kind, directory / "model", **(EXPERTS if kind == "qwen3_moe" else SHAPE))
    RELEASES[release].write(model, directory / "packed", directory / "plain")
    return directory / "packed"


def a_worker(directory: Path, quantization: Quantization) -> Worker:
    worker = Worker(WorkerConfig(ServedModel("tiny", str(directory)), threads=1, base_quantization=quantization))
    worker.create_run(RunSpec("run", LoraConfig(rank=4, seed=1)))
    change_weights(worker, "run", lambda each: each + 0.02)  # otherwise B is zero
    return worker


def numbers(worker: Worker) -> list[np.ndarray]:
    """Returns log-probabilities, gradients, weights after a step, and what the base and the adapter sample."""
    (output,) = run(worker, supervised("run", some_data(1)))
    found = [each["logprobs"] for each in output.loss_fn_outputs]
    found.append(pending_gradients(worker, "run").numpy())
    stepped(worker, "run")
    found.append(weights_of(worker, "run").numpy())
    worker.copy_adapter("run", "sampler")
    for adapter_id in (None, "sampler"):
        (answer,) = sampled(worker, adapter_id)
        assert isinstance(answer, SampleResponse)
        found += [each for sequence in answer.sequences for each in (sequence.tokens, sequence.logprobs)]
    return found


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


def planned_bytes(directory: Path) -> int:
    shape = read_model(ServedModel("tiny", str(directory)))
    assert isinstance(shape, ModelShape)
    return estimate(shape, SINGLE, Workload(64, "float32", base_quantization="released")).base


def check_equal(directory: Path) -> Worker:
    """Returns the worker whose weights are held as released, after changing one of their codes."""
    ours, theirs = a_worker(directory, "released"), a_worker(directory, "none")
    expected = numbers(theirs)
    assert same(numbers(ours), expected)
    codes = ours._base.weights._quantized[0].tensors[0]
    codes.view(torch.uint8)[0, 0, :4] ^= 1
    changed = a_worker(directory, "released")
    changed._base.weights._quantized[0].tensors[0].copy_(codes)
    assert not same(numbers(changed), expected)
    return ours


@pytest.mark.parametrize("release", RELEASED)
def test_training_and_sampling_equal_those_of_the_unpacked_base(release: str, tmp_path: Path) -> None:
    directory = released(release, tmp_path)
    ours = check_equal(directory)
    weights = ours.memory()["base_weights"]
    assert weights == planned_bytes(directory)
    assert weights < 0.6 * a_worker(directory, "none").memory()["base_weights"]


@pytest.mark.parametrize(("kind", "release"), [("phi3", "NVFP4 of ModelOpt"), ("deepseek_v3", "DeepSeek's FP8")])
def test_other_families_are_held_as_released(kind: str, release: str, tmp_path: Path) -> None:
    """One matrix is of all projections, or a decoding step multiplies with it in another way."""
    model = tiny_model(kind, tmp_path / "model", **(SHAPE if kind == "phi3" else {}))
    RELEASES[release].write(model, tmp_path / "packed", tmp_path / "plain")
    check_equal(tmp_path / "packed")


def test_experts_of_gpt_oss_are_held_as_released(tmp_path: Path) -> None:
    """Attention is not packed there."""
    directory = mxfp4_release(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.*.self_attn", "lm_head"]
    (directory / "config.json").write_text(json.dumps(config))
    base = check_equal(directory)._base
    assert base.weights.num_bytes == planned_bytes(directory)
    attention = next(name for name, _ in base.model.named_parameters() if name.endswith("q_proj.weight"))
    assert base.weights._num_unpacked == 8 and attention.startswith("model.layers.0")


def test_layers_that_a_release_leaves_unpacked_are_planned_so(tmp_path: Path) -> None:
    shape = read_model(ServedModel("tiny", str(released("Kimi's INT4", tmp_path))))
    assert isinstance(shape, ModelShape)
    load = Workload(64, "float32", base_quantization="released")
    all_packed, unpacked = (
        estimate(shape, SINGLE, replace(load, base_quantization=each)).base for each in ("released", "none")
    )
    for pattern, number in [("re:.*self_attn.*", 2), ("model.layers.1.self_attn", 1), ("re:.*layers.0.self_attn", 1)]:
        some = replace(shape, released=replace(shape.released, ignored=(pattern,)))
        attention = 2 * 128 * 4 * 32 + 2 * 128 * 2 * 32
        assert estimate(some, SINGLE, load).base - all_packed == number * attention * (4 - 4.5 / 8)
    experts = replace(shape, released=replace(shape.released, ignored=("re:.*experts.*", "re:.*self_attn.*")))
    assert estimate(experts, SINGLE, load).base == unpacked


def test_models_without_packed_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"because its config\.json has no quantization_config: leave it out"):
        a_worker(tiny_model("qwen3", tmp_path / "other"), "released")
    directory = released("INT8 with zero points", tmp_path, "qwen3")
    with pytest.raises(ValueError, match="its weights are packed by compressed-tensors, and only codes with one"):
        a_worker(directory, "released")


def test_a_release_whose_numbers_are_not_of_its_format_is_refused(tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = RELEASES["Kimi's INT4"].config
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="none of its 14 weights under adapters can be held as released"):
        a_worker(directory, "released")


def test_full_fine_tuning_of_a_base_as_released_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="start the server without --base-quantization"):
        a_worker(released("Kimi's INT4", tmp_path, "qwen3"), "released").create_run(RunSpec("full", FullConfig()))
