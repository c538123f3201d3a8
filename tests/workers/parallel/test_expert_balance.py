"""The metrics of balance between experts, under every layout, against a count of what transformers' routers choose."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import OperationPart, OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from ..expert_balance import balance_metrics, balance_of, tokens_by_expert
from ..peft_reference import PeftReference
from .training import ADAM, RUNS, Layout, layout, reinforced, supervised

LENGTHS = {"a": (9, 30, 17, 4, 12), "b": (21, 5, 8)}
# Micro-batches of different sizes; a longer sequence is one of its own.
MICRO_BATCH_TOKENS = 24

CORE = (
    *(("qwen3_moe", spec) for spec in ("single", "replicas=2", "ep=2", "tp=2", "sp=2", "fsdp=2")),
    *(("deepseek_v3", spec) for spec in ("single", "sp=2")),
    *(("gpt_oss", spec) for spec in ("single", "tp=2")),
)
MORE = (
    *(("deepseek_v3", spec) for spec in ("replicas=2", "ep=2", "tp=2", "fsdp=2")),
    *(("gpt_oss", spec) for spec in ("replicas=2", "ep=2", "sp=2", "fsdp=2")),
    *(("qwen3_moe", spec) for spec in ("ep=2,tp=2", "sp=2,tp=2", "fsdp=2,sp=2", "sp=4", "replicas=2,ep=2")),
    *((kind, spec) for kind in ("gemma4_moe", "llama4", "ernie4_5_moe") for spec in ("single", "tp=2", "sp=2", "ep=2")),
    *(("nemotron_h_latent", spec) for spec in ("single", "ep=2")),
)


@pytest.mark.parametrize(("kind", "spec"), [*CORE, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_balance_is_that_of_transformers_routers(
    kind: str, spec: str, activations: str, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    """Two runs share micro-batches, and each has the numbers of its own tokens by its own adapter."""
    options = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "activations": activations}
    with layout(tiny_models[kind], ParallelSpec.parse(spec), tmp_path, **options) as where:
        exported = trained(where)
        requests = [supervised("a", 7, *LENGTHS["a"]), reinforced("b", 8, *LENGTHS["b"])]
        both = [balance(each) for each in where.run_pass(*requests)]
        forward = [balance(each) for each in where.run_pass(*(replace(each, forward_only=True) for each in requests))]
        # Fewer data than ranks.
        (lone,) = where.run_pass(replace(requests[0], data=requests[0].data[:1]))
        in_parts = where.run_parts(*parts_of(requests[0], 3))[-1]
    counts = [
        routed(tiny_models[kind], exported[run_id], each.data) for run_id, each in zip("ab", requests, strict=True)
    ]
    wanted = [balance_metrics(each) for each in counts]
    assert both == forward == [pytest.approx(each, rel=1e-12) for each in wanted]
    assert balance(in_parts) == pytest.approx(wanted[0], rel=1e-12)
    of_first = routed(tiny_models[kind], exported["a"], requests[0].data[:1])
    assert balance(lone) == pytest.approx(balance_metrics(of_first), rel=1e-12)
    # Controls: the other run's numbers, a sequence that is counted twice, and a token at another expert would show.
    assert wanted[0] != pytest.approx(wanted[1], rel=1e-3)
    twice = balance_metrics([whole + first for whole, first in zip(counts[0], of_first, strict=True)])
    assert wanted[0] != pytest.approx(twice, rel=1e-3)
    counts[0][-1][counts[0][-1].argmax()] += 1
    counts[0][-1][counts[0][-1].argmin()] -= 1
    assert wanted[0] != pytest.approx(balance_metrics(counts[0]), rel=1e-3)


def test_models_without_counted_experts_send_no_balance(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec(), tmp_path) as where:
        trained(where)
        (output,) = where.run_pass(supervised("a", 7, 9))
        assert balance(output) == {}


def trained(where: Layout) -> dict[str, Path]:
    """Trains two runs by a step, so that their routers get other inputs, and returns where they are saved."""
    for run_id, lora in RUNS.items():
        where.call("create_run", RunSpec(run_id, lora))
    where.run_pass(supervised("a", 1, 12, 25), supervised("b", 2, 14))
    where.call("apply_steps", tuple(OptimizerStep(run_id, ADAM) for run_id in RUNS))
    return {run_id: where.saved(run_id) for run_id in RUNS}


def parts_of(request: ForwardBackwardRequest, first_size: int) -> list[OperationPart]:
    first, last = request.data[:first_size], request.data[first_size:]
    return [
        OperationPart(1000, replace(request, data=first), 0, False),
        OperationPart(1000, replace(request, data=last), first_size, True),
    ]


def balance(output: object) -> dict[str, float]:
    assert isinstance(output, ForwardBackwardOutput), output
    return balance_of(dict(output.metrics))


def routed(model: Path, exported: Path, data: Sequence[Datum]) -> list[np.ndarray]:
    return tokens_by_expert(PeftReference(model, exported).model, [datum.tokens for datum in data])
