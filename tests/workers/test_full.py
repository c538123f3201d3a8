"""Full fine-tuning against transformers and torch.optim.AdamW: every gradient, and the weights after steps."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.config import ServedModel, WorkerConfig
from trainhouse.workers.verbs import Failure, Part, Pass, RunSpec, Step
from trainhouse.workers.worker import Worker
from transformers import AutoModelForCausalLM

from ..tiny import KINDS, tiny_model
from .adapted import relative_error

LENGTHS = (9, 30, 4, 17)
ADAM = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
TOLERANCE = 1e-5


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
    """In one pass."""
    answers = worker.run_pass(Pass(tuple(Part(number, request) for number, request in enumerate(requests))))
    assert all(isinstance(answer, ForwardBackwardOutput) for answer in answers), answers
    return list(answers)  # pyright: ignore[reportReturnType]


def stepped(worker: Worker, run_id: str) -> dict[str, float]:
    (metrics,) = worker.apply_steps((Step(run_id, ADAM),))
    assert isinstance(metrics, dict), metrics
    return metrics


def a_worker(directory: Path, **knobs: int) -> Worker:
    return Worker(WorkerConfig(ServedModel("tiny", str(directory)), threads=1, **knobs))  # pyright: ignore


class Reference:
    """transformers' model, trained by autograd."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )

    def loss(self, data: Sequence[Datum]) -> Tensor:
        losses = []
        for datum in data:
            logits = self.model(input_ids=torch.from_numpy(datum.tokens).long()[None]).logits[0]
            logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.loss_fn_inputs["target_tokens"])[:, None])
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
    return {str(matrix.key): model.layout.view(getattr(model, vector), matrix.key) for matrix in model.layout.matrices}


@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_and_three_steps_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    directory = tiny_model(kind, tmp_path)
    worker, reference = a_worker(directory, micro_batch_tokens=32), Reference(directory)
    worker.create_run(RunSpec("full", FullConfig()))
    for step in range(3):
        for batch in range(2):
            data = some_data(10 * step + batch)
            (output,) = run(worker, supervised("full", data))
            assert output.metrics["loss:sum"] == pytest.approx(reference.backward(data), rel=TOLERANCE)
        gradients, wanted = views(worker, "full", "accumulator"), reference.gradients()
        assert gradients.keys() == wanted.keys()
        scale = max(float(each.abs().max()) for each in wanted.values())
        for name, gradient in gradients.items():
            assert float((gradient - wanted[name]).abs().max()) < TOLERANCE * scale, name
        stepped(worker, "full")
        reference.step()
    for name, weights in views(worker, "full").items():
        # A step of Adam is as large as the sign of a gradient says, however small that is.
        assert relative_error(weights, reference.parameters()[name]) < 1e-3, name
    # What the others have is untouched.
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, weights in worker._base.own_parameters().items():
        assert torch.equal(weights, dict(loaded.named_parameters())[name].detach()), name
