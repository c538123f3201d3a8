"""A worker's EAGLE-3 passes equal rollouts over features from transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.models import DraftConfig
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.drafts.draft_model import DraftModel
from trainhouse.workers.protocol.calls import OperationPart, Pass, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM

from ...tiny import tiny_model
from ..adapted import relative_error
from .naive_eagle3 import NaiveDraft, NaiveSequence, naive_scores

LENGTHS = (5, 1, 7, 2)
VOCABULARY = 24
DEPTH = 3
CAPTURED = (0, 2)
THETAS = {"gemma3": 1000000.0}
CONFIG = {"ttt_length": DEPTH, "decay": 0.7}


class Bench:
    """A worker with one draft of random weights, and the same target run by transformers."""

    def __init__(self, kind: str, directory: Path, draft_tokens: Sequence[int] | None = None) -> None:
        windows: Any = (
            {"layer_types": ["sliding_attention", "full_attention"] * 2} if kind in ("gemma3", "cohere2") else {}
        )
        tiny_model(kind, directory, num_hidden_layers=4, vocab_size=VOCABULARY, **windows)
        self.worker = Worker(WorkerConfig(ServedModel("tiny", str(directory)), device="cpu", threads=1))
        self.theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        requested = DraftConfig(
            algorithm="eagle3",
            seed=3,
            capture_layers=CAPTURED,
            draft_vocab_size=len(draft_tokens) if draft_tokens else None,
        )
        self.worker.create_run(RunSpec("draft", requested, "draft"))
        if draft_tokens:
            self.worker.set_vocabulary("draft", np.array(draft_tokens))
        self.draft.weights.add_(0.1 * torch.randn(self.draft.weights.shape))
        self.theta = THETAS.get(kind, 10000.0)

    @property
    def draft(self) -> DraftModel:
        draft = self.worker._models.get("draft")
        assert isinstance(draft, DraftModel)
        return draft

    def ours(self, data: Sequence[Datum]) -> tuple[list[np.ndarray], dict[str, Tensor], Mapping[str, float]]:
        """Returns the losses of each datum, gradients, and metrics."""
        request = ForwardBackwardRequest("draft", 1, tuple(data), "eagle3", CONFIG)
        (output,) = self.worker.run_pass(Pass((OperationPart(0, request),)))
        assert isinstance(output, ForwardBackwardOutput), output
        layout, total = self.draft.layout, self.draft.gradients.accumulator
        gradients = {str(matrix.key): layout.view(total, matrix.key) for matrix in layout.matrices}
        return [each["losses"] for each in output.loss_fn_outputs], gradients, output.metrics

    def naively(
        self, data: Sequence[Datum], captured: Sequence[int] = CAPTURED
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        shape = self.draft.shape
        weights = {name: each.double().requires_grad_() for name, each in self.draft.vectors.weight_views().items()}
        draft = NaiveDraft(
            weights, self.draft.vocabulary, shape.heads, shape.kv_heads, shape.head_dim, shape.eps, self.theta
        )
        losses = []
        for datum in data:
            scores = naive_scores(draft, self.target_sequence(datum, captured), DEPTH).scores
            counted = torch.tensor(datum.loss_fn_inputs["weights"]).double()
            # The last token has no label.
            counted[-1] = 0.0
            decay = torch.tensor([CONFIG["decay"] ** guess for guess in range(DEPTH)]).double()
            losses.append((counted[:, None] * decay * scores["covered"] * scores["cross_entropy"]).sum(1))
        gradients = torch.autograd.grad(torch.cat(losses).sum(), list(weights.values()))
        return [each.detach() for each in losses], dict(zip(weights, gradients, strict=True))

    @torch.no_grad()
    def target_sequence(self, datum: Datum, captured: Sequence[int]) -> NaiveSequence:
        output = self.theirs(input_ids=torch.tensor(datum.tokens).long()[None], output_hidden_states=True)
        states = [each[0].double() for each in output.hidden_states]
        return NaiveSequence(states[0], torch.cat([states[i + 1] for i in captured], dim=1), output.logits[0].double())


def some_data() -> list[Datum]:
    random = np.random.default_rng(0)
    return [
        Datum(
            random.integers(0, VOCABULARY, length).astype(np.int32),
            {"weights": random.uniform(0.1, 1.0, length).astype(np.float32)},
        )
        for length in LENGTHS
    ]


@pytest.mark.parametrize(
    ("kind", "draft_tokens"),
    [("llama", None), ("llama", range(1, VOCABULARY, 2)), ("qwen3", None), ("gemma3", None), ("cohere2", None)],
)
def test_losses_and_gradients_equal_rollouts(kind: str, draft_tokens: Sequence[int] | None, tmp_path: Path) -> None:
    bench, data = Bench(kind, tmp_path, draft_tokens), some_data()
    losses, gradients, metrics = bench.ours(data)
    wanted_losses, wanted = bench.naively(data)
    assert torch.cat(wanted_losses).count_nonzero() > 4
    for mine, other in zip(losses, wanted_losses, strict=True):
        np.testing.assert_allclose(mine, other.numpy(), atol=1e-5)
    assert metrics["loss:sum"] == pytest.approx(float(torch.cat(wanted_losses).sum()), rel=1e-5)
    assert largest_error(gradients, wanted) < 1e-5


def test_features_of_other_layers_change_losses_and_gradients(tmp_path: Path) -> None:
    bench, data = Bench("llama", tmp_path), some_data()
    losses, gradients, _ = bench.ours(data)
    wanted_losses, wanted = bench.naively(data, captured=[layer + 1 for layer in CAPTURED])
    assert largest_error(gradients, wanted) > 1e-2
    assert float(np.abs(np.concatenate(losses) - torch.cat(wanted_losses).numpy()).max()) > 1e-2


def largest_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    return max(relative_error(found[name].double(), each) for name, each in wanted.items())
