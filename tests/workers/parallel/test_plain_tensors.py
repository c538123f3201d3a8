"""No DTensor takes part in passes, backward passes and decode steps, and ranks share out the norms of all families."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from .guarded_worker import GUARDED
from .training import Layout, greedy, layout, supervised

LENGTHS = (9, 30, 17, 4)
# A family for each kind of mixer, of feed-forward part and of norms, with the axes that its layers treat apart.
CASES = (
    *(("qwen3", spec) for spec in ("tp=2", "sp=2", "fsdp=2")),
    *(("qwen3_moe", spec) for spec in ("ep=2", "tp=2")),
    ("deepseek_v3", "tp=2"),
)
MORE_CASES = (
    *((kind, spec) for kind in ("qwen3_5_moe", "granite4_moe", "gpt_oss", "llama4") for spec in ("tp=2", "ep=2")),
    *((kind, spec) for kind in ("olmo2", "gemma4", "stablelm", "phi3", "cohere2") for spec in ("tp=2", "fsdp=2")),
    *((kind, spec) for kind in ("gemma4_moe", "glm_moe_dsa", "nemotron_h_latent") for spec in ("tp=2", "sp=2", "ep=2")),
    *(("qwen3_5", spec) for spec in ("tp=2", "sp=2", "fsdp=2")),
    *(("qwen3_moe", spec) for spec in ("ep=2,tp=2", "fsdp=2,tp=2")),
)


@pytest.mark.parametrize(
    ("kind", "spec"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)]
)
def test_no_dtensor_takes_part_in_passes_and_decode_steps(
    kind: str, spec: str, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    with layout(tiny_models[kind], ParallelSpec.parse(spec), tmp_path, GUARDED) as where:
        assert not any(where.answers("num_dtensors"))
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=3, train_attn=kind != "nemotron_h_latent")))
        assert_passes(where)
        assert_samples(where)
        of_passes, of_steps = (where.answers("seen", during) for during in ("pass", "decode"))
    for seen in (*of_passes, *of_steps):
        assert len(seen.all) > 10, "the pass ran where no operation was seen"
        assert not seen.of_dtensors
    assert num_normed(of_passes) - sum(LENGTHS) in range(where.spec.num_ranks), "padding, and no token twice"


def num_normed(of_ranks: Sequence[Any]) -> int:
    """Returns the tokens that the norms of a layer took on all ranks together."""
    assert all(len(seen.normed_tokens) == 1 for seen in of_ranks), "each rank runs one micro-batch"
    return sum(max(seen.normed_tokens) for seen in of_ranks)


def test_norms_of_whole_rows_would_show(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec(tp=2), tmp_path, GUARDED, tp_activations="whole") as where:
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=3)))
        assert_passes(where)
        assert num_normed(where.answers("seen", "pass")) == 2 * sum(LENGTHS)


@pytest.mark.parametrize("during", ["forward", "backward", "decode"])
def test_an_operation_on_a_dtensor_would_show(during: str, tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec(tp=2), tmp_path, GUARDED) as where:
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=3)))
        where.call("use_dtensors", during)
        assert_passes(where)
        assert_samples(where)
        shown = {each: [seen.of_dtensors for seen in where.answers("seen", each)] for each in ("pass", "decode")}
    expected = "decode" if during == "decode" else "pass"
    assert all("aten.mul.Tensor" in of_rank for of_rank in shown.pop(expected))
    assert not any(of_rank for of_ranks in shown.values() for of_rank in of_ranks)


def assert_passes(where: Layout) -> None:
    (output,) = where.run_pass(supervised("a", 1, *LENGTHS))
    assert isinstance(output, ForwardBackwardOutput), output


def assert_samples(where: Layout) -> None:
    """Ranks along sp and fsdp sample apart, so that each needs a job."""
    answers = where.sample(*(greedy(f"{length}", None, length, num_tokens=4) for length in (3, 7, 9, 12)))
    assert all(isinstance(each, SampleResponse) for each in answers.values()), answers
