"""A critic and a policy learn under each layout as on one rank."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.models import FullConfig, LoraConfig, TrainingConfig
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec

from .case import Case
from .exchanges import Exchanges
from .training import ADAM, Layout, close, distance, largest_error, layout, supervised

CASES = [
    Case("tp=2"),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            Case("tp=2", tp_activations="whole"),
            *(Case(spec) for spec in ("replicas=2", "fsdp=2", "sp=2", "sp=2,tp=2", "fsdp=2,sp=2")),
            *(Case(spec, "qwen3_moe") for spec in ("ep=2", "ep=2,tp=2")),
        )
    ),
]


def valued(seed: int, *lengths: int) -> ForwardBackwardRequest:
    random = np.random.default_rng(seed)
    data = [
        Datum(
            random.integers(3, 512, length).astype(np.int32),
            {name: random.normal(size=length).astype(np.float32) for name in ("returns", "old_values")},
        )
        for length in lengths
    ]
    return ForwardBackwardRequest("critic", 1, tuple(data), "value_mse")


class Trained:
    """Two steps of both with two accumulations each: their losses and values, and the saved critic."""

    def __init__(self, where: Layout, training: TrainingConfig) -> None:
        """training: config of the critic."""
        where.call("create_run", RunSpec("critic", training, "critic"))
        where.call("create_run", RunSpec("a", LoraConfig(rank=4, seed=2)))
        self.losses: list[float] = []
        self.values: list[np.ndarray] = []
        for step in range(2):
            for seed, lengths in ((step, (9, 30, 4)), (step + 7, (11,))):
                outputs = where.run_pass(valued(seed, *lengths), supervised("a", seed, 12, 5))
                for output in outputs:
                    assert isinstance(output, ForwardBackwardOutput), output
                    self.losses.append(output.metrics["loss:sum"])
                self.values += [each["values"] for each in outputs[0].loss_fn_outputs]  # pyright: ignore
            for metrics in where.call("apply_steps", (OptimizerStep("critic", ADAM), OptimizerStep("a", ADAM))):
                assert isinstance(metrics, dict), metrics
                self.losses.append(metrics["unclipped_grad_l2:mean"])
        self.directory = where.saved("critic")
        stem = "model" if isinstance(training, FullConfig) else "adapter_model"
        paths = self.directory.glob(f"{stem}*.safetensors")
        self.weights = {name: each for path in paths for name, each in load_file(path).items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_critic_learns_as_on_one_rank(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    check(case, LoraConfig(rank=4, seed=1), tiny_models, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", [Case("fsdp=2"), Case("fsdp=2", "qwen3_tied"), Case("fsdp=2,sp=2")], ids=str)
def test_a_full_critic_learns_as_on_one_rank(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    check(case, FullConfig(seed=1), tiny_models, tmp_path)


def check(case: Case, training: TrainingConfig, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model = case.model(tiny_models, tmp_path)
    with layout(model, SINGLE, tmp_path) as alone, layout(model, case.parallel, tmp_path, **case.options) as many:
        theirs, ours = Trained(alone, training), Trained(many, training)
        assert close(ours.losses, theirs.losses) and not close(ours.losses, [1.001 * loss for loss in theirs.losses])
        assert distance(ours.values, theirs.values) <= 1e-4
        assert distance(ours.values, [1.001 * values + 0.001 for values in theirs.values]) > 1e-4
        names = {name.removeprefix("base_model.model.") for name in ours.weights}
        assert {"score.weight", "score.bias"} <= names
        assert largest_error([ours.weights], [theirs.weights]) <= (1e-4 if isinstance(training, LoraConfig) else 1e-3)
        # Each resumes from the other's checkpoint.
        for where, directory in ((alone, ours.directory), (many, theirs.directory)):
            where.call("load_run", "critic", str(directory), True)
        (one,), (other,) = (where.run_pass(valued(3, 21, 6)) for where in (alone, many))
        assert isinstance(one, ForwardBackwardOutput) and isinstance(other, ForwardBackwardOutput)
        assert close([one.metrics["loss:sum"]], [other.metrics["loss:sum"]])
        assert not close([one.metrics["loss:sum"]], [ours.losses[0]])


def test_output_head_is_gathered_only_for_policies(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec.parse("fsdp=2"), tmp_path) as where:
        where.call("create_run", RunSpec("critic", LoraConfig(rank=4), "critic"))
        where.call("create_run", RunSpec("a", LoraConfig(rank=4)))
        gathered = [num_gathered(where, request) for request in (valued(1, 9, 30), supervised("a", 1, 9, 30))]
    assert gathered[0] + 1 == gathered[1]


def num_gathered(where: Layout, request: ForwardBackwardRequest) -> int:
    before = where.probe(Exchanges.num)[0]["all_gather"]
    where.run_pass(request)
    return where.probe(Exchanges.num)[0]["all_gather"] - before
