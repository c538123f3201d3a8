"""No DTensor takes part in passes, backward passes and decode steps, and ranks share out the norms of all families."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from .case import Case
from .dtensor_guard import DTensorGuard
from .test_critics import valued
from .test_drafts import ALGORITHMS, draft_request
from .test_stored_features import create_draft, referring
from .training import ADAM, Layout, greedy, layout, supervised

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
    with layout(tiny_models[kind], ParallelSpec.parse(spec), tmp_path) as where:
        assert not any(where.probe(DTensorGuard.num_dtensors))
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=3, train_attn=kind != "nemotron_h_latent")))
        assert_passes(where)
        assert_samples(where)
        of_passes, of_steps = (where.probe(DTensorGuard.seen, during) for during in ("pass", "decode"))
    for seen in (*of_passes, *of_steps):
        assert len(seen.all) > 10, "the pass ran where no operation was seen"
        assert not seen.of_dtensors
    assert num_normed(of_passes) - sum(LENGTHS) in range(where.spec.num_ranks), "padding, and no token twice"


def train(where: Layout, request: ForwardBackwardRequest) -> None:
    """Runs a pass, and a step if the pass has a backward."""
    (output,) = where.run_pass(request)
    assert isinstance(output, ForwardBackwardOutput), output
    if not request.forward_only:
        (metrics,) = where.call("apply_steps", (OptimizerStep(request.model_id, ADAM),))
        assert isinstance(metrics, dict), metrics


def full_policy(where: Layout, directory: Path) -> None:
    where.call("create_run", RunSpec("a", FullConfig(seed=1)))
    train(where, supervised("a", 1, *LENGTHS))
    where.call("copy_adapter", "a", "sampler")
    assert_samples(where, "sampler")


def full_critic(where: Layout, directory: Path) -> None:
    where.call("create_run", RunSpec("critic", FullConfig(seed=1), "critic"))
    train(where, valued(1, *LENGTHS))


def critic(where: Layout, directory: Path) -> None:
    where.call("create_run", RunSpec("critic", LoraConfig(rank=4, seed=1), "critic"))
    train(where, valued(1, *LENGTHS))


def reference(where: Layout, directory: Path) -> None:
    where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=1), "reference"))
    train(where, supervised("a", 1, *LENGTHS, forward_only=True))


def drafts(where: Layout, directory: Path) -> None:
    """Trains drafts on features of this pass and on stored ones, and samples with them."""
    for algorithm in ALGORITHMS:
        create_draft(where, algorithm)
        train(where, draft_request(algorithm, 1, *LENGTHS))
        train(where, referring(where, draft_request(algorithm, 2, *LENGTHS), directory / algorithm))
        saved = directory / f"saved-{algorithm}"
        saved.mkdir()
        where.call("save_run", "draft", str(saved), False)
        where.call("drop_run", "draft")
        where.call("load_draft", algorithm, str(saved))
        assert_samples(where, draft_id=algorithm)


WORKS: Mapping[str, Callable[[Layout, Path], None]] = {
    each.__name__: each for each in (full_policy, full_critic, critic, reference, drafts)
}
WORK_CASES = (
    *((name, Case(spec)) for name in WORKS for spec in ("tp=2", "fsdp=2", "sp=2")),
    *((name, Case(spec, "qwen3_moe")) for name in WORKS for spec in ("ep=2", "fsdp=2,ep=2")),
    *(("drafts", Case("fsdp=2", draft=each)) for each in ("tp=2", "sp=2")),
    *((name, Case("fsdp=2,tp=2")) for name in WORKS),
    *(("full_policy", Case("fsdp=2", zero_stage="2")),),
)
SHORT_CASES = (("full_policy", Case("fsdp=2")), ("drafts", Case("tp=2")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(*each, marks=() if each in SHORT_CASES else pytest.mark.full) for each in WORK_CASES],
    ids=str,
)
def test_no_dtensor_takes_part_in_the_work_of_other_models(
    name: str, case: Case, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = case.model(tiny_models, tmp_path)
    with layout(model, case.parallel, tmp_path, **case.options) as where:
        where.probe(DTensorGuard)
        WORKS[name](where, tmp_path)
        assert not any(where.probe(DTensorGuard.num_dtensors))
        for during in ("pass", "step", *(("decode",) if name in ("full_policy", "drafts") else ())):
            for seen in where.probe(DTensorGuard.seen, during):
                assert len(seen.all) > 10 or (name, during) == ("reference", "step")
                assert not seen.of_dtensors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "during"),
    [("full_policy", "backward"), pytest.param("drafts", "decode", marks=pytest.mark.full)],
)
def test_a_dtensor_in_the_work_of_other_models_would_show(
    name: str, during: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec(tp=2), tmp_path) as where:
        where.probe(DTensorGuard.use_dtensors, during)
        WORKS[name](where, tmp_path)
        shown = where.probe(DTensorGuard.seen, "decode" if during == "decode" else "pass")
        assert all("aten.mul.Tensor" in seen.of_dtensors for seen in shown)


def num_normed(of_ranks: Sequence[Any]) -> int:
    """Returns the tokens that the norms of a layer took on all ranks together."""
    assert all(len(seen.normed_tokens) == 1 for seen in of_ranks), "each rank runs one micro-batch"
    return sum(max(seen.normed_tokens) for seen in of_ranks)


def test_norms_of_whole_rows_would_show(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec(tp=2), tmp_path, tp_activations="whole") as where:
        where.probe(DTensorGuard)
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=3)))
        assert_passes(where)
        assert num_normed(where.probe(DTensorGuard.seen, "pass")) == 2 * sum(LENGTHS)


@pytest.mark.parametrize("during", ["forward", "backward", "decode"])
def test_an_operation_on_a_dtensor_would_show(during: str, tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec(tp=2), tmp_path) as where:
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=3)))
        where.probe(DTensorGuard.use_dtensors, during)
        assert_passes(where)
        assert_samples(where)
        shown = {
            each: [seen.of_dtensors for seen in where.probe(DTensorGuard.seen, each)] for each in ("pass", "decode")
        }
    expected = "decode" if during == "decode" else "pass"
    assert all("aten.mul.Tensor" in of_rank for of_rank in shown.pop(expected))
    assert not any(of_rank for of_ranks in shown.values() for of_rank in of_ranks)


def assert_passes(where: Layout) -> None:
    (output,) = where.run_pass(supervised("a", 1, *LENGTHS))
    assert isinstance(output, ForwardBackwardOutput), output


def assert_samples(where: Layout, adapter_id: str | None = None, draft_id: str | None = None) -> None:
    """Ranks along sp and fsdp sample apart, so that each needs a job."""
    jobs = [greedy(f"{length}", adapter_id, length, num_tokens=4) for length in (3, 7, 9, 12)]
    answers = where.sample(*(replace(each, draft_id=draft_id) for each in jobs))
    assert all(isinstance(each, SampleResponse) for each in answers.values()), answers
