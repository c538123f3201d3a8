"""A worker's passes equal naive drafting over hidden states and the output head of transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.drafts.model.draft_model import DraftModel
from trainhouse.workers.protocol.calls import OperationPart, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...tiny import tiny_model
from ..adapted import relative_error
from .case import OPTIONS, Case, TargetSequence
from .naive import NaiveDraft, naively_trained

LENGTHS = (5, 1, 7, 2)
VOCABULARY, CAPTURED = 24, (0, 2)
THETAS = {"gemma3": 1000000.0, "gemma3_capped": 1000000.0}
FIELDS: dict[str, dict[str, Any]] = {"eagle3": {}, "dflash": {"num_layers": 1, "block_size": 3, "mask_token_id": 2}}


@dataclass(frozen=True)
class TransformersHead:
    """Computes transformers' logits for last hidden states."""

    model: Any

    def logits(self, hidden: Tensor) -> Tensor:
        trunk = self.model.model.forward
        self.model.model.forward = lambda **_: BaseModelOutputWithPast(last_hidden_state=hidden[None])
        try:
            return self.model(input_ids=torch.zeros(1, len(hidden), dtype=torch.long)).logits[0]
        finally:
            self.model.model.forward = trunk

    def backward(self, gradient: Tensor) -> Tensor:
        raise AssertionError("autograd differentiates it")


class Bench:
    """A worker with one draft of random weights, and the same target run by transformers."""

    def __init__(
        self, algorithm: Algorithm, kind: str, directory: Path, draft_tokens: Sequence[int] | None = None
    ) -> None:
        alternate = {"layer_types": ["sliding_attention", "full_attention"] * 2}
        windows: Any = alternate if kind in ("gemma3", "gemma3_capped", "cohere2", "cohere_compass") else {}
        tiny_model(kind, directory, num_hidden_layers=4, vocab_size=VOCABULARY, **windows)
        self.worker = Worker(WorkerConfig(ServedModel("tiny", str(directory)), device="cpu", threads=1))
        self.theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
        size = len(draft_tokens) if draft_tokens else None
        requested = DraftConfig(
            algorithm=algorithm, seed=3, capture_layers=CAPTURED, draft_vocab_size=size, **FIELDS[algorithm]
        )
        self.worker.create_run(RunSpec("draft", requested, "draft"))
        if draft_tokens:
            self.worker.set_vocabulary("draft", np.array(draft_tokens))
        draft = self.worker._models.get("draft")
        assert isinstance(draft, DraftModel)
        self.draft, self.theta = draft, THETAS.get(kind, 10000.0)
        self.algorithm: Algorithm = algorithm
        draft.weights.add_(0.1 * torch.randn(draft.weights.shape))

    def ours(self, data: Sequence[Datum]) -> tuple[np.ndarray, dict[str, Tensor], Mapping[str, float]]:
        """Returns the losses of all tokens, gradients, and metrics."""
        request = ForwardBackwardRequest("draft", 1, tuple(data), self.algorithm, OPTIONS[self.algorithm])
        (output,) = self.worker.run_pass((OperationPart(0, request),))
        assert isinstance(output, ForwardBackwardOutput), output
        layout, total = self.draft.layout, self.draft.gradients.accumulator
        gradients = {str(matrix.key): layout.view(total, matrix.key) for matrix in layout.matrices}
        losses = np.concatenate([each["losses"] for each in output.loss_fn_outputs])
        return losses, gradients, output.metrics

    def naively(self, data: Sequence[Datum], captured: Sequence[int] = CAPTURED) -> tuple[float, Mapping[str, Tensor]]:
        """Returns the loss and gradients."""
        case = Case(
            self.algorithm,
            self.draft.shape,
            {name: each.double() for name, each in self.draft.vectors.weight_views().items()},
            self.draft.vocabulary,
            OPTIONS[self.algorithm],
            self.theirs.get_input_embeddings()(torch.arange(VOCABULARY)).detach(),
            TransformersHead(self.theirs),
        )
        sequences = [self.target_sequence(number, datum, captured) for number, datum in enumerate(data)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NaiveDraft, "theta", self.theta)
            found = naively_trained(case, sequences)
        return found.loss, found.gradients

    @torch.no_grad()
    def target_sequence(self, number: int, datum: Datum, captured: Sequence[int]) -> TargetSequence:
        tokens, weights = torch.tensor(datum.tokens).long(), torch.tensor(datum.loss_fn_inputs["weights"]).double()
        weights[-1] = 0.0  # The last token has no label.
        output = self.theirs(input_ids=tokens[None], output_hidden_states=True)
        states = [each[0] for each in output.hidden_states]
        features = torch.cat([states[layer + 1] for layer in captured], dim=1)
        return TargetSequence(
            number, torch.cat([tokens, tokens.new_zeros(1)]), states[0], features, output.logits[0], weights
        )


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
    ("algorithm", "kind", "draft_tokens"),
    [
        ("eagle3", "llama", None),
        ("eagle3", "llama", range(1, VOCABULARY, 2)),
        ("eagle3", "qwen3", None),
        ("eagle3", "gemma3", None),
        ("eagle3", "cohere2", None),
        ("eagle3", "cohere_compass", None),
        ("eagle3", "gemma3_capped", None),
        ("dflash", "gemma3_capped", None),
        ("dflash", "llama", None),
        ("dflash", "cohere2", None),
    ],
)
def test_losses_and_gradients_equal_naive_drafting(
    algorithm: Algorithm, kind: str, draft_tokens: Sequence[int] | None, tmp_path: Path
) -> None:
    bench, data = Bench(algorithm, kind, tmp_path, draft_tokens), some_data()
    losses, gradients, metrics = bench.ours(data)
    wanted_loss, wanted = bench.naively(data)
    assert metrics["loss:sum"] == pytest.approx(wanted_loss, rel=1e-5) == float(losses.sum())
    assert np.count_nonzero(losses) > 4
    assert largest_error(gradients, wanted) < 1e-4


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_features_of_other_layers_change_losses_and_gradients(algorithm: Algorithm, tmp_path: Path) -> None:
    bench, data = Bench(algorithm, "llama", tmp_path), some_data()
    _, gradients, metrics = bench.ours(data)
    wanted_loss, wanted = bench.naively(data, captured=[layer + 1 for layer in CAPTURED])
    assert largest_error(gradients, wanted) > 1e-2
    assert metrics["loss:sum"] != pytest.approx(wanted_loss, rel=1e-3)


def test_the_targets_scale_of_logits_is_applied(tmp_path: Path) -> None:
    bench, data = Bench("dflash", "cohere2", tmp_path), some_data()
    shape = bench.draft.shape
    assert shape.logit_scale == bench.theirs.config.logit_scale != 1
    wanted_loss, _ = bench.naively(data)
    bench.draft.shape = replace(shape, logit_scale=1.0)
    assert bench.ours(data)[2]["loss:sum"] != pytest.approx(wanted_loss, rel=1e-2)


def largest_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    return max(relative_error(found[name].double(), each) for name, each in wanted.items())
