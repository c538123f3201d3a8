"""Tests critics against transformers' model with a linear head on its last hidden states, by autograd."""

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig, Role
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.checkpoint import TrainedState, save
from trainhouse.workers.lora import Adapter
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.calls import Failure, OperationPart, RunSpec
from trainhouse.workers.protocol.plugins import plugin_rows
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.registry.programs import PROGRAMS
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForTokenClassification

from ..adapted import peft_parameters, quieten_peft
from ..model_state import add_noise, pending_gradients
from ..requests import repeatable

LENGTHS = (9, 30, 4, 17)
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def directory(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Path:
    return tiny_models[request.param]


@pytest.fixture
def worker(directory: Path) -> Worker:
    worker = Worker(WorkerConfig(ServedModel("tiny", str(directory)), threads=1))
    for number, (run_id, role) in enumerate((("critic", "critic"), ("other", "critic"), ("policy", "policy"))):
        worker.create_run(RunSpec(run_id, LoraConfig(rank=4, seed=number), role))
        add_noise(worker, run_id, 0.05, number)
    return worker


def some_values(seed: int, lengths: Sequence[int] = LENGTHS, **left_out: None) -> tuple[Datum, ...]:
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        inputs = {
            "returns": random.normal(size=length).astype(np.float32),
            "old_values": random.normal(size=length).astype(np.float32),
            "weights": (random.uniform(size=length) * (random.uniform(size=length) > 0.3)).astype(np.float32),
        }
        given = {name: values for name, values in inputs.items() if name not in left_out}
        data.append(Datum(random.integers(3, 512, length).astype(np.int32), given))
    return tuple(data)


def some_policy_data(seed: int) -> tuple[Datum, ...]:
    random = np.random.default_rng(seed)
    rows = [random.integers(3, 512, length + 1) for length in LENGTHS]
    return tuple(Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:]}) for row in rows)


def value_request(run_id: str, data: Sequence[Datum], forward_only: bool = False) -> ForwardBackwardRequest:
    return ForwardBackwardRequest(run_id, 1, tuple(data), "value_mse", forward_only=forward_only)


def run(worker: Worker, *requests: ForwardBackwardRequest) -> list[ForwardBackwardOutput]:
    """Runs all requests in one pass."""
    answers = worker.run_pass(tuple(OperationPart(number, request) for number, request in enumerate(requests)))
    assert all(isinstance(answer, ForwardBackwardOutput) for answer in answers), answers
    return list(answers)  # pyright: ignore[reportReturnType]


def load_in_peft(directory: Path, adapter: Adapter, scratch: Path) -> PeftModel:
    """Saves the critic and loads it with PEFT."""
    save(TrainedState.without_gradients(adapter, Mesh(), optimizer=False), scratch, base_name="tiny")
    with warnings.catch_warnings():
        quieten_peft()
        base = AutoModelForTokenClassification.from_pretrained(directory, num_labels=1)
        return PeftModel.from_pretrained(base, scratch, is_trainable=True).eval()


def plain_loss(datum: Datum, values: Tensor) -> Tensor:
    given = {name: torch.from_numpy(array) for name, array in datum.loss_fn_inputs.items()}
    near = given["old_values"] + (values - given["old_values"]).clamp(-0.2, 0.2)
    errors = torch.stack([(values - given["returns"]) ** 2, (near - given["returns"]) ** 2])
    return 0.5 * (given["weights"] * errors.amax(0)).sum()


def close(found: np.ndarray | Tensor, expected: Tensor) -> bool:
    found = torch.as_tensor(found)
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1.0))


def test_values_and_gradients_equal_those_of_transformers(worker: Worker, directory: Path, tmp_path: Path) -> None:
    adapter, data = worker._models.get("critic"), some_values(1)
    (output,) = run(worker, value_request("critic", data))
    model = load_in_peft(directory, adapter, tmp_path)
    values = [model(input_ids=torch.from_numpy(datum.tokens)[None].long()).logits[0, :, 0] for datum in data]
    loss = torch.stack([plain_loss(datum, each) for datum, each in zip(data, values, strict=True)]).sum()
    loss.backward()
    for found, expected in zip(output.loss_fn_outputs, values, strict=True):
        assert found.keys() == {"values"} and close(found["values"], expected.detach())
        assert not close(found["values"], 1.001 * expected.detach() + 0.001)
    assert output.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    gradients = adapter.layout.named_views(adapter.gradients.accumulator)
    theirs = {name.replace(".modules_to_save", ""): each for name, each in peft_parameters(model).items()}
    assert gradients.keys() == theirs.keys() and {"base_model.model.score.weight"} <= gradients.keys()
    for name, parameter in theirs.items():
        assert parameter.grad is not None
        assert close(gradients[name], parameter.grad), name
        assert not close(gradients[name], 1.01 * parameter.grad + 1e-4), name


def test_critics_and_a_policy_in_one_pass_equal_each_alone(worker: Worker) -> None:
    requests = (
        value_request("critic", some_values(2)),
        ForwardBackwardRequest("policy", 1, some_policy_data(3), "cross_entropy"),
        value_request("other", some_values(4, (6, 22))),
    )
    together = run(worker, *requests)
    gradients = {each.model_id: pending_gradients(worker, each.model_id) for each in requests}
    for request, found in zip(requests, together, strict=True):
        worker.clear_gradients(request.model_id)
        (alone,) = run(worker, request)
        assert repeatable(found.metrics) == pytest.approx(repeatable(alone.metrics), rel=TOLERANCE)
        for one, other in zip(found.loss_fn_outputs, alone.loss_fn_outputs, strict=True):
            assert one.keys() == other.keys()
            assert all(close(one[name], torch.from_numpy(other[name])) for name in one)
        own = pending_gradients(worker, request.model_id)
        assert close(gradients[request.model_id], own) and not close(1.01 * gradients[request.model_id] + 1e-4, own)


