"""The planner's memory estimate for draft training equals what ranks use."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.schemas.training import (
    AdamParams,
    Datum,
    FeatureLocation,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    TargetRepr,
)
from trainhouse.workers.drafts.algorithms.draft_programs import DRAFT_PROGRAMS
from trainhouse.workers.drafts.algorithms.draft_shape import DraftShape
from trainhouse.workers.drafts.model.draft_model import DraftModel
from trainhouse.workers.planner.drafts.draft_estimate import DraftMemory, draft_memory, longest_sequence
from trainhouse.workers.planner.drafts.draft_layouts import draft_layout_that_fits, draft_spec_of
from trainhouse.workers.planner.drafts.draft_load import draft_load
from trainhouse.workers.planner.layout_search import usable_bytes
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.draft_sizes import DraftSizes
from trainhouse.workers.shapes.model_shape import ModelShape
from trainhouse.workers.worker.worker import Worker

from ...tiny import tiny_model
from ..parallel.measuring import HANG_SECONDS
from ..parallel.rank_bytes import RunBytes
from ..parallel.test_full_memory import near
from ..parallel.test_stored_features import with_addresses
from ..parallel.training import Layout, layout
from .test_estimate import OF_KIND, SCALED, public, shape_at

LENGTH = 1024
# The largest error of what is held between passes: less than what a small draft's target keeps of positions.
HELD = 0.001
# A pass is planned by a ratio of what a draft computes: up to a third more than it needs, never less.
LEAST, MOST = 1.0, 1.35
SIZES = {"qwen3_moe": OF_KIND["qwen3_moe"]}


@dataclass(frozen=True)
class Case:
    """fields: of the draft and its loss. more: fields of a draft that needs much more memory."""

    algorithm: Algorithm
    fields: Mapping[str, int]
    more: Mapping[str, int]
    spec: str = "single"
    draft: str | None = None
    dtype: str = "float32"
    activations: str = "keep"
    vocab: int = 512
    target_repr: TargetRepr | None = None
    target: str = "qwen3"

    def __str__(self) -> str:
        draft = f"-draft-{self.draft}" if self.draft else ""
        draft += f"-{self.target}" if self.target != "qwen3" else ""
        form = f"-{self.target_repr}" if self.target_repr else ""
        return f"{self.algorithm}-{self.spec}{draft}-{self.dtype}-{self.activations}{form}"

    @property
    def parallel(self) -> ParallelSpec:
        return ParallelSpec.parse(self.spec)

    @property
    def worker_options(self) -> dict[str, Any]:
        return {
            "draft_parallel": ParallelSpec.parse(self.draft) if self.draft else None,
            "dtype": self.dtype,
            "activations": self.activations,
            "micro_batch_tokens": LENGTH,
        }

    def planned(self, shape: ModelShape, fields: Mapping[str, int]) -> DraftMemory:
        spec, wanted = self.parallel, self.worker_options["draft_parallel"]
        of_worker = {name: self.worker_options[name] for name in ("dtype", "activations", "micro_batch_tokens")}
        load = Workload(longest=LENGTH, samples=False, lora_rank=1, **of_worker)
        draft = draft_load(
            shape, self.algorithm, fields, load, is_cpu=True, target_repr=self.target_repr or "hidden_state"
        )
        return draft_memory(shape, spec, load, draft, draft_spec_of(shape, spec, draft, wanted))

    @property
    def config(self) -> DraftConfig:
        sizes = {name: self.fields.get(name) for name in ("num_layers", "draft_vocab_size")}
        return DraftConfig(algorithm=self.algorithm, seed=1, target_repr=self.target_repr, **sizes)

    @property
    def options(self) -> dict[str, float | str]:
        if self.algorithm == "eagle3":
            return {"ttt_length": self.fields["ttt_length"]}
        return {"num_anchors": self.fields["num_anchors"], "seed": 1}


class Drafting(Layout):
    """Ranks that train a draft, with the bytes that it made them allocate."""

    case: Case

    def step(self) -> None:
        self.call("apply_steps", (OptimizerStep("draft", AdamParams()),))

    def pass_over(self, captured: Path | None = None) -> None:
        """Runs a micro-batch of one sequence on each rank that has data, from features captured in a directory if one
        is given."""
        random, case = np.random.default_rng(0), self.case
        data = tuple(Datum(random.integers(3, 512, LENGTH).astype(np.int32)) for _ in range(self.spec.num_data_shares))
        request = ForwardBackwardRequest("draft", 1, data, case.algorithm, case.options)
        if captured is not None:
            place = FeatureLocation(str(captured), captures=True)
            output = self._answer(
                replace(request, loss_fn="capture", loss_fn_config={}, forward_only=True, features=place)
            )
            request = with_addresses(request, output, captured)
        self._answer(request)

    def peak(self) -> int:
        return max(self.probe(RunBytes.peak))

    def _answer(self, request: ForwardBackwardRequest) -> ForwardBackwardOutput:
        (output,) = self.run_pass(request)
        assert isinstance(output, ForwardBackwardOutput), output
        return output


@contextmanager
def drafting(model: Path, case: Case) -> Iterator[Drafting]:
    options = {"device": "cpu", "kv_cache_bytes": None, "hang_seconds": HANG_SECONDS} | case.worker_options
    with layout(model, case.parallel, model, kind=Drafting, **options) as where:
        where.case = case
        where.probe(RunBytes)
        where.call("create_run", RunSpec("draft", case.config, "draft"))
        yield where


UNROLLED, MORE_UNROLLED = {"ttt_length": 3}, {"ttt_length": 5}
BLOCKS, MORE_BLOCKS = {"num_anchors": 64}, {"num_anchors": 256}
EAGLE, DFLASH = ("eagle3", UNROLLED, MORE_UNROLLED), ("dflash", BLOCKS, MORE_BLOCKS)
CASES = [
    Case(*EAGLE, "sp=2"),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            Case(*EAGLE, vocab=4096),
            Case(*EAGLE, dtype="bfloat16"),
            Case("eagle3", UNROLLED, {"ttt_length": 9}, activations="recompute"),
            Case("eagle3", UNROLLED, {"ttt_length": 14}, dtype="bfloat16", activations="recompute"),
            Case(*EAGLE, "fsdp=2", "tp=2"),
            Case(*EAGLE, "fsdp=2", "sp=2"),
            Case(*DFLASH),
            Case("dflash", BLOCKS | {"num_layers": 2}, MORE_BLOCKS | {"num_layers": 2}, dtype="bfloat16"),
            Case(*DFLASH, "tp=2", "sp=2"),
            Case("eagle3", UNROLLED, {"ttt_length": 9}, "fsdp=2,sp=2", dtype="bfloat16"),
            *(Case(*EAGLE, spec, target="qwen3_moe") for spec in ("ep=2", "fsdp=2,ep=2")),
            Case(*DFLASH, "fsdp=2,sp=2"),
            Case(*DFLASH, "fsdp=2,ep=2", "replicas=2,tp=2", target="qwen3_moe"),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_of_a_rank_that_trains_a_draft_is_as_planned(case: Case, tmp_path: Path) -> None:
    model = tiny_model(case.target, tmp_path, **(SCALED | SIZES.get(case.target, {}) | {"vocab_size": case.vocab}))
    shape = shape_at(model)
    planned, more = case.planned(shape, case.fields), case.planned(shape, case.more)
    held, peak = measured(model, case)
    of_draft, kept = planned.total - planned.target - planned.policy, planned.vectors.kept + planned.rotations
    print(f"\n{case}: held {kept / held:.3f}, peak {of_draft / peak:.3f} of {peak / 1e6:.1f} MB")
    assert near(kept, held, HELD) and not near(planned.vectors.kept, held, HELD)
    assert as_planned(of_draft, peak)
    assert not as_planned(more.total - more.target - more.policy, peak)


@pytest.mark.full
def test_a_rank_has_its_part_of_an_operations_gradients_and_one_matrix_of_others(tmp_path: Path) -> None:
    fields = BLOCKS | {"num_layers": 4}
    case = Case("dflash", fields, {}, "fsdp=2,sp=2")
    model = tiny_model("qwen3", tmp_path, **SCALED)
    planned, (_, peak) = case.planned(shape_at(model), fields), measured(model, case)
    of_draft = planned.total - planned.target - planned.policy
    print(f"\n{case}: peak {of_draft / peak:.3f} of {peak / 1e6:.1f} MB")
    assert planned.vectors.scratch == planned.vectors.gradients and as_planned(of_draft, peak)


@pytest.mark.full
def test_memory_of_stored_logits_that_ranks_exchange_is_as_planned(tmp_path: Path) -> None:
    fields = UNROLLED | {"draft_vocab_size": 256}
    case = Case("eagle3", fields, {}, "fsdp=2", "sp=2", vocab=16384, target_repr="logits")
    model = tiny_model("qwen3", tmp_path / "model", **(SCALED | {"vocab_size": case.vocab}))
    planned, of_hidden = (each.planned(shape_at(model), fields) for each in (case, replace(case, target_repr=None)))
    with drafting(model, case) as where:
        where.call("set_vocabulary", "draft", np.arange(256, dtype=np.int64))
        (tmp_path / "features").mkdir()
        where.pass_over(tmp_path / "features")
        where.step()
        where.pass_over(tmp_path / "features")
        peak = where.peak()
    of_draft, without = (each.total - each.target - each.policy for each in (planned, of_hidden))
    print(f"\n{case}: peak {of_draft / peak:.3f} of {peak / 1e6:.1f} MB; {without / peak:.3f} as for hidden states")
    assert as_planned(of_draft, peak) and not as_planned(without, peak)


def as_planned(planned: float, found: float) -> bool:
    return LEAST * found < planned < MOST * found


def measured(model: Path, case: Case) -> tuple[int, int]:
    """Returns the bytes that the rank with most keeps between passes, and has in one."""
    with drafting(model, case) as where:
        where.pass_over()
        where.step()
        where.pass_over()
        held = max(where.probe(RunBytes.alive))
        where.pass_over()
        return held, where.peak()


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_planned_sizes_are_those_of_drafts(algorithm: Algorithm, tiny_models: dict[str, Path]) -> None:
    directory = tiny_models["qwen3"]
    planned = draft_load(shape_at(directory), algorithm, {}, Workload(longest=8))
    worker = Worker(WorkerConfig(ServedModel("m", str(directory)), device="cpu", threads=1))
    draft = worker._models.build(DraftConfig(algorithm=algorithm), DRAFT_PROGRAMS[algorithm])
    assert planned.vector_size(1, 1) == draft.layout.size
    assert planned.vector_size(2, 1) < 0.9 * draft.layout.size
    assert isinstance(draft, DraftModel) and planned.sizes == sizes_of(draft.shape)


def sizes_of(shape: DraftShape) -> DraftSizes:
    return DraftSizes(**{each.name: getattr(shape, each.name) for each in fields(DraftSizes)})


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    shape, load = public("Llama-3.1-8B"), Workload(longest=8192, samples=False)
    draft = draft_load(shape, "eagle3", {}, load)
    spec, own = ParallelSpec.parse("fsdp=8"), ParallelSpec.parse("replicas=8")
    most = longest_sequence(shape, spec, load, draft, own, 80 * 10**9, 131072)

    def need(length: int) -> int:
        return draft_memory(shape, spec, replace(load, longest=length), draft, own).total

    assert 0 < most < 131072 and need(most) <= usable_bytes(80 * 10**9) < need(most + 256)
    assert longest_sequence(shape, spec, load, draft, own, 80 * 10**9, 128) == 128, "the model runs no longer ones"


def test_auto_finds_layouts_that_fit_or_says_what_needs_most() -> None:
    shape, load = public("Llama-3.1-70B"), Workload(longest=8192, samples=False)
    draft = draft_load(shape, "eagle3", {"draft_vocab_size": 32000}, load)
    loads = [load, replace(load, activations="recompute")]
    found = draft_layout_that_fits(shape, loads, draft, 80 * 10**9)
    assert found.memory.total <= usable_bytes(80 * 10**9) and found.spec.num_ranks == found.draft_spec.num_ranks
    with pytest.raises(ValueError, match=r"fits on 2 devices: .* needs least, .* of the target's weights"):
        draft_layout_that_fits(shape, loads, draft, 80 * 10**9, 2)
