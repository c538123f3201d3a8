"""Memory of drafts on ranks that shard their gradients and moments."""

from pathlib import Path

import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import DraftConfig
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec

from .case import Case
from .test_drafts import ALGORITHMS, draft_request
from .training import ADAM, Layout, layout


class Bytes:
    """Bytes per parameter of a draft on each rank: when new, with pending gradients, and after two steps."""

    def __init__(self, where: Layout, algorithm: str) -> None:
        self.num_parameters = where.call(
            "create_run", RunSpec("draft", DraftConfig(algorithm=algorithm), "draft")
        ).num_parameters
        self.new = self._now(where)
        self._learn(where, algorithm)
        self.with_gradients = self._now(where)
        where.call("apply_steps", (OptimizerStep("draft", ADAM),))
        self._learn(where, algorithm)
        where.call("apply_steps", (OptimizerStep("draft", ADAM),))
        self.after_steps = self._now(where)

    def _learn(self, where: Layout, algorithm: str) -> None:
        (output,) = where.run_pass(draft_request(algorithm, 0, 12, 12))
        assert isinstance(output, ForwardBackwardOutput), output

    def _now(self, where: Layout) -> list[float]:
        return [memory["drafts_on_device"] / self.num_parameters for memory in where.answers("memory")]


@pytest.mark.parametrize(
    "spec", ["tp=2", *(pytest.param(spec, marks=pytest.mark.full) for spec in ("fsdp=2", "sp=2,tp=2"))]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_and_moments_are_sharded_and_weights_are_whole(
    algorithm: str, spec: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    parallel, near = ParallelSpec.parse(spec), lambda number: pytest.approx(number, rel=0.02)
    with layout(tiny_models["qwen3"], SINGLE, tmp_path) as alone:
        one_rank = Bytes(alone, algorithm)
    assert one_rank.new == [near(4)] and one_rank.with_gradients == [near(8)]
    # The buffers of consumed gradients stay allocated for the next ones.
    assert one_rank.after_steps == [near(16)]
    with layout(tiny_models["qwen3"], parallel, tmp_path) as many:
        many_ranks = Bytes(many, algorithm)
    num = parallel.num_ranks
    assert many_ranks.new == num * [near(4)]
    assert many_ranks.with_gradients == num * [near(4 + 4 / num)]
    assert many_ranks.after_steps == num * [near(4 + 8 / num)]
    assert many_ranks.after_steps != num * [near(4 + 8)]


@pytest.mark.parametrize(
    "case",
    [
        Case("sp=2"),
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in (Case("tp=2"), Case("fsdp=2,sp=2"), Case("fsdp=2,tp=2", draft="sp=2,replicas=2"))
        ),
    ],
    ids=str,
)
def test_float32_masters_of_bfloat16_weights_are_sharded(
    case: Case, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    num = case.parallel.num_ranks
    with layout(tiny_models["qwen3"], case.parallel, tmp_path, dtype="bfloat16", **case.options) as many:
        found = Bytes(many, "eagle3")
    for ours, whole, sharded in ((found.new, 2, 4), (found.with_gradients, 2, 8), (found.after_steps, 2, 12)):
        assert ours == num * [pytest.approx(whole + sharded / num, rel=0.02)]
    assert found.after_steps != num * [pytest.approx(2 + 4 + 8 / num, rel=0.02)]


def test_tp_ranks_hold_parts_of_the_weights(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """The target is gathered and has whole weights."""
    case = Case("fsdp=2", draft="tp=2")
    with layout(tiny_models["qwen3"], case.parallel, tmp_path, **case.options) as many:
        found = Bytes(many, "dflash")
        with pytest.raises(
            OperationError, match="tp=2 of this server cannot divide a draft's gate_proj evenly: it has 33"
        ):
            many.call("create_run", RunSpec("odd", DraftConfig(algorithm="dflash", intermediate_size=33), "draft"))
    # fc and norms are not split.
    assert found.new == 2 * [pytest.approx(4 * 0.6, abs=0.4)]
