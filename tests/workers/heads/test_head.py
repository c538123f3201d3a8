"""The chunked head against the plain computation: all logits at once, log_softmax, autograd."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainhouse.schemas.models import LoraConfig
from trainhouse.workers.batch.micro_batch import Objective
from trainhouse.workers.heads import LogprobHead
from trainhouse.workers.lora import Adapter, LoraLayers, Segment
from trainhouse.workers.losses import LOSSES
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.training.rank_part import ScoredTokens
from trainhouse.workers.training.scoring import score

from ..adapted import new_adapter, pair_gradients

LENGTHS = (7, 4, 12, 1)
NUM_TOKENS = sum(LENGTHS)
BOUNDS = (0, 7, 11, 23, 24)
CHUNKS = (1, 5, NUM_TOKENS, 100)


@pytest.fixture(scope="module")
def base(tiny_models: dict[str, Path]) -> BaseModel:
    return BaseModel(WorkerConfig(ServedModel("tiny", str(tiny_models["qwen3_tied"]))))


@pytest.fixture(scope="module")
def capped_base(tiny_models: dict[str, Path]) -> BaseModel:
    """Has logits of at most 0.3."""
    return BaseModel(WorkerConfig(ServedModel("tiny", str(tiny_models["gemma3_capped"]))))


@pytest.fixture(scope="module")
def adapter(base: BaseModel) -> Adapter:
    """Has a nonzero B, so that the pair of the head matters."""
    return some_adapter(base)


def some_adapter(base: BaseModel) -> Adapter:
    adapter = new_adapter(LoraLayers(base, max_rank=8), LoraConfig(rank=4, seed=1))
    adapter.weights.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    return adapter


def some_hidden(base: BaseModel) -> Tensor:
    return torch.randn(NUM_TOKENS, base.unembedding.shape[1], generator=torch.Generator().manual_seed(2)).to(base.dtype)


def objective(name: str, num_targets: int | None = None) -> Objective:
    shape = (NUM_TOKENS,) if num_targets is None else (NUM_TOKENS, num_targets)
    generator = torch.Generator().manual_seed(3)
    random = {key: torch.randn(shape, generator=generator) for key in ("weights", "logprobs", "advantages")}
    random["logprobs"] -= 4
    random["advantages"][:5] = 0
    ones = dict.fromkeys(("sequence_ratio_mask", "sampled_mask"), torch.ones(shape))
    loss = LOSSES[name]
    bounds = {key: torch.full(shape, value) for key, value in loss.config.items() if key in loss.optional}
    inputs = {key: (random | ones | bounds)[key] for key in (*loss.required, *loss.optional)}
    targets = torch.randint(512, shape, generator=generator)
    return Objective(0, NUM_TOKENS, loss, loss.config, 1.0, targets, inputs, BOUNDS)


def plain(hidden: Tensor, base: BaseModel, adapter: Adapter | None, objective: Objective) -> tuple[Tensor, ...]:
    """Returns the log-probabilities, the loss, and its gradients with respect to hidden, A and B."""
    leaves = [hidden.clone().requires_grad_()]
    logits = leaves[0] @ base.unembedding.t()
    if adapter is not None:
        assert adapter.unembed is not None
        a, b = (matrix.clone().requires_grad_() for matrix in (adapter.unembed.a, adapter.unembed.b))
        logits = logits + adapter.unembed.scale * leaves[0] @ a.t() @ b.t()
        leaves += [a, b]
    if base.logit_cap is not None:
        logits = base.logit_cap * torch.tanh(logits / base.logit_cap)
    all_logprobs = torch.log_softmax(logits, dim=-1)
    targets = objective.targets.reshape(NUM_TOKENS, -1)
    logprobs = all_logprobs.gather(1, targets).reshape(objective.targets.shape)
    losses = [
        objective.loss.function(
            logprobs[start:stop],
            {name: value[start:stop] for name, value in objective.inputs.items()},
            objective.config,
        ).losses.sum()
        for start, stop in pairwise(BOUNDS)
    ]
    loss = torch.stack(losses).sum()
    return logprobs.detach(), loss.detach(), *torch.autograd.grad(loss, leaves)


def ours(
    hidden: Tensor, base: BaseModel, adapter: Adapter | None, objective: Objective, chunk_tokens: int
) -> tuple[Tensor, ...]:
    gradient = torch.full_like(hidden, float("nan"))
    if adapter is not None:
        adapter.gradients.begin_operation()
    output = score_alone(LogprobHead(base, chunk_tokens), hidden, adapter, objective, gradient)
    of_pair = head_gradients(adapter) if adapter is not None and adapter.unembed is not None else ()
    return torch.from_numpy(output.scores), torch.from_numpy(output.losses).sum(), gradient, *of_pair


def head_gradients(adapter: Adapter) -> list[Tensor]:
    return [grad.clone() for grad in pair_gradients(adapter, adapter.unembed_name)]


def score_alone(
    head: LogprobHead, hidden: Tensor, adapter: Adapter | None, objective: Objective, gradient: Tensor
) -> ScoredTokens:
    (output,) = score({"logprobs": head}, hidden, [Segment(0, NUM_TOKENS, adapter)], [objective], gradient)
    return output


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_autograd_for_any_chunk(
    name: str, chunk_tokens: int, base: BaseModel, adapter: Adapter
) -> None:
    hidden, wanted = some_hidden(base), objective(name)
    expected = plain(hidden, base, adapter, wanted)
    for found, reference in zip(ours(hidden, base, adapter, wanted, chunk_tokens), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_capped_logits_have_the_gradients_of_autograd(
    chunk_tokens: int, capped_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens have no weight. Control: the tolerance detects that there is no cap."""
    hidden, wanted, used = some_hidden(capped_base), objective("cross_entropy"), some_adapter(capped_base)
    wanted.inputs["weights"][:7] = 0
    expected = plain(hidden, capped_base, used, wanted)
    hidden[:7] = torch.inf
    found = ours(hidden, capped_base, used, wanted, chunk_tokens)
    assert not found[2][:7].any()
    monkeypatch.setattr(capped_base, "logit_cap", None)
    uncapped = ours(hidden, capped_base, used, wanted, chunk_tokens)
    for one, other, reference in zip(found, uncapped, expected, strict=True):
        is_scored = slice(7, None) if reference.shape[:1] == (NUM_TOKENS,) else ...
        one, other, reference = (each[is_scored] for each in (one, other, reference))
        torch.testing.assert_close(one, reference, rtol=1e-4, atol=1e-4)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(other, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("with_pair", [False, True])
def test_several_targets_per_position(num_targets: int, with_pair: bool, base: BaseModel, adapter: Adapter) -> None:
    hidden, wanted, used = some_hidden(base), objective("cross_entropy", num_targets), adapter if with_pair else None
    expected = plain(hidden, base, used, wanted)
    for found, reference in zip(ours(hidden, base, used, wanted, 5), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


def test_tolerance_detects_a_missing_pair(base: BaseModel, adapter: Adapter) -> None:
    hidden, wanted = some_hidden(base), objective("cross_entropy")
    without, reference = ours(hidden, base, None, wanted, 5), plain(hidden, base, adapter, wanted)
    for index in range(3):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(without[index], reference[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_uncounted_tokens_get_no_gradient_even_if_infinite(name: str, base: BaseModel, adapter: Adapter) -> None:
    hidden, wanted = some_hidden(base), objective(name)
    counts = wanted.inputs[wanted.loss.counted_by]
    counts[:7] = 0  # the whole first sequence
    wanted.inputs.get("sequence_ratio_mask", counts)[:7] = 0
    clean = ours(hidden, base, adapter, wanted, 5)
    hidden[:7] = float("inf")
    broken = ours(hidden, base, adapter, wanted, 5)
    for found, reference in zip(broken[1:], clean[1:], strict=True):
        assert torch.equal(found, reference)
    assert not broken[2][:7].any()


def test_loss_weight_multiplies_loss_and_gradient(base: BaseModel, adapter: Adapter) -> None:
    hidden, plain_objective = some_hidden(base), objective("ppo")
    weighted = replace(plain_objective, weight=-0.5)
    once, half = (ours(hidden, base, adapter, wanted, 5) for wanted in (plain_objective, weighted))
    assert torch.equal(half[0], once[0])
    for found, reference in zip(half[1:], once[1:], strict=True):
        torch.testing.assert_close(found, -0.5 * reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_forward_alone_gives_the_same_without_gradients(name: str, base: BaseModel, adapter: Adapter) -> None:
    hidden, wanted = some_hidden(base), objective(name)
    head, before = LogprobHead(base, 5), adapter.gradients.scratch.clone()
    (output,) = score({"logprobs": head}, hidden, [Segment(0, NUM_TOKENS, adapter)], [wanted])
    assert torch.equal(adapter.gradients.scratch, before)
    with_gradient = score_alone(head, hidden, adapter, wanted, torch.empty_like(hidden))
    np.testing.assert_array_equal(output.scores, with_gradient.scores)
    torch.testing.assert_close(output.losses, with_gradient.losses)
    assert output.metrics.keys() == with_gradient.metrics.keys()


def test_log_probabilities_are_float32_on_a_bfloat16_base(tiny_models: dict[str, Path]) -> None:
    config = WorkerConfig(ServedModel("tiny", str(tiny_models["qwen3"])), dtype="bfloat16")
    base = BaseModel(config)
    adapter = new_adapter(LoraLayers(base, max_rank=8), LoraConfig(rank=4, seed=1))
    adapter.weights.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    hidden, wanted = some_hidden(base), objective("cross_entropy")
    gradient = torch.empty_like(hidden)
    output = score_alone(LogprobHead(base, 5), hidden, adapter, wanted, gradient)
    logits = LogprobHead(base, 100).logits(hidden, adapter.unembed)
    expected = torch.log_softmax(logits, dim=-1).gather(1, wanted.targets[:, None]).squeeze(1)
    assert output.scores.dtype == np.float32
    torch.testing.assert_close(torch.from_numpy(output.scores), expected, rtol=1e-6, atol=1e-6)
    assert gradient.dtype == torch.bfloat16


def test_rows_of_several_adapters_use_their_own_pair(base: BaseModel, adapter: Adapter) -> None:
    hidden, head = some_hidden(base), LogprobHead(base, 100)
    segments = [Segment(0, 7, adapter), Segment(7, NUM_TOKENS, None)]
    logits = head.logits_of_segments(hidden, segments)
    torch.testing.assert_close(logits[:7], head.logits(hidden[:7], adapter.unembed))
    torch.testing.assert_close(logits[7:], head.logits(hidden[7:], None))


MIXED = ("cross_entropy", "gspo", "ppo", "dro")
SPLIT = (0, 6, 13, 14, NUM_TOKENS)
"""First row of each of the mixed losses, at a sequence start; chunks of 5 rows cut across them."""


def mixed_objectives() -> list[Objective]:
    """Returns rows of several losses; the first has three targets per position, the second two sequences."""
    whole = [objective(name, 3 if name == "cross_entropy" else None) for name in MIXED]
    bounds = [(0, 6), (0, 4, 7), (0, 1), (0, 10)]
    return [
        replace(
            each,
            start=start,
            stop=stop,
            targets=each.targets[start:stop],
            inputs={name: values[start:stop] for name, values in each.inputs.items()},
            bounds=own,
        )
        for each, (start, stop), own in zip(whole, pairwise(SPLIT), bounds, strict=True)
    ]


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_mixed_losses_and_adapters_match_each_alone(chunk_tokens: int, base: BaseModel, adapter: Adapter) -> None:
    other = new_adapter(LoraLayers(base, max_rank=8), LoraConfig(rank=8, seed=2))
    other.weights.normal_(std=0.05, generator=torch.Generator().manual_seed(4))
    hidden, gradient = some_hidden(base), torch.full((NUM_TOKENS, base.unembedding.shape[1]), float("nan"))
    owners = [adapter, other, None, adapter]
    segments = [Segment(each.start, each.stop, owner) for each, owner in zip(mixed_objectives(), owners, strict=True)]
    for each in (adapter, other):
        each.gradients.begin_operation()
    heads = {"logprobs": LogprobHead(base, chunk_tokens)}
    found = score(heads, hidden, segments, mixed_objectives(), gradient)
    adapted = [each for each in (adapter, other) if each.unembed is not None]
    together = [head_gradients(each) for each in adapted]
    only_forward = score(heads, hidden, segments, mixed_objectives())
    for each in (adapter, other):
        each.gradients.begin_operation()
    for each, output, forward, owner in zip(mixed_objectives(), found, only_forward, owners, strict=True):
        rows = slice(each.start, each.stop)
        own = torch.empty_like(gradient[rows])
        alone = replace(each, start=0, stop=rows.stop - rows.start)
        (expected,) = score(
            {"logprobs": LogprobHead(base, 100)}, hidden[rows], [Segment(0, alone.stop, owner)], [alone], own
        )
        torch.testing.assert_close(output.scores, expected.scores)
        torch.testing.assert_close(forward.scores, expected.scores)
        torch.testing.assert_close(output.losses, expected.losses)
        torch.testing.assert_close(gradient[rows], own)
        for name, values in expected.metrics.items():
            torch.testing.assert_close(output.metrics[name], values)
            torch.testing.assert_close(forward.metrics[name], values)
    for each, gradients in zip(adapted, together, strict=True):
        torch.testing.assert_close(gradients, head_gradients(each))
        with pytest.raises(AssertionError):
            torch.testing.assert_close(gradients[0], 1.001 * head_gradients(each)[0])


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor created, except `known` tensors and their views."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.num_elements = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def largest(chunk_tokens: int, name: str, base: BaseModel, adapter: Adapter) -> int:
    hidden, wanted = some_hidden(base), objective(name)
    with LargestTensor(base.unembedding, adapter.weights, adapter.gradients.scratch) as recorder:
        ours(hidden, base, adapter, wanted, chunk_tokens)
    return recorder.num_elements


@pytest.mark.parametrize("name", ["cross_entropy", "gspo"])
def test_no_tensor_of_tokens_by_vocabulary_is_created(name: str, base: BaseModel, adapter: Adapter) -> None:
    vocab_size = base.unembedding.shape[0]
    assert largest(5, name, base, adapter) <= 5 * vocab_size
    assert (
        largest(NUM_TOKENS, name, base, adapter) == NUM_TOKENS * vocab_size
    )  # control: the recorder sees such a tensor
