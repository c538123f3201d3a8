"""Ranks that offload to host memory before every call compute bit for bit the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.protocol.calls import OperationPart, RunSpec, SampleJob, SliceResult
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from .case import Case
from .faults import break_offload
from .test_full import Trained
from .training import Layout, Numbers, layout, supervised, train

CASES = [
    Case("fsdp=2"),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            *(Case(spec) for spec in ("tp=2", "sp=2", "replicas=2", "fsdp=2,tp=2")),
            *(Case("fsdp=2", kind) for kind in ("qwen3_tied", "gemma3")),
            *(Case(spec, "qwen3_moe") for spec in ("ep=2", "fsdp=2,ep=2")),
            Case("fsdp=2", zero_stage="2"),
        )
    ),
]


class Moving(Layout):
    """Offloads before each call. stayed: bytes that were still on a device afterwards."""

    stayed = 0
    num_moves = 0

    def call(self, method: str, *arguments: object) -> Any:
        self._offload()
        return super().call(method, *arguments)

    def run_parts(self, *parts: OperationPart) -> list[Any]:
        self._offload()
        return super().run_parts(*parts)

    def run_slice(self, joining: tuple[SampleJob, ...] = (), milliseconds: float = 5.0) -> SliceResult:
        self._offload()
        return super().run_slice(joining, milliseconds)

    def _offload(self) -> None:
        self.answers("offload")
        self.num_moves += 1
        kinds = ("base_weights", "kv_cache")
        self.stayed += sum(memory[f"{kind}_on_device"] for memory in self.answers("memory") for kind in kinds)


def same(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


def both(case: Case, learn: Any, tiny_models: dict[str, Path], tmp_path: Path) -> tuple[Any, Any]:
    found = []
    for kind in (Layout, Moving):
        scratch = tmp_path / kind.__name__
        with layout(case.model(tiny_models, scratch), case.parallel, scratch, kind=kind, **case.options) as where:
            found.append(learn(where))
            if isinstance(where, Moving):
                assert where.num_moves > 10 and where.stayed == 0
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapters_train_the_same(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    def learn(where: Layout) -> Numbers:
        return train(where, num_steps=2)

    staying, moving = both(case, learn, tiny_models, tmp_path)
    assert same([*vars(staying).values()], [*vars(moving).values()])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_full_models_train_and_sample_the_same(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    staying, moving = both(case, Trained, tiny_models, tmp_path)
    assert same([staying.losses, staying.gradients, staying.weights], [moving.losses, moving.gradients, moving.weights])
    for one, other in zip(staying.samples, moving.samples, strict=True):
        assert same(one.sequences[0].tokens, other.sequences[0].tokens)
        assert np.allclose(one.sequences[0].logprobs, other.sequences[0].logprobs, atol=1e-5)


@pytest.mark.parametrize("parallel", ["fsdp=2", "tp=2"])
def test_no_rank_moves_if_one_cannot(parallel: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with layout(tiny_models["qwen3"], ParallelSpec.parse(parallel), tmp_path) as where:
        where.call("create_run", RunSpec("a", LoraConfig(rank=4)))
        expected = where.run_pass(supervised("a", 1, 9, 30, forward_only=True))

        def on_device() -> list[bool]:
            return [memory["base_weights_on_device"] > 0 for memory in where.answers("memory")]

        where.probe(break_offload, 1, "write")
        with pytest.raises(OperationError, match="the base model cannot leave the device: input/output error"):
            where.call("offload")
        assert on_device() == [True, True]
        where.probe(break_offload, 0, "read")
        where.probe(break_offload, 1, "write", False)
        with pytest.raises(OperationError, match="the base model"):
            where.call("offload")
        assert on_device() == [False, True]
        where.probe(break_offload, 1, "")
        assert len(where.run_pass(supervised("a", 1, 9, 30, forward_only=True))) == 1
        assert on_device() == [True, True]
        where.call("offload")
        assert on_device() == [False, False]
        where.probe(break_offload, 1, "read")
        with pytest.raises(OperationError, match="the base model cannot be brought back to the device"):
            where.run_pass(supervised("a", 1, 9, 30, forward_only=True))
        assert on_device() == [True, False]
        where.call("offload")
        assert on_device() == [False, False]
        where.probe(break_offload, 1, "")
        found = where.run_pass(supervised("a", 1, 9, 30, forward_only=True))
        assert on_device() == [True, True]
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, ForwardBackwardOutput) and isinstance(other, ForwardBackwardOutput)
            assert same([dict(each) for each in one.loss_fn_outputs], [dict(each) for each in other.loss_fn_outputs])
