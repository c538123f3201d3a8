"""A worker's DFlash passes equal single blocks over features and the output head of transformers."""

import math
from collections.abc import Sequence
from dataclasses import replace
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
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...tiny import tiny_model
from ..adapted import relative_error
from .naive_dflash import NaiveDraft

VOCABULARY, MASK, SIZE = 24, 2, 3
CAPTURED = (0, 2)
GAMMA = 7.0
CONFIG = {"num_anchors": 100.0, "seed": 1.0, "gamma": GAMMA}


class Bench:
    """A worker with one draft, and the same target run by transformers."""

    def __init__(self, kind: str, directory: Path) -> None:
        kinds: Any = {"layer_types": ["sliding_attention", "full_attention"] * 2} if kind == "cohere2" else {}
        tiny_model(kind, directory, num_hidden_layers=4, vocab_size=VOCABULARY, **kinds)
        self.worker = Worker(WorkerConfig(ServedModel("tiny", str(directory)), device="cpu", threads=1))
        self.theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
        requested = DraftConfig(
            algorithm="dflash", seed=3, capture_layers=CAPTURED, num_layers=1, block_size=SIZE, mask_token_id=MASK
        )
        self.worker.create_run(RunSpec("draft", requested, "draft"))
        draft = self.worker._models.get("draft")
        assert isinstance(draft, DraftModel)
        self.draft = draft

    def ours(self, data: Sequence[Datum]) -> tuple[float, dict[str, Tensor]]:
        """Returns the loss, and gradients."""
        request = ForwardBackwardRequest("draft", 1, tuple(data), "dflash", CONFIG)
        (output,) = self.worker.run_pass(Pass((OperationPart(0, request),)))
        assert isinstance(output, ForwardBackwardOutput), output
        layout, total = self.draft.layout, self.draft.gradients.accumulator
        return output.metrics["loss:sum"], {str(each.key): layout.view(total, each.key) for each in layout.matrices}

    def naively(self, data: Sequence[Datum]) -> tuple[float, dict[str, Tensor]]:
        shape = self.draft.shape
        weights = {name: each.double().requires_grad_() for name, each in self.draft.vectors.weight_views().items()}
        draft = NaiveDraft(weights, 1, shape.heads, shape.kv_heads, shape.head_dim, shape.eps, theta=10000.0)
        total = torch.zeros((), dtype=torch.float64)
        for datum in data:
            tokens = torch.tensor(datum.tokens).long()
            states = self.theirs(input_ids=tokens[None], output_hidden_states=True).hidden_states
            captured = torch.cat([states[layer + 1][0] for layer in CAPTURED], dim=1).detach()
            (mask,) = self.theirs.get_input_embeddings()(torch.tensor([MASK])).detach()
            for anchor in range(len(tokens) - 1):
                block = draft.guesses(captured[:anchor], anchor, states[0][0, anchor].detach(), mask, SIZE)
                logprobs = self.logits(torch.stack(block)).log_softmax(-1)
                for k in range(1, min(SIZE, len(tokens) - anchor)):
                    total = total - math.exp(-(k - 1) / GAMMA) * logprobs[k, tokens[anchor + k]]
        gradients = torch.autograd.grad(total, list(weights.values()))
        return float(total.detach()), dict(zip(weights, gradients, strict=True))

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns transformers' logits for last hidden states, [tokens, vocabulary]."""
        trunk = self.theirs.model.forward
        self.theirs.model.forward = lambda **_: BaseModelOutputWithPast(last_hidden_state=hidden[None])
        try:
            return self.theirs(input_ids=torch.zeros(1, len(hidden), dtype=torch.long)).logits[0]
        finally:
            self.theirs.model.forward = trunk


def some_data() -> list[Datum]:
    random = np.random.default_rng(0)
    return [Datum(random.integers(0, VOCABULARY, length).astype(np.int32)) for length in (5, 3, 7)]


@pytest.mark.parametrize("kind", ["llama", "cohere2"])
def test_losses_and_gradients_equal_single_blocks(kind: str, tmp_path: Path) -> None:
    bench, data = Bench(kind, tmp_path), some_data()
    loss, gradients = bench.ours(data)
    wanted_loss, wanted = bench.naively(data)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert max(relative_error(gradients[name].double(), each) for name, each in wanted.items()) < 1e-4
    if kind == "cohere2":
        shape = bench.draft.shape
        assert shape.logit_scale == bench.theirs.config.logit_scale != 1
        bench.draft.shape = replace(shape, logit_scale=1.0)
        assert bench.ours(data)[0] != pytest.approx(wanted_loss, rel=1e-2), "a missing scale must show"
