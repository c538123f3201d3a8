"""Keeping only layer inputs gives bit for bit the same as keeping all activations."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.models.activation_checkpointing import HostOffload, LayerInputs
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig

from ...tiny import tiny_model
from .exchanges import Exchanges
from .training import Layout, Numbers, layout, supervised, train

WAYS = ("keep", "recompute", "offload")
NUM_LAYERS = 3


@dataclass(frozen=True)
class Case:
    spec: str
    kind: str = "qwen3"
    dtype: str = "float32"
    ring: bool = False

    def __str__(self) -> str:
        return f"{self.spec}-{self.kind}-{self.dtype}" + ("-ring" if self.ring else "")


CORE = (Case("single"), Case("tp=2", dtype="bfloat16"), Case("single", "glm_moe_dsa"))
MORE = (
    *(Case("single", kind, dtype) for kind in ("llama", "qwen3_moe") for dtype in ("float32", "bfloat16")),
    *(Case("sp=2"), Case("sp=2", ring=True), Case("fsdp=2"), Case("fsdp=2,tp=2")),
    *(Case(spec, "qwen3_moe") for spec in ("ep=2", "ep=2,sp=2")),
    *(Case(spec, "gemma4") for spec in ("single", "tp=2", "sp=2", "fsdp=2")),
    *(Case(spec, "glm_moe_dsa") for spec in ("tp=2", "sp=2", "fsdp=2")),
    Case("single", "gemma4", "bfloat16"),
)
CASES = [*CORE, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)]


@dataclass
class Trained:
    """exchanges: by kind, per micro-batch and layer."""

    numbers: Numbers
    forward_only: np.ndarray
    exchanges: dict[str, float]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def by_way(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trained]]:
    settings: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3} if case.ring else {}
    if case.kind == "glm_moe_dsa":
        settings = {"indexer_types": ["full", "shared", "full"]}
    if case.kind == "gemma4":
        # The last layer uses the keys and values of the one before it.
        settings = {"layer_types": ["sliding_attention", *["full_attention"] * 2], "num_kv_shared_layers": 1}
    model = tiny_model(case.kind, tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS, **settings)
    found = {}
    for way in WAYS:
        options = {"activations": way, "dtype": case.dtype}
        with layout(model, ParallelSpec.parse(case.spec), tmp_path_factory.mktemp(way), **options) as where:
            numbers = train(where, num_steps=1)
            found[way] = Trained(numbers, forward_only(where), exchanges_of_a_layer(where))
    yield found


def forward_only(where: Layout) -> np.ndarray:
    """Returns log-probabilities of the first training batch under the trained weights."""
    (output,) = where.run_pass(supervised("a", 0, 9, 30, 17, 4, 12, forward_only=True))
    assert isinstance(output, ForwardBackwardOutput), output
    return np.concatenate([each["logprobs"] for each in output.loss_fn_outputs])


def exchanges_of_a_layer(where: Layout) -> dict[str, float]:
    before = where.probe(Exchanges.num)[0]
    where.run_pass(supervised("a", 1, 8, 8, 8, 8))
    after = where.probe(Exchanges.num)[0]
    return {kind: (number - before[kind]) / NUM_LAYERS for kind, number in after.items()}


def all_of(numbers: Numbers) -> list[np.ndarray]:
    matrices = [matrix for named in (*numbers.gradients, *numbers.weights) for matrix in named.values()]
    return [np.array(numbers.losses), np.array(numbers.norms), *numbers.logprobs, *matrices]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recompute", "offload"])
def test_results_are_bit_identical(way: str, by_way: dict[str, Trained]) -> None:
    kept, other = all_of(by_way["keep"].numbers), all_of(by_way[way].numbers)
    assert len(kept) == len(other) > 20
    assert all(map(np.array_equal, kept, other))
    assert np.array_equal(by_way["keep"].forward_only, by_way[way].forward_only)


def test_different_rounding_would_show(case: Case, tmp_path: Path) -> None:
    """Runs without gradients use kernels that round differently."""
    if case.spec != "single":
        return
    model = tiny_model(case.kind, tmp_path / "model")
    with layout(model, ParallelSpec(), tmp_path, dtype=case.dtype) as where:
        train(where, num_steps=1)
        request = supervised("a", 0, 9, 30, 17, 4, 12)
        (output,) = where.run_pass(request)
        assert isinstance(output, ForwardBackwardOutput), output
        with_gradients = np.concatenate([each["logprobs"] for each in output.loss_fn_outputs])
        assert not np.array_equal(forward_only(where), with_gradients)


@pytest.mark.slow
def test_recomputed_layers_repeat_their_exchanges(case: Case, by_way: dict[str, Trained]) -> None:
    spec = ParallelSpec.parse(case.spec)
    more = dict.fromkeys(by_way["keep"].exchanges, 0)
    if spec.tp > 1:
        more["all_gather"] += 2
        more["reduce_scatter"] += 2
    if case.ring:
        more["ring_shift"] += spec.sp - 1
    elif spec.sp > 1:
        more["all_to_all"] += 4
    if case.kind == "glm_moe_dsa":
        of_two_layers = 2 / NUM_LAYERS
        if spec.sp > 1:
            more["all_gather"] += 2 * of_two_layers  # the keys of layers with an indexer, and their choice
        if spec.tp > 1:  # shared experts
            more["all_gather"] += of_two_layers
            more["reduce_scatter"] += of_two_layers
    if spec.ep > 1:
        more["all_to_all"] += 3  # token counts; the tokens, and their outputs
    # With fsdp a layer's weights are gathered for the backward in any case.
    for way in ("recompute", "offload"):
        found = by_way[way].exchanges
        assert {kind: found[kind] - by_way["keep"].exchanges[kind] for kind in found} == pytest.approx(more)


def test_models_run_by_transformers_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path, hidden_act="gelu")
    BaseModel(WorkerConfig(ServedModel("m", str(model))))
    with pytest.raises(ValueError, match="leave out --activations recompute"):
        BaseModel(WorkerConfig(ServedModel("m", str(model)), activations="recompute"))


@pytest.mark.parametrize("host", [None, HostOffload(torch.device("cpu"))])
def test_inputs_are_returned_in_reverse_order(host: HostOffload | None) -> None:
    inputs, states = LayerInputs(host, lambda: pytest.fail("nothing runs")), torch.arange(12.0).view(4, 3)
    for number, state in enumerate(states):
        inputs.keep(number, state)
    for number in (3, 2, 1, 0):
        assert torch.equal(inputs.take(number), states[number])
        assert set(inputs._arriving) == ({number - 1} if host is not None and number else set())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_gets_offloaded_inputs_back() -> None:
    inputs = LayerInputs(HostOffload(torch.device("cuda")), lambda: pytest.fail("nothing runs"))
    states = torch.randn(8, 1 << 20, device="cuda")
    for number, state in enumerate(states):
        inputs.keep(number, state * 1)
    for number in reversed(range(8)):
        assert torch.equal(inputs.take(number), states[number])