def test_without_old_values_nothing_is_clipped(worker: Worker) -> None:
    whole = some_values(5)
    (output,) = run(worker, value_request("critic", some_values(5, old_values=None)))
    values = [torch.from_numpy(each["values"]) for each in output.loss_fn_outputs]
    expected = sum(
        float(
            (
                torch.from_numpy(datum.loss_fn_inputs["weights"])
                * (each - torch.from_numpy(datum.loss_fn_inputs["returns"])) ** 2
            ).sum()
        )
        / 2
        for datum, each in zip(whole, values, strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=TOLERANCE)
    assert output.metrics["clip_fraction:mean"] == 0
    (clipped,) = run(worker, value_request("critic", whole))
    assert clipped.metrics["clip_fraction:mean"] > 0 and clipped.metrics["loss:sum"] > output.metrics["loss:sum"]


def test_values_near_the_old_ones_are_not_clipped_by_an_ulp(worker: Worker) -> None:
    data = some_values(7)
    (output,) = run(worker, value_request("critic", data, forward_only=True))
    near = [
        replace(datum, loss_fn_inputs=datum.loss_fn_inputs | {"old_values": each["values"] + shift})
        for datum, each in zip(data, output.loss_fn_outputs, strict=True)
        for shift in np.linspace(-0.15, 0.15, 9, dtype=np.float32)
    ]
    (output,) = run(worker, value_request("critic", near, forward_only=True))
    assert output.metrics["clip_fraction:mean"] == 0
    (output,) = run(worker, replace(value_request("critic", near, forward_only=True), loss_fn_config={"clip": 0.05}))
    assert output.metrics["clip_fraction:mean"] > 0


def test_a_snapshot_keeps_a_critics_pending_gradients(worker: Worker, tmp_path: Path) -> None:
    run(worker, value_request("critic", some_values(8)))
    waiting = pending_gradients(worker, "critic")
    assert waiting.any()
    worker.begin_snapshot(1, "critic", str(tmp_path))
    deadline = time.monotonic() + 30
    while not (ended := worker.ended_snapshots()):
        assert time.monotonic() < deadline
    assert ended == {1: None}
    run(worker, value_request("critic", some_values(9)))
    worker.load_run("critic", str(tmp_path), True)
    assert torch.equal(pending_gradients(worker, "critic"), waiting)


def test_a_checkpoint_without_a_role_is_a_policy(worker: Worker, tmp_path: Path) -> None:
    worker.save_run("policy", str(tmp_path), True)
    file = tmp_path / "trainhouse.json"
    described = json.loads(file.read_text())
    assert described.pop("role") == "policy"
    file.write_text(json.dumps(described))
    worker.load_run("policy", str(tmp_path), True)
    with pytest.raises(OperationError, match="was saved by a policy, and the model is a critic"):
        worker.load_run("critic", str(tmp_path), True)
    file.write_text(json.dumps(described | {"role": "judge"}))
    with pytest.raises(OperationError, match="was saved by a judge, a role that this version of trainhouse"):
        worker.load_run("policy", str(tmp_path), True)


def test_critics_and_references_cannot_be_sampled(worker: Worker) -> None:
    worker.create_run(RunSpec("reference", LoraConfig(rank=4, seed=0), "reference"))
    for run_id in ("critic", "reference"):
        for verb in (worker.export_adapter, partial(worker.copy_adapter, adapter_id="s")):
            with pytest.raises(OperationError, match=f"a {run_id} cannot be sampled"):
                verb(run_id)
    worker.copy_adapter("policy", "s")


def test_every_role_has_a_program_and_every_loss_its_scores() -> None:
    programs = {**PROGRAMS, **plugin_rows("workers.drafts.rows", "PROGRAMS")}
    assert {*get_args(Role)} == {"draft", *(program.role for program in programs.values())}
    assert all(loss.head == program.head for program in programs.values() for loss in program.losses.values())


def test_requests_for_another_kind_of_model_are_refused(worker: Worker) -> None:
    data, tokens = some_values(6), some_policy_data(6)
    worker.create_run(RunSpec("reference", LoraConfig(rank=4, seed=0), "reference"))
    wrong = {
        "loss_fn 'cross_entropy' is for another kind of model: this one takes value_mse": replace(
            value_request("critic", data), loss_fn="cross_entropy"
        ),
        "loss_fn 'value_mse' is for another kind of model: this one takes cross_entropy": value_request("policy", data),
        "it reads returns and optionally weights, old_values": value_request("critic", tokens),
        "a reference is not trained": ForwardBackwardRequest("reference", 1, tokens, "cross_entropy"),
    }
    answers = worker.run_pass(tuple(OperationPart(number, each) for number, each in enumerate(wrong.values())))
    for answer in answers:
        assert isinstance(answer, Failure), answer
    assert all(reason in answer.message for reason, answer in zip(wrong, answers, strict=True)), answers
    negative = replace(value_request("critic", data), loss_fn_config={"clip": -1.0})
    (answer,) = worker.run_pass((OperationPart(8, negative),))
    assert isinstance(answer, Failure) and "clip is -1.0: it is a distance" in answer.message
    broken = [replace(data[0], loss_fn_inputs=data[0].loss_fn_inputs | {"old_values": np.full(9, np.nan, np.float32)})]
    (answer,) = worker.run_pass((OperationPart(9, value_request("critic", broken)),))
    assert isinstance(answer, Failure) and "old_values is nan at position 0: it must be finite" in answer.message
