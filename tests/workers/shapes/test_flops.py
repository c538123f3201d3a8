"""The operations of a pass: counted by hand for three models, and by torch in transformers' own passes."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from trainhouse.schemas.models import Algorithm, DraftConfig, FullConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse, SamplingParams
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.drafts.sequences.blocks import TokenRandom, sample_anchors
from trainhouse.workers.protocol.calls import OperationPart, RunSpec, SampleJob, SamplingSlice
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.resources.machine import DeviceSpeed
from trainhouse.workers.shapes.layouts.flops import ModelFlops, OwnFlops, num_pairs
from trainhouse.workers.shapes.model_shape import ModelShape, read_model
from trainhouse.workers.shapes.parts import View
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM

from ...tiny import FAMILY_KINDS, KINDS, MORE_KINDS, PLAIN_KINDS, RECURRENT_KINDS, tiny_config
from ..adapted import quieten_peft

# By hand

LENGTHS = (9, 20, 3)
TOKENS = 9 + 20 + 3
PAIRS = 9 * 10 // 2 + 20 * 21 // 2 + 3 * 4 // 2
COUNTED = TOKENS - 3  # the first token of each sequence has weight 0
RANK = 4
HEAD, HEAD_ADAPTER = 64 * 512, RANK * (64 + 512)


@dataclass(frozen=True)
class ByHand:
    """Multiplications of all layers together.

    weights, adapter: for each token, with frozen weights and with adapters of RANK. states: for each token, with states
    of recurrences. scores: for each pair of tokens in attention.
    """

    weights: int
    adapter: int
    scores: int
    states: int = 0

    def forward(self) -> int:
        of_adapter = TOKENS * (self.adapter + HEAD_ADAPTER)
        return 2 * (TOKENS * (self.weights + self.states + HEAD) + PAIRS * self.scores + of_adapter)

    def backward(self) -> int:
        """Returns those of the gradients: by inputs, and where two factors have one, by both."""
        frozen = TOKENS * self.weights + COUNTED * HEAD
        of_both = TOKENS * (self.states + self.adapter) + COUNTED * HEAD_ADAPTER + PAIRS * self.scores
        return 2 * (frozen + 2 * of_both)


# Four query heads and two of keys and values, of 16 features each: 64 and 32 in all; two layers.
ATTENTION = 64 * 64 + 64 * 32 + 64 * 32 + 64 * 64
ATTENTION_ADAPTER = RANK * ((64 + 64) + (64 + 32) + (64 + 32) + (64 + 64))
SCORES = 4 * (16 + 16)  # a query with a key, and a probability with a value
MLP, MLP_ADAPTER = 3 * 64 * 128, RANK * 3 * (64 + 128)

# A router of four experts, of which each token has two, of 32 features.
EXPERTS = 64 * 4 + 2 * 3 * 64 * 32
SHARED_FACTORS = RANK * 3 * (64 + 2 * 32)  # the hidden side once, the other one for each expert
OWN_FACTORS = RANK * 3 * 2 * (64 + 32)

# Queries and keys of two heads of 8 features, values of four heads of 16, gates as wide; a decay and a rate for each
# value head; a convolution over four tokens.
MIXED = 16 + 16 + 64
DELTA = 64 * MIXED + 64 * 64 + 2 * 64 * 4 + 4 * MIXED + 64 * 64
DELTA_ADAPTER = RANK * (2 * (64 + 16) + (64 + 64) + (64 + 64) + (64 + 64))
DELTA_STATES = 3 * 4 * 8 * 16  # predict, correct, read
# The projection to queries has as many outputs for gates.
GATED = ATTENTION + 64 * 64
GATED_ADAPTER = ATTENTION_ADAPTER + RANK * 64

BY_HAND = {
    "qwen3": ByHand(2 * (ATTENTION + MLP), 2 * (ATTENTION_ADAPTER + MLP_ADAPTER), 2 * SCORES),
    "qwen3_moe": ByHand(2 * (ATTENTION + EXPERTS), 2 * (ATTENTION_ADAPTER + SHARED_FACTORS), 2 * SCORES),
    "qwen3_5": ByHand(
        DELTA + GATED + 2 * MLP, DELTA_ADAPTER + GATED_ADAPTER + 2 * MLP_ADAPTER, SCORES, states=DELTA_STATES
    ),
}


def data(lengths: tuple[int, ...] = LENGTHS) -> tuple[Datum, ...]:
    random = np.random.default_rng(0)
    rows = [random.integers(3, 512, length + 1) for length in lengths]
    weights = [np.minimum(np.arange(len(row) - 1), 1).astype(np.float32) for row in rows]
    return tuple(
        Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": of_row})
        for row, of_row in zip(rows, weights, strict=True)
    )


def a_worker(directory: Path) -> Worker:
    return Worker(WorkerConfig(ServedModel("tiny", str(directory)), threads=1))


def run(worker: Worker, run_id: str, *, forward_only: bool = False) -> dict[str, float]:
    """Returns the metrics of a pass."""
    request = ForwardBackwardRequest(run_id, 1, data(), "cross_entropy", forward_only=forward_only)
    (answer,) = worker.run_pass((OperationPart(0, request),))
    assert isinstance(answer, ForwardBackwardOutput), answer
    return dict(answer.metrics)


@pytest.mark.parametrize("kind", BY_HAND)
def test_a_pass_reports_the_operations_counted_by_hand(kind: str, tiny_models: dict[str, Path]) -> None:
    worker, by_hand = a_worker(tiny_models[kind]), BY_HAND[kind]
    worker.create_run(RunSpec("run", LoraConfig(rank=RANK, seed=0, expert_factors="shared")))
    forward = run(worker, "run", forward_only=True)["model_flops:sum"]
    assert forward == by_hand.forward()
    assert run(worker, "run")["model_flops:sum"] == forward + by_hand.backward()
    worker.create_run(RunSpec("bare", LoraConfig(rank=RANK, seed=0, train_mlp=False, train_unembed=False)))
    assert run(worker, "bare", forward_only=True)["model_flops:sum"] < forward
    worker.create_run(RunSpec("head", LoraConfig(rank=RANK, seed=0, train_attn=False, train_mlp=False)))
    without = replace(by_hand, adapter=0)
    of_head = 2 * COUNTED * (HEAD + 2 * HEAD_ADAPTER)
    assert run(worker, "head")["model_flops:sum"] == without.forward() + of_head, "no gradient reaches the layers"


def test_experts_with_their_own_factors_multiply_the_tokens_of_each(tiny_models: dict[str, Path]) -> None:
    worker = a_worker(tiny_models["qwen3_moe"])
    worker.create_run(RunSpec("run", LoraConfig(rank=RANK, seed=0, expert_factors="each")))
    by_hand = replace(BY_HAND["qwen3_moe"], adapter=2 * (ATTENTION_ADAPTER + OWN_FACTORS))
    assert run(worker, "run")["model_flops:sum"] == by_hand.forward() + by_hand.backward()
    assert by_hand.forward() != BY_HAND["qwen3_moe"].forward()


def test_full_training_counts_gradients_by_all_weights(tiny_models: dict[str, Path]) -> None:
    worker, by_hand = a_worker(tiny_models["qwen3"]), BY_HAND["qwen3"]
    worker.create_run(RunSpec("run", FullConfig(seed=0)))
    forward = 2 * (TOKENS * (by_hand.weights + HEAD) + PAIRS * by_hand.scores)
    backward = 2 * 2 * (TOKENS * by_hand.weights + COUNTED * HEAD + PAIRS * by_hand.scores)
    assert run(worker, "run")["model_flops:sum"] == forward + backward


# Drafts of a target of two layers. The first token of each sequence has weight 0.

DEPTH = 3
DRAFT_LAYER = 64 * (64 + 32 + 32)  # a half of each projection to queries, keys and values
DRAFT_REST = 64 * 64 + MLP


def draft_data(lengths: tuple[int, ...] = LENGTHS) -> tuple[Datum, ...]:
    random = np.random.default_rng(0)
    weights = [np.minimum(np.arange(length), 1).astype(np.float32) for length in lengths]
    return tuple(Datum(random.integers(3, 500, len(each)).astype(np.int32), {"weights": each}) for each in weights)


def run_draft(worker: Worker, algorithm: Algorithm, *, forward_only: bool = False) -> float:
    config = {"ttt_length": DEPTH} if algorithm == "eagle3" else {"num_anchors": 2, "seed": 0}
    request = ForwardBackwardRequest("draft", 1, draft_data(), algorithm, config, forward_only=forward_only)
    (answer,) = worker.run_pass((OperationPart(0, request),))
    assert isinstance(answer, ForwardBackwardOutput), answer
    assert answer.metrics["mfu:mean"] > 0
    return answer.metrics["model_flops:sum"]


def test_an_eagle3_pass_reports_the_operations_counted_by_hand(tiny_models: dict[str, Path]) -> None:
    worker, target = a_worker(tiny_models["qwen3"]), BY_HAND["qwen3"]
    worker.create_run(RunSpec("draft", DraftConfig(algorithm="eagle3", seed=0, draft_vocab_size=100), "draft"))
    worker.set_vocabulary("draft", np.arange(100))
    captured = worker._models.get("draft").shape.captured
    trunk = TOKENS * target.weights + PAIRS * target.scores
    # The token at 1 has a prediction from one token, that at 2 from two, and all others from three; no data have a last
    # label, which counts for no token.
    predicted = sum(min(place, DEPTH) for length in LENGTHS for place in range(1, length - 1))
    counted = sum(length - 2 for length in LENGTHS)
    fc, embedded = TOKENS * captured * 64 * 64, TOKENS * DRAFT_LAYER
    steps = TOKENS * DEPTH * (DRAFT_LAYER + DRAFT_REST)
    attention = SCORES * (DEPTH * PAIRS + TOKENS * (1 + 2))  # a query's own steps: none, one and two
    own = embedded + steps + attention + predicted * 64 * 100
    forward = 2 * (trunk + fc + own + counted * HEAD)
    assert run_draft(worker, "eagle3", forward_only=True) == forward
    assert run_draft(worker, "eagle3") == forward + 2 * (fc + 2 * own)


def test_a_dflash_pass_reports_the_operations_counted_by_hand(tiny_models: dict[str, Path]) -> None:
    worker, target = a_worker(tiny_models["qwen3"]), BY_HAND["qwen3"]
    config = DraftConfig(algorithm="dflash", seed=0, block_size=4, mask_token_id=2)
    worker.create_run(RunSpec("draft", config, "draft"))
    shape = worker._models.get("draft").shape
    assert shape.layers == 1
    trunk, fc = TOKENS * target.weights + PAIRS * target.scores, TOKENS * shape.captured * 64 * 64
    found = run_draft(worker, "dflash", forward_only=True)
    # Where the anchors are is drawn; the sequence of 3 tokens has one label, at 1, so one block of it.
    num_blocks, kv = 2 + 2 + 1, 64 * 2 * 32
    fixed = trunk + fc + TOKENS * kv + num_blocks * 4 * (64 * 64 + kv + DRAFT_REST)
    least, most = (num_blocks * 4 * SCORES * 4, num_blocks * 3 * HEAD + 4 * SCORES * sum(20 + 4 for _ in range(5)))
    assert 2 * (fixed + least) < found < 2 * (fixed + most)
    anchors = [
        sample_anchors(np.array([0.0] + [1.0] * (length - 2) + [0.0]), TokenRandom(0, number), 2)
        for number, length in enumerate(LENGTHS)
    ]
    pairs = sum(4 * (anchor + 4) for each in anchors for anchor in each)
    predicted = sum(min(3, length - anchor) for each, length in zip(anchors, LENGTHS, strict=True) for anchor in each)
    assert found == 2 * (fixed + SCORES * pairs + predicted * HEAD)
    own = fixed - trunk - fc + SCORES * pairs
    assert run_draft(worker, "dflash") == found + 2 * (fc + 2 * own + predicted * HEAD)


def test_a_critic_has_a_head_of_one_number(tiny_models: dict[str, Path]) -> None:
    worker, by_hand = a_worker(tiny_models["qwen3"]), BY_HAND["qwen3"]
    worker.create_run(RunSpec("run", LoraConfig(rank=RANK, seed=0), role="critic"))
    inputs = [{"returns": np.ones(len(each.tokens), np.float32)} for each in data()]
    returns = tuple(Datum(each.tokens, of_each) for each, of_each in zip(data(), inputs, strict=True))
    request = ForwardBackwardRequest("run", 1, returns, "value_mse", forward_only=True)
    (answer,) = worker.run_pass((OperationPart(0, request),))
    assert isinstance(answer, ForwardBackwardOutput)
    assert answer.metrics["model_flops:sum"] == by_hand.forward() - 2 * TOKENS * (HEAD + HEAD_ADAPTER - 64)


# What a token attends to


@pytest.mark.parametrize("view", [View(), View(window=5), View(window=100), View(part_size=4)], ids=str)
def test_pairs_are_those_of_the_mask(view: View) -> None:
    lengths = np.array([1, 4, 5, 6, 13, 40])
    found = 0
    for length in lengths:
        for query in range(length):
            keys = range(query + 1)
            if view.window is not None:
                keys = keys[-view.window :]
            if view.part_size is not None:
                keys = [key for key in keys if key // view.part_size == query // view.part_size]
            found += len(keys)
    assert num_pairs(view, lengths) == found
    assert num_pairs(view, lengths[1:]) != found


# By torch


def shape_of(directory: Path) -> ModelShape:
    shape = read_model(ServedModel("m", str(directory)))
    assert isinstance(shape, ModelShape)
    return shape


def forward(shape: ModelShape, lengths: list[int]) -> float:
    return ModelFlops(shape).of_pass(np.array(lengths), OwnFlops())


# What transformers computes for each token that the model does not need: all experts of Llama 4 (three more), and an
# indexer in sequences of which it chooses all tokens (queries, keys and weights of its heads, their scores and sum).
INDEXER = 2 * (16 * 16 * 24 + 16 * 64 + 16 * 64) + 2 * 16 * (16 + 1)
MORE = {"llama4": 3 * 2 * 3 * 64 * 32, "deepseek_v32": 2 * INDEXER, "glm_moe_dsa": INDEXER}
COMPARED = sorted({*KINDS, *MORE_KINDS, *FAMILY_KINDS, *PLAIN_KINDS} - {*RECURRENT_KINDS})


@pytest.mark.parametrize("kind", COMPARED)
def test_a_token_takes_the_operations_that_torch_counts(kind: str, tmp_path: Path) -> None:
    """Sequences of one token, in which attention masks nothing. transformers runs recurrences in another form."""
    config, num_tokens = tiny_config(kind), 8
    config.save_pretrained(tmp_path)
    shape = shape_of(tmp_path)
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(num_tokens)[:, None], use_cache=False)
    found = counter.get_total_flops()
    assert found == forward(shape, [1] * num_tokens) + num_tokens * MORE.get(kind, 0)
    fewer = replace(shape, layers=shape.layers[1:])
    assert found != forward(fewer, [1] * num_tokens) + num_tokens * MORE.get(kind, 0)


def test_a_dense_model_takes_the_operations_that_torch_counts(tmp_path: Path) -> None:
    """Forward, and backward of all weights and of adapters by peft, of a sequence of 40 tokens."""
    config, length = tiny_config("qwen3"), 40
    config.save_pretrained(tmp_path)
    counts, lengths = ModelFlops(shape_of(tmp_path)), np.array([length])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.arange(length)[None] + 3

    def counted() -> list[int]:
        """Returns the operations of forward and of backward, without those of the masked half of attention."""
        with FlopCounterMode(display=False) as of_forward:
            loss = cross_entropy(model(tokens, use_cache=False).logits[0], tokens[0])
        with FlopCounterMode(display=False) as of_backward:
            loss.backward()
        masked = 2 * 2 * SCORES * (length**2 - length * (length + 1) // 2)
        return [of_forward.get_total_flops() - masked, of_backward.get_total_flops() - 2 * masked]

    def ours(own: OwnFlops) -> list[float]:
        of_forward = counts.of_pass(lengths, own)
        return [of_forward, counts.of_pass(lengths, own, length) - of_forward]

    # The rotations of transformers have a product, of positions and frequencies, which we do not count.
    assert counted() == pytest.approx(ours(OwnFlops(trains_base=True)), rel=1e-3)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    with warnings.catch_warnings():
        quieten_peft()
        model = get_peft_model(model, PeftConfig(r=RANK, target_modules=targets))
    # Else the first layer has no gradients by its inputs.
    model.enable_input_require_grads()
    own = OwnFlops(trunk=2 * BY_HAND["qwen3"].adapter, head=2 * HEAD_ADAPTER)
    found = counted()
    assert found == pytest.approx(ours(own), rel=1e-3)
    assert found != pytest.approx(ours(replace(own, trunk=0.99 * own.trunk)), rel=1e-3)
    assert found != pytest.approx(ours(replace(own, trains_base=True)), rel=1e-3)


# Samples


@pytest.mark.parametrize("adapter_id", [None, "sampler"])
def test_samples_need_each_token_once(adapter_id: str | None, tiny_models: dict[str, Path]) -> None:
    """Two samples share their prompt of 5 tokens, and have 4 each, of which the last one does not run."""
    worker, by_hand = a_worker(tiny_models["qwen3"]), BY_HAND["qwen3"]
    worker.create_run(RunSpec("run", LoraConfig(rank=RANK, seed=0)))
    worker.copy_adapter("run", "sampler")
    params = SamplingParams(max_tokens=4, seed=0)
    job = SampleJob("job", adapter_id, np.arange(3, 8, dtype=np.int32), params, (), (), num_samples=2)
    result = worker.sample_slice(SamplingSlice((job,), (), 1000.0))
    while result.num_active:
        result = worker.sample_slice(SamplingSlice((), (), 1000.0))
    assert isinstance(result.finished["job"], SampleResponse)
    num_run, num_sampled, pairs = 5 + 2 * 3, 2 * 4, 5 * 6 // 2 + 2 * (6 + 7 + 8)
    has_adapter = adapter_id is not None
    of_trunk = by_hand.weights + has_adapter * by_hand.adapter
    of_head = HEAD + has_adapter * HEAD_ADAPTER
    assert counted_samples(worker) == 2 * (num_run * of_trunk + pairs * by_hand.scores + num_sampled * of_head)


def counted_samples(worker: Worker) -> float:
    """Returns the operations of the slices so far."""
    return sum(flops for flops, _ in worker._speed._recent["sampling"])


# Speed


def test_utilization_is_a_part_of_the_peak() -> None:
    speed = DeviceSpeed(peak=100.0)
    assert speed.utilization().training is None
    speed.record("training", 50.0, seconds=1.0)
    speed.record("training", 10.0, seconds=2.0)
    assert speed.utilization().training == pytest.approx(60 / 300)
    assert speed.utilization().sampling is None


def test_a_worker_reports_its_peak_and_the_utilization_of_passes(tiny_models: dict[str, Path]) -> None:
    worker = a_worker(tiny_models["qwen3"])
    before = worker.utilization()
    assert before.peak_flops > 1e8 and before.training is None
    worker.create_run(RunSpec("run", LoraConfig(rank=RANK, seed=0)))
    of_pass = run(worker, "run")["mfu:mean"]
    # A model so small is far from the speed of large products.
    assert 0 < of_pass < 0.9
    assert worker.utilization().training == pytest.approx(of_pass)
