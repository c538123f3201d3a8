"""Tests full fine-tuning against transformers and torch.optim.AdamW: every gradient, and the weights after steps."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse, SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.checkpoint.tensor_files import SavedTensors
from trainhouse.workers.protocol.calls import (
    Failure,
    OperationPart,
    OptimizerStep,
    RunSpec,
    SampleJob,
    SamplingSlice,
)
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.state.vectors import MOMENT_VECTORS
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from ...drawn import as_drawn, assert_same_sample
from ...tiny import FAMILY_KINDS, KINDS, MORE_KINDS, PLAIN_KINDS, tiny_model
from ..adapted import relative_error
from ..jobs import answers, job
from ..model_state import pending_gradients, saved_state, weights_of
from ..requests import repeatable
from .test_critic import plain_loss, some_values, value_request

LENGTHS = (9, 30, 4, 17)
ADAM = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
# Its steps grow with gradients, so that rounding of tiny ones is not amplified.
EVEN_ADAM = ADAM.model_copy(update={"eps": 1e-3})
TOLERANCE = 2e-5


def some_data(seed: int, lengths: Sequence[int] = LENGTHS) -> tuple[Datum, ...]:
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        row = random.integers(3, 512, length + 1)
        weights = (random.uniform(size=length) * (random.uniform(size=length) > 0.3)).astype(np.float32)
        data.append(Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": weights}))
    return tuple(data)


def supervised(run_id: str, data: Sequence[Datum], forward_only: bool = False) -> ForwardBackwardRequest:
    return ForwardBackwardRequest(run_id, 1, tuple(data), "cross_entropy", forward_only=forward_only)


def run(worker: Worker, *requests: ForwardBackwardRequest) -> list[ForwardBackwardOutput]:
    """Runs all requests in one pass."""
    answers = worker.run_pass(tuple(OperationPart(number, request) for number, request in enumerate(requests)))
    assert all(isinstance(answer, ForwardBackwardOutput) for answer in answers), answers
    return list(answers)  # pyright: ignore[reportReturnType]


def stepped(worker: Worker, run_id: str, adam: AdamParams = ADAM) -> dict[str, float]:
    (metrics,) = worker.apply_steps((OptimizerStep(run_id, adam),))
    assert isinstance(metrics, dict), metrics
    return metrics


def trained(worker: Worker, run_id: str, num_steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + num_steps):
        (output,) = run(worker, supervised(run_id, some_data(step)))
        losses.append(output.metrics["loss:sum"])
        stepped(worker, run_id)
    return losses


def a_worker(directory: Path, **options: Any) -> Worker:
    return Worker(WorkerConfig(ServedModel("tiny", str(directory)), threads=1, **options))


class Reference:
    """The same model in transformers, trained by autograd."""

    def __init__(self, directory: Path, eps: float = 1e-8) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=eps, weight_decay=0.0
        )

    def loss(self, data: Sequence[Datum]) -> Tensor:
        losses = []
        for datum in data:
            logits = self.model(input_ids=torch.from_numpy(datum.tokens).long()[None]).logits[0]
            logprobs = logits.log_softmax(-1).gather(
                1, torch.from_numpy(datum.loss_fn_inputs["target_tokens"])[:, None]
            )
            losses.append(-(logprobs[:, 0] * torch.from_numpy(datum.loss_fn_inputs["weights"])).sum())
        return torch.stack(losses).sum()

    def backward(self, data: Sequence[Datum]) -> float:
        loss = self.loss(data)
        loss.backward()
        return float(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: each.grad for name, each in self.model.named_parameters() if each.grad is not None}


def views(worker: Worker, run_id: str, vector: str = "weights") -> dict[str, Tensor]:
    model = worker._models.get(run_id)
    vectors = model.vectors.in_memory()
    return {str(matrix.key): model.layout.view(vectors[vector], matrix.key) for matrix in model.layout.matrices}


ALL_KINDS = (*MORE_KINDS, *FAMILY_KINDS, *PLAIN_KINDS, "cohere_compass")
MORE = [pytest.param(kind, marks=pytest.mark.full) for kind in ALL_KINDS]


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_every_gradient_and_three_steps_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    directory = tiny_model(kind, tmp_path)
    worker, reference = a_worker(directory, micro_batch_tokens=32), Reference(directory, EVEN_ADAM.eps)
    worker.create_run(RunSpec("full", FullConfig()))
    for step in range(3):
        for batch in range(2):
            data = some_data(10 * step + batch)
            (output,) = run(worker, supervised("full", data))
            assert output.metrics["loss:sum"] == pytest.approx(reference.backward(data), rel=TOLERANCE)
        gradients, wanted = views(worker, "full", "accumulator"), reference.gradients()
        assert gradients.keys() >= wanted.keys()
        # Parameters that transformers does not train.
        assert not any(gradients.pop(name).any() for name in gradients.keys() - wanted.keys())
        scale = max(float(each.abs().max()) for each in wanted.values())
        for name, gradient in gradients.items():
            assert float((gradient - wanted[name]).abs().max()) < TOLERANCE * scale, name
        stepped(worker, "full", EVEN_ADAM)
        reference.step()
        for name, weights in views(worker, "full").items():
            wanted = reference.parameters()[name]
            # Weights without a gradient move by rounding: by up to 1e-6, where a step is of 1e-3.
            assert float((weights - wanted).abs().max()) < 1e-3 * max(float(wanted.abs().max()), 3e-3), name
            # Otherwise the next step enlarges what rounding differs by: of Qwen3-Next from 2e-6 to 2e-4.
            wanted.copy_(weights)
    # The shared base is untouched.
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, weights in worker._base.weights.own_parameters().items():
        assert torch.equal(weights, dict(loaded.named_parameters())[name].detach()), name


@pytest.mark.parametrize("kind", ["gemma4", pytest.param("qwen3", marks=pytest.mark.full)])
def test_layers_that_run_again_have_the_same_gradients(kind: str, tmp_path: Path) -> None:
    """Gemma 4 has inputs for each token, and keys and values, that also have a gradient by later layers."""
    found = []
    for way in ("keep", "recompute", "offload"):
        worker = a_worker(tiny_model(kind, tmp_path), activations=way)
        worker.create_run(RunSpec("full", FullConfig()))
        run(worker, supervised("full", some_data(0)))
        found.append(views(worker, "full", "accumulator"))
    kept, *others = found
    assert all(torch.equal(gradient, other[name]) for other in others for name, gradient in kept.items())
    run(worker, supervised("full", some_data(1)))
    assert not torch.equal(kept["model.norm.weight"], views(worker, "full", "accumulator")["model.norm.weight"])


def test_a_one_percent_error_exceeds_the_tolerance(tmp_path: Path) -> None:
    directory = tiny_model("qwen3_moe", tmp_path)
    worker, reference = a_worker(directory), Reference(directory)
    worker.create_run(RunSpec("full", FullConfig()))
    run(worker, supervised("full", some_data(0)))
    reference.backward(some_data(0))
    gradients = reference.gradients()
    scale = max(float(each.abs().max()) for each in gradients.values())
    for name, gradient in views(worker, "full", "accumulator").items():
        assert float((1.01 * gradient - gradients[name]).abs().max()) > TOLERANCE * float(gradient.abs().max()), name
        assert float(gradient.abs().max()) > 10 * TOLERANCE * scale, f"{name} has too small a gradient for this test"


@pytest.mark.parametrize("kind", (*KINDS, "mixtral", "phi3", "phimoe", "deepseek_v3", "qwen3_5", "granite4"))
def test_transformers_loads_a_saved_model(kind: str, tmp_path: Path) -> None:
    directory = tiny_model(kind, tmp_path / "base")
    worker = a_worker(directory)
    worker.create_run(RunSpec("full", FullConfig()))
    trained(worker, "full", 2)
    saved = tmp_path / "saved"
    saved.mkdir()
    worker.save_run("full", str(saved), optimizer=True)
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert loaded.dtype == torch.float32
    for name, weights in views(worker, "full").items():
        assert torch.equal(weights, dict(loaded.named_parameters())[name].detach()), name
    # Tensors have the names of the published model files.
    loaded.save_pretrained(tmp_path / "theirs")
    names = [{*load_file(each / "model.safetensors")} for each in (saved, tmp_path / "theirs", directory)]
    assert names[0] == names[1] == names[2]


def test_a_saved_run_resumes_as_if_uninterrupted(tmp_path: Path) -> None:
    worker = a_worker(tiny_model("qwen3_tied", tmp_path / "base"))
    worker.create_run(RunSpec("full", FullConfig()))
    trained(worker, "full", 2)
    run(worker, supervised("full", some_data(50)))
    for name in ("saved", "snapshot"):
        (tmp_path / name).mkdir()
    worker.save_run("full", str(tmp_path / "saved"), optimizer=True)
    worker.begin_snapshot(3, "full", str(tmp_path / "snapshot"))
    while not (ended := worker.ended_snapshots()):
        pass
    assert ended == {3: None}
    losses = []
    for directory, optimizer in ((None, True), ("snapshot", True), ("saved", True), ("saved", False)):
        if directory is not None:
            worker.drop_run("full")
            worker.create_run(RunSpec("full", FullConfig()))
            worker.load_run("full", str(tmp_path / directory), optimizer)
        if directory == "saved":
            run(worker, supervised("full", some_data(50)))
        stepped(worker, "full")
        losses.append(trained(worker, "full", 2, first=9))
    assert losses[0] == losses[1] == losses[2] and losses[0] != losses[3], (
        "loading without the optimizer must make a difference"
    )


def test_full_models_and_adapters_in_one_pass_equal_each_alone(tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path)
    together, alone, without_full = a_worker(directory), a_worker(directory), a_worker(directory)
    specs = [RunSpec("full", FullConfig()), RunSpec("other", FullConfig()), RunSpec("lora", LoraConfig(rank=4, seed=1))]
    for worker in (together, alone):
        for spec in specs:
            worker.create_run(spec)
    without_full.create_run(specs[2])
    for step in range(2):
        requests = [supervised(spec.run_id, some_data(10 * step + number)) for number, spec in enumerate(specs)]
        requests.append(supervised("full", some_data(99), forward_only=True))
        requests.append(supervised("full", some_data(98), forward_only=True))
        ours, theirs = run(together, *requests), [run(alone, request)[0] for request in requests]
        for one, other in zip(ours, theirs, strict=True):
            assert one.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=TOLERANCE)
        run(without_full, requests[2])
        for spec in specs:
            assert stepped(together, spec.run_id)["unclipped_grad_l2:mean"] == pytest.approx(
                stepped(alone, spec.run_id)["unclipped_grad_l2:mean"], rel=TOLERANCE
            )
        stepped(without_full, "lora")
    outputs = run(together, *(supervised(spec.run_id, some_data(7)) for spec in specs))
    losses = [output.metrics["loss:sum"] for output in outputs]
    assert len(set(losses)) == 3
    (by_base,) = run(without_full, supervised("lora", some_data(7)))
    assert losses[2] == pytest.approx(by_base.metrics["loss:sum"], rel=TOLERANCE)


def test_a_failed_operation_leaves_no_gradients(tmp_path: Path) -> None:
    worker = a_worker(tiny_model("qwen3", tmp_path))
    worker.create_run(RunSpec("full", FullConfig()))
    run(worker, supervised("full", some_data(1)))
    before = pending_gradients(worker, "full")
    bad = some_data(2)
    bad[1].loss_fn_inputs["weights"][3] = 3e38
    (answer,) = worker.run_pass((OperationPart(7, supervised("full", bad)),))
    assert isinstance(answer, Failure) and "not finite" in answer.message, answer
    assert torch.equal(pending_gradients(worker, "full"), before)
    # The base takes no gradients.
    assert not any(each.requires_grad or each.grad is not None for each in worker._base.model.parameters())


def test_more_full_models_than_allowed_are_refused(tmp_path: Path) -> None:
    worker = a_worker(tiny_model("qwen3", tmp_path), max_full_models=2)
    worker.create_run(RunSpec("one", FullConfig()))
    worker.copy_adapter("one", "sampler")
    worker.copy_adapter("one", "sampler")
    with pytest.raises(OperationError, match=r"there are 2 models .* with a higher --max-full-models"):
        worker.copy_adapter("one", "other")
    # The worker does not limit runs, so that a run can always be recreated.
    worker.create_run(RunSpec("two", FullConfig()))
    worker.drop_adapter("sampler")
    with pytest.raises(OperationError, match=r"there are 2 models .* with a higher --max-full-models"):
        worker.copy_adapter("one", "other")
    worker.drop_run("two")
    worker.copy_adapter("one", "other")


def sampled(worker: Worker, *adapter_ids: str | None) -> list[SampleResponse]:
    params = SamplingParams(max_tokens=12, temperature=0.0, seed=1)
    prompt = np.arange(3, 9, dtype=np.int32)
    joining = tuple(
        SampleJob(f"job-{number}", adapter_id, prompt, params, (), ()) for number, adapter_id in enumerate(adapter_ids)
    )
    finished: dict[str, SampleResponse] = {}
    for number in range(200):
        result = worker.sample_slice(SamplingSlice(joining if number == 0 else (), (), 5.0))
        finished |= result.finished
        if len(finished) == len(joining):
            break
    assert all(isinstance(answer, SampleResponse) for answer in finished.values()), finished
    return [finished[f"job-{number}"] for number in range(len(joining))]


def test_samples_use_the_requested_weights(tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    worker = a_worker(directory)
    worker.create_run(RunSpec("full", FullConfig()))
    worker.copy_adapter("full", "fresh")
    trained(worker, "full", 3)
    worker.copy_adapter("full", "trained")
    worker.create_run(RunSpec("lora", LoraConfig(rank=4, seed=1)))
    worker.copy_adapter("lora", "adapter")
    ids = (None, "fresh", "trained", "adapter", "trained")
    together, alone = sampled(worker, *ids), [sampled(worker, each)[0] for each in ids]
    for one, other in zip(together, alone, strict=True):
        assert_same_sample(one.sequences[0], other.sequences[0])
    base, fresh, own, adapter, again = (each.sequences[0].tokens.tolist() for each in together)
    assert base == fresh == adapter and own == again and own != base
    saved = tmp_path / "saved"
    saved.mkdir()
    worker.save_run("full", str(saved), optimizer=False)
    model: Any = AutoModelForCausalLM.from_pretrained(saved)
    prompt = torch.arange(3, 9)[None]
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 6:]
    assert own == wanted.tolist()
    worker.load_adapter("loaded", str(saved))
    assert sampled(worker, "loaded")[0].sequences[0].tokens.tolist() == own


@pytest.mark.slow
@pytest.mark.usefixtures("either_way")
def test_models_that_sample_in_turn_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The models share the cache: when a sample of one ends or grows, another model's sample may move there."""
    worker = a_worker(tiny_model("qwen3", tmp_path))
    worker.create_run(RunSpec("full", FullConfig()))
    for step in range(2):
        trained(worker, "full", 1, first=step)
        worker.copy_adapter("full", f"step-{step}")
    prompt, random = np.arange(3, 9, dtype=np.int32), np.random.default_rng(0)

    def job(name: str, adapter_id: str | None, max_tokens: int) -> SampleJob:
        return SampleJob(name, adapter_id, prompt, SamplingParams(max_tokens=max_tokens, seed=1), (), ())

    models, alone = (None, "step-0", "step-1"), {}
    for each in models:
        result = worker.sample_slice(SamplingSlice((job("alone", each, 300),), (), 1e6))
        alone[each] = result.finished["alone"].sequences[0].tokens
    assert len({tokens.tobytes() for tokens in alone.values()}) == 3
    jobs = [job(f"job-{n}", models[n % 3], int(random.integers(5, 300))) for n in range(30)]
    waiting, finished = list(jobs), {}
    while len(finished) < len(jobs):
        joining = tuple(waiting.pop() for _ in range(min(int(random.integers(0, 3)), len(waiting))))
        finished |= worker.sample_slice(SamplingSlice(joining, (), 3.0)).finished
    for each in jobs:
        found = finished[each.job_id].sequences[0].tokens
        np.testing.assert_array_equal(found, alone[each.adapter_id][: len(found)], each.job_id)


