"""Tests the worker's verbs together, on one rank in this process."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampleResponse, SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import (
    Failure,
    OperationPart,
    OptimizerStep,
    RunSpec,
    SampleJob,
    SamplingSlice,
)
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM

from ...drawn import as_drawn
from ...tiny import KINDS, LLAMA3_ROPE, tiny_model
from ..requests import repeatable

LORA = LoraConfig(rank=4, seed=11)
ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1)


def config(directory: Path, **options: Any) -> WorkerConfig:
    return WorkerConfig(ServedModel("tiny", str(directory)), threads=1, **options)


@pytest.fixture(scope="module")
def module_worker(tiny_models: dict[str, Path]) -> Worker:
    return Worker(config(tiny_models["qwen3"], max_lora_rank=8))


@pytest.fixture
def worker(module_worker: Worker) -> Iterator[Worker]:
    """Returns a worker with a run named "run"."""
    module_worker.create_run(RunSpec("run", LORA))
    yield module_worker
    module_worker.drop_run("run")


def some_data(*lengths: int) -> tuple[Datum, ...]:
    random = np.random.default_rng(5)
    rows = [random.integers(0, 512, length + 1) for length in lengths]
    return tuple(
        Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)})
        for row in rows
    )


DATA = some_data(9, 20, 9, 3)


def train(worker: Worker, run_id: str = "run", data: tuple[Datum, ...] = DATA) -> ForwardBackwardOutput:
    (output,) = worker.run_pass((OperationPart(0, ForwardBackwardRequest(run_id, 1, data, "cross_entropy")),))
    assert isinstance(output, ForwardBackwardOutput), output
    return output


def step(worker: Worker, run_id: str = "run", params: AdamParams = ADAM) -> dict[str, float] | Failure:
    (metrics,) = worker.apply_steps((OptimizerStep(run_id, params),))
    return metrics


def loss(worker: Worker, run_id: str = "run") -> float:
    request = ForwardBackwardRequest(run_id, 1, DATA, "cross_entropy", forward_only=True)
    (output,) = worker.run_pass((OperationPart(0, request),))
    assert isinstance(output, ForwardBackwardOutput)
    return output.metrics["loss:sum"]


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_on_every_kind_of_model(kind: str, tiny_models: dict[str, Path]) -> None:
    worker = Worker(config(tiny_models[kind]))
    info = worker.create_run(RunSpec("run", LORA))
    assert info.num_parameters > 0
    assert any("q_proj" in name for name in info.target_modules)
    first = train(worker).metrics["loss:sum"]
    for _ in range(5):
        assert isinstance(step(worker), dict)
        train(worker)
    assert loss(worker) < 0.7 * first


def test_info_describes_the_model(worker: Worker) -> None:
    info = worker.info()
    assert (info.name, info.architecture, info.dtype, info.device) == ("tiny", "Qwen3ForCausalLM", "float32", "cpu")
    assert (info.vocab_size, info.max_context_length, info.eos_token_ids) == (512, 1024, (2,))
    assert info.num_parameters == 139648


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_step_equals_peft_and_torch_adamw(worker: Worker, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, seed=11, train_unembed=False)
    worker.create_run(RunSpec("peft", lora))
    worker.save_run("peft", str(tmp_path), optimizer=False)
    base = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, PeftLoraConfig(r=4, lora_alpha=32, target_modules=targets))
    model.load_adapter(str(tmp_path), "default", is_trainable=True)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for _ in range(2):
        optimizer.zero_grad()
        for datum in DATA:
            logits = model(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
            targets_of_datum = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
            torch.nn.functional.cross_entropy(logits, targets_of_datum, reduction="sum").backward()
        optimizer.step()
        train(worker, "peft")
        step(worker, "peft", AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.1))
    with torch.no_grad():
        logits = model(torch.from_numpy(DATA[1].tokens.astype(np.int64))[None]).logits[0]
    expected = torch.log_softmax(logits, -1).gather(
        1, torch.from_numpy(DATA[1].loss_fn_inputs["target_tokens"])[:, None]
    )
    found = train(worker, "peft").loss_fn_outputs[1]["logprobs"]
    worker.drop_run("peft")
    np.testing.assert_allclose(found, expected.squeeze(1).numpy(), rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):  # one more step makes a difference
        np.testing.assert_allclose(train(worker).loss_fn_outputs[1]["logprobs"], found, rtol=1e-4, atol=1e-4)


def test_at_learning_rate_zero_nothing_moves(worker: Worker, tmp_path: Path) -> None:
    train(worker)
    step(worker)
    metrics, outputs, weights = set(), set(), set()
    for i in range(10):
        output = train(worker)
        metrics.add(tuple(repeatable(output.metrics).items()))
        outputs.add(b"".join(each["logprobs"].tobytes() for each in output.loss_fn_outputs))
        step(worker, params=AdamParams(learning_rate=0.0, weight_decay=0.1))
        weights.add(saved_weights(worker, tmp_path / str(i)))
    assert len(metrics) == len(outputs) == len(weights) == 1
    step_of_any_size = AdamParams(learning_rate=1e-6)
    train(worker)
    step(worker, params=step_of_any_size)
    assert saved_weights(worker, tmp_path / "moved") not in weights


def saved_weights(worker: Worker, directory: Path) -> bytes:
    directory.mkdir()
    worker.save_run("run", str(directory), optimizer=False)
    return (directory / "adapter_model.safetensors").read_bytes()


def test_runs_on_one_base_do_not_touch_each_other(worker: Worker) -> None:
    alone = loss(worker)
    worker.create_run(RunSpec("other", LoraConfig(rank=8, seed=3, train_mlp=False)))
    train(worker, "other")
    step(worker, "other")
    assert loss(worker) == alone
    assert loss(worker, "other") < alone
    worker.drop_run("other")


def test_good_operations_of_a_pass_succeed_despite_a_bad_one(worker: Worker) -> None:
    good = ForwardBackwardRequest("run", 1, DATA, "cross_entropy", forward_only=True)
    bad = ForwardBackwardRequest("run", 2, (), "cross_entropy", forward_only=True)
    results = worker.run_pass(tuple(OperationPart(i, request) for i, request in enumerate((good, bad, good))))
    assert [type(result) for result in results] == [ForwardBackwardOutput, Failure, ForwardBackwardOutput]


def test_a_step_over_a_window_that_lost_an_operation_is_refused_and_clears_it(worker: Worker) -> None:
    train(worker)
    worker.run_pass((OperationPart(0, ForwardBackwardRequest("run", 1, (), "cross_entropy")),))
    refused = step(worker)
    assert isinstance(refused, Failure)
    assert "batch is empty" in refused.message
    train(worker)
    assert isinstance(step(worker), dict)


def test_a_step_with_a_refusal_reason_discards_the_gradients(worker: Worker) -> None:
    first = loss(worker)
    train(worker)
    (refused,) = worker.apply_steps(
        (OptimizerStep("run", AdamParams(learning_rate=1e-2), refusal_reason="a part was lost"),)
    )
    assert isinstance(refused, Failure) and "a part was lost" in refused.message
    assert loss(worker) == first
    train(worker)
    assert isinstance(step(worker), dict)


def test_gradients_can_be_discarded(worker: Worker) -> None:
    train(worker)
    worker.clear_gradients("run")
    refused = step(worker)
    assert isinstance(refused, Failure)
    assert "no gradients" in refused.message


def test_a_saved_run_resumes_as_if_uninterrupted(worker: Worker, tmp_path: Path) -> None:
    train(worker)
    step(worker)
    worker.save_run("run", str(tmp_path), optimizer=True)
    train(worker)
    step(worker)
    expected = loss(worker)
    worker.create_run(RunSpec("resumed", LORA))
    train(worker, "resumed")  # pending gradients, which loading discards
    worker.load_run("resumed", str(tmp_path), optimizer=True)
    train(worker, "resumed")
    step(worker, "resumed")
    assert loss(worker, "resumed") == expected
    worker.load_run("resumed", str(tmp_path), optimizer=False)
    train(worker, "resumed")
    step(worker, "resumed")
    assert loss(worker, "resumed") != expected
    worker.drop_run("resumed")


def sample(worker: Worker, adapter_id: str | None, temperature: float = 1.0) -> SampleResponse:
    params = SamplingParams(max_tokens=8, seed=1, temperature=temperature)
    job = SampleJob("job", adapter_id, DATA[0].tokens, params, (), ())
    result = worker.sample_slice(SamplingSlice((job,), (), 10.0))
    for _ in range(100):
        if result.finished:
            break
        result = worker.sample_slice(SamplingSlice((), (), 10.0))
    response = result.finished["job"]
    assert isinstance(response, SampleResponse), response
    return response


def test_samplers_give_the_trainers_logprobs(worker: Worker, tmp_path: Path) -> None:
    for _ in range(3):
        train(worker)
        step(worker)
    worker.copy_adapter("run", "sampler")
    (sequence,) = sample(worker, "sampler").sequences
    row = np.concatenate([DATA[0].tokens, sequence.tokens])
    datum = Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:].astype(np.int64)})
    logprobs = train(worker, data=(datum,)).loss_fn_outputs[0]["logprobs"][-len(sequence.tokens) :]
    np.testing.assert_allclose(sequence.logprobs, logprobs, atol=1e-4)
    (by_base,) = sample(worker, None).sequences
    assert not np.allclose(by_base.logprobs, logprobs, atol=1e-4)
    worker.save_run("run", str(tmp_path), optimizer=False)
    worker.load_adapter("loaded", str(tmp_path))
    assert as_drawn(sample(worker, "loaded").sequences[0]) == as_drawn(sequence)
    worker.drop_adapter("sampler")
    worker.drop_adapter("loaded")


def test_a_sampler_keeps_the_weights_it_was_given(worker: Worker) -> None:
    worker.copy_adapter("run", "sampler")
    before = sample(worker, "sampler").sequences[0].logprobs
    train(worker)
    step(worker)
    np.testing.assert_array_equal(sample(worker, "sampler").sequences[0].logprobs, before)
    worker.copy_adapter("run", "sampler")
    assert not np.array_equal(sample(worker, "sampler").sequences[0].logprobs, before)
    worker.drop_adapter("sampler")


def test_memory_is_reported_by_purpose(worker: Worker) -> None:
    before = worker.memory()
    assert before["base_weights"] == worker.info().num_parameters * 4
    train(worker)
    weights_and_accumulator = 2 * 4 * 10496
    assert worker.memory()["adapters"] == weights_and_accumulator == 2 * before["adapters"]
    assert worker.memory()["num_adapters_on_device"] == 1


def test_refusals_name_the_run_and_the_remedy(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="rank 9 exceeds max_lora_rank 8"):
        worker.create_run(RunSpec("new", LoraConfig(rank=9)))
    with pytest.raises(OperationError, match="run run exists"):
        worker.create_run(RunSpec("run", LORA))
    for verb in (
        lambda: worker.clear_gradients("gone"),
        lambda: worker.save_run("gone", str(tmp_path), optimizer=True),
        lambda: worker.load_run("gone", str(tmp_path), optimizer=True),
        lambda: worker.copy_adapter("gone", "sampler"),
    ):
        with pytest.raises(OperationError, match="run gone is not on this worker"):
            verb()
    assert isinstance(step(worker, "gone"), Failure)
    worker.drop_run("gone")
    worker.drop_adapter("gone")


def test_a_model_that_cannot_be_served_is_refused_with_the_reason(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        Worker(config(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="Unrecognized model"):
        Worker(config(tmp_path))
    (tmp_path / "config.json").write_bytes((tiny_models["llama"] / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"no \.safetensors weights"):
        Worker(config(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file: download the model again"):
        Worker(config(tmp_path))
    weights = load_file(tiny_models["llama"] / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are not in its files, such as model\.layers\.1\.mlp\.up_proj"):
        Worker(config(tmp_path))


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

UNSUPPORTED = {
    "capped logits": ({"model_type": "llama", "final_logit_softcapping": 30.0}, "models with final_logit_softcapping"),
    "recurrent layers": ({"model_type": "olmo_hybrid"}, "olmo_hybrid models are not supported: it was not verified"),
    "latent attention": ({"model_type": "deepseek_v2"}, "deepseek_v2 models are not supported: it was not verified"),
    "other logits": ({"model_type": "llama", "logits_scaling": 8.0}, "models with logits_scaling"),
    "both directions": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "models with use_bidirectional_attention",
    ),
    "quantized weights": (
        {"model_type": "llama", "quantization_config": {"quant_method": "a new one"}},
        "weights quantized by a new one are not supported, ",
    ),
    "position biases": ({"model_type": "bloom"}, "bloom models are not supported: it was not verified that sequences"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_models_with_unsupported_features_are_refused(case: str, tmp_path: Path) -> None:
    content, reason = UNSUPPORTED[case]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason):
        Worker(config(tmp_path))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe"])
def test_scaled_rotations_sliding_windows_and_biases_equal_transformers(kind: str, tmp_path: Path) -> None:
    overrides: dict[str, dict[str, Any]] = {
        "llama": {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
        "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "qwen3_moe": {"use_sliding_window": True, "sliding_window": 4},
    }
    directory = tiny_model(kind, tmp_path, **overrides[kind])
    worker = Worker(config(directory))
    worker.create_run(RunSpec("run", LORA))
    found = train(worker).loss_fn_outputs[1]["logprobs"]
    np.testing.assert_allclose(found, plain_logprobs(directory, DATA[1]), rtol=1e-5, atol=1e-5)
    changed = json.loads((directory / "config.json").read_text()) | {"rope_parameters": DEFAULT_ROPE}
    changed |= {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
    (directory / "config.json").write_text(json.dumps(changed))
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found, plain_logprobs(directory, DATA[1]), rtol=1e-5, atol=1e-5)
    greedy = sample(worker, None, temperature=0.0).sequences[0]
    whole = np.concatenate([DATA[0].tokens, greedy.tokens])
    scored = Datum(whole[:-1].astype(np.int32), {"target_tokens": whole[1:].astype(np.int64)})
    logprobs = train(worker, data=(scored,)).loss_fn_outputs[0]["logprobs"][-len(greedy.tokens) :]
    np.testing.assert_allclose(greedy.logprobs, logprobs, atol=1e-4)


def plain_logprobs(directory: Path, datum: Datum) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1).numpy()


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 1024, "factor": 4.0}
    assert Worker(config(tiny_model("qwen3", tmp_path, rope_parameters=rope))).info().max_context_length == 4096


def test_end_tokens_default_to_the_model_config(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_models["llama"], tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert Worker(config(directory)).info().eos_token_ids == (7, 9)
    (directory / "generation_config.json").write_text("{}")
    assert Worker(config(directory)).info().eos_token_ids == (2,)


def test_a_context_longer_than_the_model_is_refused_at_start(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="max_context_length 2048 exceeds the 1024 positions"):
        Worker(config(tiny_models["llama"], max_context_length=2048))


def test_a_reset_clears_everything_and_stops_writing(
    worker: Worker, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """After a reset everything repeats exactly, because the next server may use the same names and numbers."""

    def begin() -> tuple[float, Any]:
        begun = worker.run_pass(
            (OperationPart(7, ForwardBackwardRequest("run", 1, DATA, "cross_entropy"), last=False),)
        )
        assert begun == (None,)
        job = SampleJob("job", "sampler", np.arange(3, 9), SamplingParams(max_tokens=4, seed=3), (), ())
        worker.copy_adapter("run", "sampler")
        return loss(worker), worker.sample_slice(SamplingSlice((job,), (), 0.0)).num_active

    fresh = begin()
    train(worker)
    step(worker)
    worker.begin_snapshot(0, "run", str(tmp_path))
    assert loss(worker) < fresh[0]
    worker.reset()
    assert (tmp_path / "window.safetensors").exists() is False and (tmp_path / "optimizer.safetensors").exists()
    assert worker.ended_snapshots() == {}
    assert worker.memory()["adapters"] == 0 and worker.memory()["kv_cache"] == 0
    for run_id in ("run", "sampler"):
        with pytest.raises(OperationError, match=f"run {run_id} is not on this worker"):
            worker.copy_adapter(run_id, "other")
    worker.create_run(RunSpec("run", LORA))
    assert begin() == fresh
    worker.reset()
    worker.create_run(RunSpec("run", LORA))
