"""Mamba-2 in every layout: the same losses, gradients and samples as on one rank."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.shapes.layouts.checks import check_layout
from trainhouse.workers.shapes.layouts.parameters import parameters
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model
from trainhouse.workers.shapes.parts import Mamba

from ...drawn import Drawn, as_drawn
from ...tiny import tiny_config, tiny_model
from .training import ADAM, greedy, layout, supervised

# With Mamba-2 and attention in turn, side by side, and in layers of one part each.
KINDS = ("granite4", "falcon_h1", "nemotron_h")
# With experts as well, of hidden states or of latent vectors.
SPARSE = ("granite4_moe", "nemotron_h_moe", "nemotron_h_latent")
# In which tp cannot divide Mamba-2: each rank has it whole, and those along sp copies of b and c.
ONE_GROUP = ("granite4_one_group", "granite4_moe_one_group", "falcon_h1_one_group")
LAYOUTS = ("tp=2", "sp=2", "fsdp=2", "tp=2 replicated mamba")
CORE = (("falcon_h1_one_group", "tp=2"), ("falcon_h1_one_group", "sp=2"), ("nemotron_h_latent", "ep=2,tp=2"))
MATRIX = [(kind, name) for kind in (*KINDS, *SPARSE) for name in LAYOUTS]
MATRIX += [(kind, name) for kind in SPARSE for name in ("ep=2", "ep=2,tp=2", "ep=2,fsdp=2", "tp=2 replicated experts")]
MATRIX += [(kind, name) for kind in ONE_GROUP for name in ("tp=2", "sp=2", "sp=4", "fsdp=2,tp=2", "sp=2,tp=2")]
MATRIX += [("granite4_moe_one_group", "ep=2,tp=2"), *((kind, "sp=4") for kind in ("granite4", "falcon_h1"))]
MORE = [case for case in MATRIX if case not in CORE]

LORA = LoraConfig(rank=4, seed=11)
TOLERANCE = 1e-5


class Outcome(NamedTuple):
    loss: float
    logprobs: np.ndarray
    gradients: dict[str, np.ndarray]
    samples: list[Drawn]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [*CORE, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)])
def test_layouts_train_and_sample_as_one_rank(kind: str, name: str, tmp_path: Path) -> None:
    model = tiny_model(kind, tmp_path / "model")
    axes, _, replicated = name.partition(" replicated ")
    spec = replace(ParallelSpec.parse(axes), replicated=(replicated,) if replicated else ())
    wanted, found = (outcome(model, each, tmp_path / str(each.num_ranks)) for each in (SINGLE, spec))
    assert found.samples == wanted.samples
    assert found.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
    assert found.loss != pytest.approx(wanted.loss * 1.0001, rel=TOLERANCE)
    assert np.abs(found.logprobs - wanted.logprobs).max() < TOLERANCE
    assert found.gradients.keys() == wanted.gradients.keys()
    for matrix, gradient in wanted.gradients.items():
        size = np.linalg.norm(gradient)
        assert np.linalg.norm(found.gradients[matrix] - gradient) < TOLERANCE * size
        assert np.linalg.norm(found.gradients[matrix] * 1.0001 - gradient) > TOLERANCE * size


def outcome(model: Path, spec: ParallelSpec, directory: Path, lora: LoraConfig = LORA) -> Outcome:
    """Returns a pass's results after a step that makes no factor zero, and greedy samples."""
    directory.mkdir()
    with layout(model, spec, directory) as where:
        where.call("create_run", RunSpec("a", lora))
        where.run_pass(supervised("a", 1, 12, 25))
        where.call("apply_steps", (OptimizerStep("a", ADAM.model_copy(update={"learning_rate": 3e-2})),))
        exported = where.saved("a")
        (output,) = where.run_pass(supervised("a", 7, 9, 30, 17, 4))
        assert isinstance(output, ForwardBackwardOutput), output
        gradients = load_file(where.snapshot("a") / "window.safetensors")
        where.call("load_adapter", "s", str(exported))
        samples = where.sample(*[greedy(str(length), "s", length) for length in (3, 23)])
    logprobs = np.concatenate([np.asarray(each["logprobs"]) for each in output.loss_fn_outputs])
    drawn = [as_drawn(samples[job_id].sequences[0]) for job_id in ("3", "23")]
    return Outcome(output.metrics["loss:sum"], logprobs, gradients, drawn)


@pytest.mark.parametrize("axes", ["tp=4", "sp=4", "sp=2,tp=4"])
def test_more_ranks_than_groups_are_allowed(axes: str) -> None:
    check_layout(ParallelSpec.parse(axes), shape_of("nemotron_h", num_key_value_heads=4))


def test_ranks_along_sp_need_a_head_each() -> None:
    check_layout(ParallelSpec(sp=8), shape_of("granite4_one_group"))
    with pytest.raises(ValueError, match="sp=16 does not divide 8 state-space heads"):
        check_layout(ParallelSpec(sp=16), shape_of("granite4_one_group"))
    with pytest.raises(ValueError, match="sp=3 does not divide 2 groups of state-space heads"):
        check_layout(ParallelSpec(sp=3), shape_of("granite4"))


def test_ranks_have_whole_what_tp_cannot_divide() -> None:
    """The control has two groups, which tp divides."""
    two, one = shape_of("falcon_h1"), shape_of("falcon_h1_one_group")
    spec = ParallelSpec(tp=2)
    assert (two.own_layout(spec), one.own_layout(spec)) == (spec, ParallelSpec(tp=2, replicated=("mamba",)))
    assert one.own_layout(SINGLE) == SINGLE
    load = Workload(longest=64)
    planned = {each.pattern: each.own_shape for each in parameters(one, one.own_layout(spec))}
    (mixer,) = {mixer for mixer in one.mixers if isinstance(mixer, Mamba)}
    assert planned["model.layers.*.mamba.in_proj.weight"] == (sum(mixer.sections), one.hidden)
    assert estimate(one, one.own_layout(spec), load).base > estimate(two, spec, load).base


def shape_of(kind: str, **overrides: object) -> ModelShape:
    shape = describe_model("m", tiny_config(kind, **overrides).to_dict())
    assert isinstance(shape, ModelShape)
    return shape
