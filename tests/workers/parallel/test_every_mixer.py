"""Each kind of mixer and of experts in every layout up to four ranks: as on one rank, or refused before loading.

test_mamba.py has the layouts of Mamba-2, test_layouts.py those of plain softmax attention.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.models import ExpertFactors, LoraConfig
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.layouts.checks import check_layout
from trainhouse.workers.shapes.model_shape import describe_model

from ...tiny import tiny_config, tiny_model
from .case import HEADS
from .test_mamba import Outcome, outcome

PRODUCTS = ("sp=2,tp=2", "fsdp=2,tp=2", "fsdp=2,sp=2", "ep=2,tp=2", "ep=2,sp=2", "fsdp=2,ep=2", "replicas=2,tp=2")
SPECS = ("tp=2", "sp=2", "ep=2", "fsdp=2", "tp=4", "sp=4", "ep=4", *PRODUCTS)
# Sinks and biases of experts; gates and the gated delta rule; a partial rotation and norms of heads; latent attention,
# also with an indexer; attention within parts; keys and values of other layers; gates of another number of heads.
KINDS = ("gpt_oss", "qwen3_5", "qwen3_5_moe", "minimax_m2", "deepseek_v3", "glm_moe_dsa", "llama4", "gemma4", "laguna")
# Numbers of heads that two ranks along sp do not share out: keys and values take a ring.
RINGS = ("gpt_oss", "minimax_m2", "afmoe")
# Further layouts of Mamba-2 and of gates; experts that share no matrix.
MORE = [(kind, spec) for kind in ("falcon_h1", "nemotron_h_latent") for spec in ("fsdp=2,sp=2", "replicas=2,sp=2")]
MORE += [("deepseek_v3", "sp=3"), ("afmoe", "sp=2"), ("afmoe", "tp=2")]

TOLERANCE = 1e-5
# Of gradients, relative to their norm, where those of peft in float32 are up to 1.3e-5 away from those in float64.
ROUNDED = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "gemma4"), 5e-5)


EVERY = [(kind, spec) for kind in KINDS for spec in SPECS]
# Without experts there is no ep; sp and tp share out heads, sp=4 and tp=4 more than those of these tiny models.
REFUSED = [
    ("gpt_oss", "tp=4"),
    ("qwen3_5", "ep=2"),
    ("qwen3_5", "tp=4"),
    ("qwen3_5", "sp=4"),
    ("qwen3_5", "ep=4"),
    ("qwen3_5", "sp=2,tp=2"),
    ("qwen3_5", "ep=2,tp=2"),
    ("qwen3_5", "ep=2,sp=2"),
    ("qwen3_5", "fsdp=2,ep=2"),
    ("qwen3_5_moe", "tp=4"),
    ("qwen3_5_moe", "sp=4"),
    ("qwen3_5_moe", "sp=2,tp=2"),
    ("minimax_m2", "tp=4"),
    ("llama4", "tp=4"),
    ("llama4", "sp=4"),
    ("llama4", "sp=2,tp=2"),
    ("gemma4", "ep=2"),
    ("gemma4", "tp=4"),
    ("gemma4", "ep=4"),
    ("gemma4", "ep=2,tp=2"),
    ("gemma4", "ep=2,sp=2"),
    ("gemma4", "fsdp=2,ep=2"),
    ("laguna", "tp=4"),
]
ALLOWED = [case for case in (*EVERY, *MORE) if case not in REFUSED]


class OneRank(dict[tuple[str, str, str], tuple[Path, Outcome]]):
    """The model of a case, and its outcome on one rank; by kind, factors of experts and heads."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, case: tuple[str, str, str]) -> tuple[Path, Outcome]:
        kind, factors, heads = case
        directory = self._root / "-".join(case)
        shape: Mapping[str, Any] = HEADS.get(heads, {})
        model = tiny_model(kind, directory / "model", **{name: shape[name] for name in shape if name.startswith("num")})
        self[case] = model, outcome(model, SINGLE, directory / "one", lora_of(factors))
        return self[case]


def lora_of(factors: Any) -> LoraConfig:
    return LoraConfig(rank=4, seed=11, expert_factors=factors)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(tmp_path_factory.mktemp("one_rank"))


def assert_same_as_on_one_rank(
    one_rank: OneRank, directory: Path, kind: str, spec: str, factors: ExpertFactors = "shared", heads: str = "4x2"
) -> None:
    model, wanted = one_rank[kind, factors, heads]
    found = outcome(model, ParallelSpec.parse(spec), directory / "ranks", lora_of(factors))
    assert found.samples == wanted.samples
    assert found.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
    assert np.abs(found.logprobs - wanted.logprobs).max() < TOLERANCE
    assert found.gradients.keys() == wanted.gradients.keys()
    of_gradients = ROUNDED.get(kind, TOLERANCE)
    for name, gradient in wanted.gradients.items():
        size = np.linalg.norm(gradient)
        assert np.linalg.norm(found.gradients[name] - gradient) <= of_gradients * size, name
        assert np.linalg.norm(found.gradients[name] * 1.0001 - gradient) > of_gradients * size or not size


@pytest.mark.parametrize(("kind", "spec"), ALLOWED)
def test_layouts_that_a_mixer_allows_are_accepted_before_loading(kind: str, spec: str) -> None:
    check_layout(ParallelSpec.parse(spec), describe_model("m", tiny_config(kind).to_dict()))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "spec"), ALLOWED)
def test_layouts_of_a_mixer_equal_one_rank(kind: str, spec: str, one_rank: OneRank, tmp_path: Path) -> None:
    assert_same_as_on_one_rank(one_rank, tmp_path, kind, spec)


@pytest.mark.full
@pytest.mark.parametrize("spec", ["ep=2", "tp=2", "fsdp=2", "ep=2,tp=2", "fsdp=2,ep=2"])
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_experts_with_their_own_factors_equal_one_rank(kind: str, spec: str, one_rank: OneRank, tmp_path: Path) -> None:
    assert_same_as_on_one_rank(one_rank, tmp_path, kind, spec, "each")


@pytest.mark.full
@pytest.mark.parametrize("spec", ["sp=2", "fsdp=2,sp=2"])
@pytest.mark.parametrize("kind", RINGS)
def test_mixers_in_a_ring_equal_one_rank(kind: str, spec: str, one_rank: OneRank, tmp_path: Path) -> None:
    assert_same_as_on_one_rank(one_rank, tmp_path, kind, spec, heads="6x3")


@pytest.mark.parametrize(("kind", "spec"), REFUSED)
def test_layouts_that_a_mixer_does_not_allow_are_refused_before_loading(kind: str, spec: str, tmp_path: Path) -> None:
    tiny_config(kind).save_pretrained(tmp_path)  # without weights
    config = WorkerConfig(ServedModel("m", str(tmp_path)), device="cpu", parallel=ParallelSpec.parse(spec))
    with pytest.raises(ValueError, match=r"[tse]p=\d(: m has no experts| does not divide \d [-/ \w]*heads\b.* of m\b)"):
        asyncio.run(WorkerDispatch(DispatchConfig((config,))).start(lambda _: None))