def test_a_full_critic_has_neither_the_output_head_nor_its_bias(tmp_path: Path) -> None:
    worker = a_worker(tiny_model("phimoe", tmp_path))
    worker.create_run(RunSpec("critic", FullConfig(seed=3), "critic"))
    worker.create_run(RunSpec("policy", FullConfig(seed=3)))
    run(worker, value_request("critic", some_values(0)), supervised("policy", some_data(0)))
    of_critic, of_policy = (views(worker, each, "accumulator") for each in ("critic", "policy"))
    assert of_policy.keys() - of_critic.keys() == {"lm_head.weight", "lm_head.bias"}
    assert of_critic.keys() - of_policy.keys() == {"score.weight", "score.bias"}
    assert all(bool(of_policy[name].any()) for name in ("lm_head.weight", "lm_head.bias"))
    stepped(worker, "critic")


def test_a_full_critic_equals_transformers_token_classifier(tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    worker, data = a_worker(directory), some_values(1)
    worker.create_run(RunSpec("critic", FullConfig(seed=3), "critic"))
    saved = tmp_path / "saved"
    saved.mkdir()
    worker.save_run("critic", str(saved), optimizer=False)
    model: Any = AutoModelForTokenClassification.from_pretrained(saved).eval()
    (output,) = run(worker, value_request("critic", data))
    values = [model(input_ids=torch.from_numpy(datum.tokens)[None].long()).logits[0, :, 0] for datum in data]
    for found, wanted in zip(output.loss_fn_outputs, values, strict=True):
        np.testing.assert_allclose(found["values"], wanted.detach().numpy(), rtol=TOLERANCE, atol=TOLERANCE)
    torch.stack([plain_loss(datum, each) for datum, each in zip(data, values, strict=True)]).sum().backward()
    gradients = views(worker, "critic", "accumulator")
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in gradients.items():
        assert relative_error(gradient, model.get_parameter(name).grad) < TOLERANCE, name
        assert relative_error(1.01 * gradient, model.get_parameter(name).grad) > TOLERANCE, name
    stepped(worker, "critic")
    with pytest.raises(OperationError, match="cannot be sampled"):
        worker.copy_adapter("critic", "sampler")


def test_a_reference_loads_a_full_policys_checkpoint(tmp_path: Path) -> None:
    worker = a_worker(tiny_model("qwen3", tmp_path / "base"))
    worker.create_run(RunSpec("policy", FullConfig()))
    worker.create_run(RunSpec("reference", LoraConfig(rank=1, seed=0, train_mlp=False), "reference"))
    trained(worker, "policy", 2)
    saved = tmp_path / "saved"
    saved.mkdir()
    worker.save_run("policy", str(saved), optimizer=False)
    before, policy = (run(worker, supervised(run_id, some_data(1), True))[0] for run_id in ("reference", "policy"))
    worker.load_run("reference", str(saved), False)
    (after,) = run(worker, supervised("reference", some_data(1), True))
    assert after.metrics["loss:sum"] == pytest.approx(policy.metrics["loss:sum"], rel=1e-6)
    assert before.metrics["loss:sum"] != pytest.approx(policy.metrics["loss:sum"], rel=1e-3)
    (refused,) = worker.run_pass((OperationPart(9, supervised("reference", some_data(1))),))
    assert isinstance(refused, Failure) and "not trained" in refused.message
    trained(worker, "policy", 1)
    (again,) = run(worker, supervised("reference", some_data(1), True))
    assert repeatable(again.metrics) == repeatable(after.metrics)


WRONG_CHECKPOINTS: dict[str, tuple[RunSpec, str]] = {
    "an adapter into a full model": (RunSpec("other", LoraConfig(rank=4, seed=1)), "create a model with LoRA"),
    "a critic into a policy": (RunSpec("other", FullConfig(), "critic"), "load it into a critic"),
}


@pytest.mark.parametrize("case", WRONG_CHECKPOINTS)
def test_a_checkpoint_of_another_kind_is_refused(case: str, tmp_path: Path) -> None:
    spec, message = WRONG_CHECKPOINTS[case]
    worker = a_worker(tiny_model("qwen3", tmp_path / "base"))
    worker.create_run(RunSpec("full", FullConfig()))
    worker.create_run(spec)
    for run_id in ("other", "full"):
        (tmp_path / run_id).mkdir()
        worker.save_run(run_id, str(tmp_path / run_id), optimizer=True)
    before = weights_of(worker, "full")
    with pytest.raises(OperationError, match=message):
        worker.load_run("full", str(tmp_path / "other"), True)
    with pytest.raises(OperationError, match=r"create a model with training full|load it into a policy"):
        worker.load_run("other", str(tmp_path / "full"), True)
    (tmp_path / "full" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(OperationError, match="is damaged"):
        worker.load_run("full", str(tmp_path / "full"), True)
    (tmp_path / "full" / "model.safetensors").unlink()
    with pytest.raises(OperationError, match=r"is incomplete: it has no model\.safetensors"):
        worker.load_run("full", str(tmp_path / "full"), True)
    assert torch.equal(weights_of(worker, "full"), before)


def test_inflight_samplers_use_the_newest_weights(tmp_path: Path) -> None:
    worker = a_worker(tiny_model("qwen3", tmp_path), max_full_models=1, full_sampling="inflight")
    worker.create_run(RunSpec("full", FullConfig()))
    worker.copy_adapter("full", "one")
    before = sampled(worker, "one")[0].sequences[0]
    trained(worker, "full", 3)
    worker.copy_adapter("full", "other")
    (one, other), (base,) = sampled(worker, "one", "other"), sampled(worker, None)
    assert as_drawn(one.sequences[0]) == as_drawn(other.sequences[0]) != before.tokens.tolist()
    assert as_drawn(before) == as_drawn(base.sequences[0])
    worker.drop_run("full")
    worker.drop_adapter("one")
    assert as_drawn(sampled(worker, "other")[0].sequences[0]) == as_drawn(other.sequences[0])
    worker.drop_adapter("other")
    assert worker.memory()["full_models"] == 0


def test_models_paged_to_disk_continue_bit_equal(tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    paged = a_worker(directory, full_slots=1, host_adapter_bytes=1, page_directory=str(tmp_path / "pages"))
    unpaged = a_worker(directory, full_slots=9)
    ids = ("one", "two", "three")
    for worker in (paged, unpaged):
        for number, run_id in enumerate(ids):
            worker.create_run(RunSpec(run_id, FullConfig()))
            trained(worker, run_id, 1, first=number)
        requests = [supervised(run_id, some_data(7 + number)) for number, run_id in enumerate(ids)]
        run(worker, *requests)
        answers = worker.apply_steps(tuple(OptimizerStep(run_id, ADAM) for run_id in ids))
        assert all(isinstance(answer, dict) for answer in answers), answers
        worker.copy_adapter("one", "sampler")
    memory = paged.memory()
    places = [memory[f"num_full_models_on_{place}"] for place in ("device", "host", "disk")]
    assert places == [1, 0, 3] and memory["full_models_on_disk"] > 0
    assert unpaged.memory()["num_full_models_on_device"] == 4
    for run_id in (*ids, "sampler"):
        assert torch.equal(weights_of(paged, run_id), weights_of(unpaged, run_id))
    for one, other in zip(*(sampled(worker, "sampler", "sampler") for worker in (paged, unpaged)), strict=True):
        assert_same_sample(one.sequences[0], other.sequences[0])


def vectors_on_device(worker: Worker) -> float:
    """Returns the full models' memory on the device, in vectors of all parameters."""
    memory = worker.memory()
    size = 4 * worker._models.get("one").layout.size
    assert (memory["full_models_on_device"] + memory["full_models_on_host"]) % size == 0
    return memory["full_models_on_device"] / size


def test_each_verb_reloads_only_what_it_needs(tmp_path: Path) -> None:
    """Counts vectors on the device after each verb of one model; between verbs, another model uses the device."""
    directory = tiny_model("qwen3", tmp_path / "base")
    worker, undisturbed = a_worker(directory, full_slots=1), a_worker(directory)
    saved = [tmp_path / name for name in ("state", "weights")]
    for path in saved:
        path.mkdir()
    for each in (worker, undisturbed):
        each.create_run(RunSpec("one", FullConfig()))
        each.create_run(RunSpec("other", FullConfig()))

    def backward(each: Worker, seed: int) -> None:
        run(each, supervised("one", some_data(seed)))

    weights, gradients, moments = 1, 1, 2
    table: list[tuple[str, Callable[[Worker], object], int]] = [
        ("forward", lambda each: run(each, supervised("one", some_data(1), True)), weights),
        ("forward_backward", lambda each: backward(each, 1), weights + gradients),
        ("optim_step", lambda each: stepped(each, "one"), weights + gradients + moments),
        ("sample", lambda each: sampled(each, "one"), weights),
        ("forward_backward", lambda each: backward(each, 2), weights + gradients),
        ("forward with gradients", lambda each: run(each, supervised("one", some_data(1), True)), weights),
        ("export", lambda each: each.export_adapter("one"), weights),
        ("a second forward_backward", lambda each: backward(each, 3), weights + 2 * gradients),
        ("optim_step", lambda each: stepped(each, "one"), weights + gradients + moments),
        ("save weights", lambda each: each.save_run("one", str(saved[1]), optimizer=False), weights),
        ("save state", lambda each: each.save_run("one", str(saved[0]), optimizer=True), weights + moments),
    ]
    for verb, act, num_vectors in table:
        run(worker, supervised("other", some_data(9), True))
        assert vectors_on_device(worker) == weights, "only the other model's weights"
        act(worker)
        assert vectors_on_device(worker) == num_vectors, verb
    # Sampling right after a step leaves the optimizer on the device, because no other model needs the room.
    second_step = [backward, lambda each, _: stepped(each, "one"), lambda each, _: sampled(each, "one")]
    for act in second_step:
        act(worker, 4)
    assert vectors_on_device(worker) == weights + gradients + moments
    for _, act, _ in table[:9]:
        act(undisturbed)
    backward(undisturbed, 4), stepped(undisturbed, "one")
    assert_same_state(saved_state(worker, "one"), saved_state(undisturbed, "one"))


def assert_same_state(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and any("exp_avg_sq" in name for name in wanted)
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_ten_switches_take_no_more_memory_than_one(tmp_path: Path) -> None:
    worker = a_worker(tiny_model("qwen3", tmp_path / "base"), full_slots=1, host_adapter_bytes=1)
    for run_id in ("one", "other"):
        worker.create_run(RunSpec(run_id, FullConfig()))
    found = []
    for step in range(10):
        for run_id in ("one", "other"):
            trained(worker, run_id, 1, first=step)
        found.append({name: value for name, value in worker.memory().items() if "moved" not in name})
    assert all(each == found[1] for each in found[1:])
    memory = worker.memory()
    assert memory["full_models_moved_bytes"] > 0 and memory["full_models_moved_milliseconds"] > 0


def test_a_move_that_fails_half_way_leaves_the_model_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = a_worker(tiny_model("qwen3", tmp_path / "base"), full_slots=1, host_adapter_bytes=1)
    for run_id in ("one", "other"):
        worker.create_run(RunSpec(run_id, FullConfig()))
        trained(worker, run_id, 1)
    wanted = saved_state(worker, "one")
    run(worker, supervised("other", some_data(3), True))
    read, calls = os.preadv, []

    def broken(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("input/output error")
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        (answer,) = worker.run_pass((OperationPart(0, supervised("one", some_data(3))),))
    assert isinstance(answer, Failure) and "input/output error" in answer.message and len(calls) == 2
    assert_same_state(saved_state(worker, "one"), wanted)
    worker.clear_gradients("one")
    assert trained(worker, "one", 1, first=4)


def test_8bit_optimizer_states_train_nearly_like_float32(tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    ours, theirs = a_worker(directory, optimizer_states="8bit"), a_worker(directory)
    for worker in (ours, theirs):
        worker.create_run(RunSpec("full", FullConfig()))
    at_first = weights_of(ours, "full")
    losses = [trained(worker, "full", 8) for worker in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] != losses[1]
    one, other = (worker._models.get("full") for worker in (ours, theirs))
    moved = [model.weights - at_first for model in (one, other)]
    assert 0 < relative_error(moved[0], moved[1]) < 0.1
    assert relative_error(moved[0] * 1.2, moved[1]) > 0.1
    for name in MOMENT_VECTORS:
        assert 0 < relative_error(one.in_float32(name), other.in_float32(name)) < 0.05, name
    size = one.layout.size
    assert one.exp_avg.nbytes == one.exp_avg_sq.nbytes == size + 4 * -(-size // 256)
    # Weights, gradients and two 8-bit moments.
    assert ours.memory()["full_models"] == 4 * 2 * size + 2 * one.exp_avg.nbytes


def test_8bit_optimizer_states_survive_saving_paging_and_snapshots(tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    options = {"optimizer_states": "8bit", "full_slots": 1, "host_adapter_bytes": 1}
    worker = a_worker(directory, **options)
    for run_id in ("full", "other"):
        worker.create_run(RunSpec(run_id, FullConfig()))
        trained(worker, run_id, 2)
    for name in ("saved", "snapshot"):
        (tmp_path / name).mkdir()
    worker.save_run("full", str(tmp_path / "saved"), optimizer=True)
    worker.begin_snapshot(1, "full", str(tmp_path / "snapshot"))
    while not worker.ended_snapshots():
        pass
    run(worker, supervised("other", some_data(1), True))
    losses = [trained(worker, "full", 3, first=5)]
    for name in ("saved", "snapshot"):
        worker.load_run("full", str(tmp_path / name), True)
        losses.append(trained(worker, "full", 3, first=5))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) == losses[2]
    # Files hold the moments in float32, so that a server without 8-bit states can load them.
    plain = a_worker(directory)
    plain.create_run(RunSpec("full", FullConfig()))
    plain.load_run("full", str(tmp_path / "saved"), True)
    assert trained(plain, "full", 3, first=5) == pytest.approx(losses[0], rel=1e-3)


def test_samplers_of_more_models_than_slots_take_turns(tmp_path: Path) -> None:
    directory = tiny_model("qwen3", tmp_path / "base")
    worker = a_worker(directory, full_slots=1)
    worker.create_run(RunSpec("full", FullConfig()))
    ids = [f"sampler-{number}" for number in range(4)]
    for number, adapter_id in enumerate(ids):
        trained(worker, "full", 1, first=number)
        worker.copy_adapter("full", adapter_id)
    alone = [sampled(worker, each)[0].sequences[0].tokens.tolist() for each in (*ids, None)]
    together = [each.sequences[0].tokens.tolist() for each in sampled(worker, *ids, None)]
    assert together == alone and len({tuple(tokens) for tokens in alone}) > 2
    # A job cancelled before its turn gets no answer, and one whose weights are gone fails with the reason.
    params = SamplingParams(max_tokens=4, temperature=0.0, seed=1)
    jobs = [SampleJob(each, each, np.arange(3, 9, dtype=np.int32), params, (), ()) for each in ids]
    result = worker.sample_slice(SamplingSlice(tuple(jobs), (), 0.0))
    assert result.num_active == 4 - len(result.finished)
    worker.drop_adapter(ids[3])
    worker.drop_run("full")
    finished = dict(result.finished)
    for number in range(40):
        result = worker.sample_slice(SamplingSlice((), (ids[2],) if number == 0 else (), 0.0))
        finished |= result.finished
    assert finished.keys() == {ids[0], ids[1], ids[3]} and result.num_active == 0
    gone = finished[ids[3]]
    assert isinstance(gone, Failure) and "is gone" in gone.message


def test_an_ended_sample_does_not_disturb_samples_of_other_weights(tmp_path: Path) -> None:
    """When a sample ends, the last slot of the cache moves into the hole, and the next request gets the freed slot."""
    worker = a_worker(tiny_model("qwen3", tmp_path / "base"))
    worker.create_run(RunSpec("full", FullConfig(seed=1)))
    trained(worker, "full", 1)

    def request(name: str, adapter_id: str | None, length: int) -> SampleJob:
        return job(name, [*range(3, 12)], adapter_id, max_tokens=length, temperature=0.0)

    expected = answers(worker.sample_slice, request("moved", "full", 40))["moved"]
    short, moved, later = request("short", None, 4), request("moved", "full", 40), request("later", None, 30)
    found = worker.sample_slice(SamplingSlice((short, moved), (), 0.0)).finished
    while "short" not in found:
        found = worker.sample_slice(SamplingSlice((), (), 0.0)).finished
    found = answers(worker.sample_slice, later, budget_milliseconds=0.0)
    assert found.keys() == {"moved", "later"}
    for each, wanted in zip(found["moved"].sequences, expected.sequences, strict=True):
        assert_same_sample(each, wanted)


def test_overwriting_a_sampler_does_not_change_the_runs_weights(tmp_path: Path) -> None:
    worker = a_worker(tiny_model("qwen3", tmp_path / "base"), full_sampling="inflight")
    worker.create_run(RunSpec("full", FullConfig()))
    (tmp_path / "early").mkdir()
    worker.save_run("full", str(tmp_path / "early"), optimizer=False)
    worker.copy_adapter("full", "sampler")
    exported = worker.export_adapter("full")
    exported = replace(exported, weights=exported.weights.copy())
    trained(worker, "full", 2)
    before = weights_of(worker, "full")
    worker.load_adapter("sampler", str(tmp_path / "early"))
    assert torch.equal(weights_of(worker, "sampler"), before), "they share the weights"
    worker.import_adapter("sampler", exported)
    assert torch.equal(weights_of(worker, "full"), before)
    assert not torch.equal(weights_of(worker, "sampler"), before)


def test_a_partly_loaded_checkpoint_refuses_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = a_worker(tiny_model("qwen3", tmp_path / "base"))
    worker.create_run(RunSpec("full", FullConfig()))
    trained(worker, "full", 1)
    (tmp_path / "saved").mkdir()
    worker.save_run("full", str(tmp_path / "saved"), optimizer=True)
    read = SavedTensors.__getitem__

    def broken(tensors: SavedTensors, name: str) -> Tensor:
        if name.startswith("exp_avg_sq."):
            raise OperationError("input/output error", "server")
        return read(tensors, name)

    with monkeypatch.context() as patch:
        patch.setattr(SavedTensors, "__getitem__", broken)
        with pytest.raises(OperationError, match="input/output error"):
            worker.load_run("full", str(tmp_path / "saved"), True)
    run(worker, supervised("full", some_data(1)))
    (refused,) = worker.apply_steps((OptimizerStep("full", ADAM),))
    assert isinstance(refused, Failure) and "load it again" in refused.message
    worker.load_run("full", str(tmp_path / "saved"), True)
    assert trained(worker, "full", 1, first=1)


def test_the_corrections_of_a_router_are_saved_with_the_weights(tmp_path: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(tiny_model("deepseek_v3", tmp_path / "tiny"))
    (name,) = (name for name, _ in source.named_buffers() if "correction_bias" in name)
    source.get_buffer(name).copy_(torch.tensor([0.5, -0.5, 0.25, 0.0]))
    source.save_pretrained(tmp_path / "base")
    worker = a_worker(tmp_path / "base")
    worker.create_run(RunSpec("full", FullConfig()))
    trained(worker, "full", 2)
    saved = tmp_path / "saved"
    saved.mkdir()
    worker.save_run("full", str(saved), optimizer=True)
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(loaded.get_buffer(name), source.get_buffer(name))
    before = trained(worker, "full", 1, first=2)
    worker.load_run("full", str(saved), True)
    assert trained(worker, "full", 1, first=2) == before
