"""The time that plans estimate for drafts: its products and bytes are those of passes, and it decides what is kept."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.planner.drafts.draft_cost import DraftCost, draft_cost, in_draft_pass
from trainhouse.workers.planner.drafts.draft_estimate import sequences_of
from trainhouse.workers.planner.drafts.draft_layouts import draft_layout_that_fits
from trainhouse.workers.planner.drafts.draft_load import draft_load
from trainhouse.workers.planner.exchanges import in_forward_pass
from trainhouse.workers.planner.speeds import NVLINK, PCIE, Link
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import OperationPart, Pass, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker

from ...tiny import tiny_model
from ..parallel.sending_worker import SENDING
from .test_drafts import BLOCKS, UNROLLED, Case, drafting
from .test_estimate import SCALED, public, shape_at

LENGTH = 256
ONE = replace(NVLINK, flops_per_second=1.0)


@pytest.mark.parametrize(
    ("algorithm", "fields"), [("eagle3", {"ttt_length": 3}), ("dflash", {"num_anchors": 400, "block_size": 4})]
)
def test_planned_products_are_those_that_a_pass_reports(
    algorithm: Algorithm, fields: dict[str, int], tiny_models: dict[str, Path]
) -> None:
    """The pass has one token less that counts."""
    directory = tiny_models["qwen3"]
    worker = Worker(WorkerConfig(ServedModel("m", str(directory)), device="cpu", threads=1))
    of_draft = {name: fields[name] for name in ("block_size",) if name in fields}
    worker.create_run(RunSpec("draft", DraftConfig(algorithm=algorithm, seed=0, **of_draft), "draft"))
    tokens = np.random.default_rng(0).integers(3, 500, LENGTH).astype(np.int32)
    options: dict[str, float | str] = dict(fields)
    options.pop("block_size", None)
    options |= {"seed": 0} if algorithm == "dflash" else {}
    request = ForwardBackwardRequest("draft", 1, (Datum(tokens),), algorithm, options)
    (answer,) = worker.run_pass(Pass((OperationPart(0, request),)))
    assert isinstance(answer, ForwardBackwardOutput), answer
    shape, load = shape_at(directory), Workload(longest=LENGTH, dtype="float32", samples=False)
    planned = [
        draft_cost(shape, SINGLE, each, draft_load(shape, algorithm, fields, each), SINGLE, ONE)
        for each in (load, replace(load, activations="recompute"))
    ]
    assert all(each.exchanges == 0 for each in planned)
    counted = [LENGTH * (each.target + each.draft) for each in planned]
    assert counted[0] == pytest.approx(answer.metrics["model_flops:sum"], rel=0.02)
    if algorithm == "eagle3":
        assert counted[1] > 1.05 * counted[0], "a recomputed layer runs forward again"


SENT = [
    ("eagle3", "tp=2", "sp=2", "keep"),
    *(
        pytest.param(*each, marks=pytest.mark.full)
        for each in (
            ("eagle3", "tp=2", "tp=2", "keep"),
            ("eagle3", "tp=2", "tp=2", "recompute"),
            ("eagle3", "sp=2", "sp=2", "keep"),
            ("eagle3", "fsdp=2", "replicas=2", "keep"),
            ("dflash", "tp=2", "sp=2", "keep"),
            ("dflash", "tp=2", "tp=2", "keep"),
            ("dflash", "fsdp=2", "replicas=2", "keep"),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "spec", "own", "way"), SENT)
def test_ranks_send_the_planned_bytes(algorithm: Algorithm, spec: str, own: str, way: str, tmp_path: Path) -> None:
    fields = UNROLLED if algorithm == "eagle3" else BLOCKS | {"num_layers": 2}
    case = Case(algorithm, fields, fields, spec, own, activations=way)
    model = tiny_model("qwen3", tmp_path, **(SCALED | {"vocab_size": 512}))
    with drafting(model, case, SENDING) as where:
        where.run_pass()
        measured = max(where.of_each("sent"))
    shape, knobs = shape_at(model), case.knobs
    specs = knobs["parallel"], knobs["draft_parallel"]
    longest = knobs["micro_batch_tokens"]
    load = Workload(longest=longest, dtype="float32", samples=False, micro_batch_tokens=longest, activations=way)
    sequences = sequences_of(*specs, load)
    of_target = sum(each.num_bytes for each in in_forward_pass(shape, specs[0], load))
    tokens = sequences.at_once * sequences.length // specs[1].sp
    of_draft = in_draft_pass(*specs, load, draft_load(shape, algorithm, fields, load, is_cpu=True), tokens)
    planned = of_target + sum(each.num_bytes for each in of_draft)
    print(f"\n{case}: {planned / measured:.3f} of {measured / 1e6:.1f} MB")
    assert planned == pytest.approx(measured, rel=0.1)
    assert planned - of_target != pytest.approx(measured, rel=0.1)


def test_what_takes_less_time_is_chosen_of_keeping_and_recomputing() -> None:
    """A draft of a target of 30B: recomputed it fits one device, and kept it needs two, which exchange."""
    shape, load = public("Qwen3-30B-A3B"), Workload(longest=8192, samples=False)
    draft = draft_load(shape, "eagle3", {"draft_vocab_size": 32000}, load)
    loads = [load, replace(load, activations="recompute")]
    free = Link("nvlink", 1e18, 0.0)
    chosen = {
        name: draft_layout_that_fits(shape, loads, draft, 80 * 10**9, 2, speeds=speeds)
        for name, speeds in (("pcie", PCIE), ("nvlink", NVLINK), ("free", replace(NVLINK, link=free, network=free)))
    }
    assert {name: each.load.activations for name, each in chosen.items()} == {
        "pcie": "recompute",
        "nvlink": "recompute",
        "free": "keep",
    }
    assert chosen["nvlink"].spec.num_ranks == 1 and chosen["free"].spec.num_ranks == 2
    for each in chosen.values():
        times = [way.cost.seconds for way in each.ways]
        assert len(times) == 2 and times == sorted(times) and each.ways[0].activations == each.load.activations
        assert {way.spec.num_ranks for way in each.ways} == {2}


def test_products_are_divided_by_the_ranks() -> None:
    shape, load = public("Llama-3.1-8B"), Workload(longest=8192, samples=False)
    draft = draft_load(shape, "eagle3", {}, load)

    def cost(spec: str, own: str) -> DraftCost:
        return draft_cost(shape, ParallelSpec.parse(spec), load, draft, ParallelSpec.parse(own), NVLINK)

    alone = cost("single", "single")
    for spec, own in (("sp=4", "sp=4"), ("fsdp=4", "replicas=4"), ("replicas=4", "replicas=4"), ("tp=4", "sp=4")):
        found = cost(spec, own)
        assert found.target == pytest.approx(alone.target / 4, rel=0.01)
        assert found.draft == pytest.approx(alone.draft / 4, rel=0.01)
        assert found.exchanges > alone.exchanges == 0
    # Its projection of captured layers is whole on each rank along tp.
    assert alone.draft / 4 < cost("tp=4", "tp=4").draft < alone.draft / 3
