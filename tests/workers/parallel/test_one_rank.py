"""An error on one rank fails on all at once, and no rank waits for it; a slow rank is waited for."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.protocol.calls import AdapterWeights, Failure, OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec

from .faults import MicroBatches, call_unreadable, call_without_memory, lose_pages, shortest_timeout
from .training import ADAM, Layout, close, greedy, layout, next_losses, supervised

LOST = "a model's trained state cannot be brought back from disk: input/output error"
NO_MEMORY = "no memory for the model's weights: no memory for 1 TiB"
LORA = LoraConfig(rank=4, seed=3)

SPECS = [
    *("fsdp=2", "tp=2"),
    *(pytest.param(spec, marks=pytest.mark.full) for spec in ("replicas=2", "sp=2", "ep=2", "replicas=2,tp=2")),
]
CASES = [
    ("tp=2", 1),
    *(pytest.param(spec, rank, marks=pytest.mark.full) for spec, rank in (("tp=2", 0), ("replicas=2", 1), ("ep=2", 1))),
]


@pytest.fixture(scope="module")
def undisturbed(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of run d on one rank."""
    with layout(tiny_models["qwen3_moe"], SINGLE, tmp_path_factory.mktemp("alone")) as where:
        where.call("create_run", RunSpec("d", LORA))
        losses = next_losses(where, "d")
        where.run_pass(supervised("d", 1, 4, 5, 6))
        where.call("apply_steps", (OptimizerStep("d", ADAM),))
        return losses + next_losses(where, "d")


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_state_lost_on_one_rank_fails_only_its_run(
    spec: str, undisturbed: list[float], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    options = {"adapter_slots": 2, "host_adapter_bytes": 0, "page_directory": str(tmp_path / "pages")}
    with layout(tiny_models["qwen3_moe"], ParallelSpec.parse(spec), tmp_path, **options) as where:
        for run_id in ("a", "b", "c", "d"):  # moves the first two to disk
            where.call("create_run", RunSpec(run_id, LORA))
        losses, saved = next_losses(where, "d"), where.saved("c")
        where.probe(lose_pages, 1)
        assert_run_a_is_lost(where, tmp_path)
        for verb, *arguments in (("load_run", "c", str(saved), True), ("read_adapter", str(saved))):
            with pytest.raises(OperationError, match="is damaged: input/output error"):
                where.probe(call_unreadable, 1, verb, *arguments)
        where.call("load_run", "c", str(saved), True)
        assert close(losses + next_losses(where, "d"), undisturbed)
        assert not close(losses + losses, undisturbed)


@pytest.mark.parametrize(("spec", "rank"), CASES)
def test_adapter_without_memory_on_one_rank_is_created_on_none(
    spec: str, rank: int, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with layout(tiny_models["qwen3_moe"], ParallelSpec.parse(spec), tmp_path) as where:
        where.call("create_run", RunSpec("a", LORA))
        exported = where.call("export_adapter", "a")
        for verb, *arguments in (
            ("create_run", RunSpec("c", LORA)),
            ("copy_adapter", "a", "c"),
            ("import_adapter", "c", exported),
        ):
            with pytest.raises(OperationError, match=NO_MEMORY):
                where.probe(call_without_memory, rank, verb, *arguments)
            assert numbers_of_adapters(where) == {1}
            where.call(verb, *arguments)
            assert numbers_of_adapters(where) == {2}
            where.call("drop_run", "c")


@pytest.mark.parametrize(("spec", "rank"), CASES)
def test_sampler_is_unchanged_if_one_rank_cannot_replace_it(
    spec: str, rank: int, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with layout(tiny_models["qwen3_moe"], ParallelSpec.parse(spec), tmp_path) as where:
        where.call("create_run", RunSpec("a", LORA))
        before = where.call("export_adapter", "a")
        where.run_pass(supervised("a", 1, 9, 8))
        where.call("apply_steps", (OptimizerStep("a", ADAM),))
        after = where.call("export_adapter", "a")
        for verb, *arguments in (("copy_adapter", "a", "s"), ("import_adapter", "s", after)):
            where.call("import_adapter", "s", before)
            with pytest.raises(OperationError, match=NO_MEMORY):
                where.probe(call_without_memory, rank, verb, *arguments)
            assert has_everywhere(where, "s", before) and not has_everywhere(where, "s", after)
            where.call(verb, *arguments)
            assert has_everywhere(where, "s", after)


def numbers_of_adapters(where: Layout) -> set[int]:
    return {memory["num_adapters_on_device"] for memory in where.answers("memory")}


def has_everywhere(where: Layout, adapter_id: str, weights: AdapterWeights) -> bool:
    return all(np.array_equal(each.weights, weights.weights) for each in where.answers("export_adapter", adapter_id))


def assert_run_a_is_lost(where: Layout, directory: Path) -> None:
    failed, fine = where.run_pass(supervised("a", 1, 9, 8), supervised("d", 1, 4, 5, 6))
    assert isinstance(failed, Failure) and LOST in failed.message and failed.category == "server"
    assert isinstance(fine, ForwardBackwardOutput)
    for steps in ((OptimizerStep("a", ADAM), OptimizerStep("d", ADAM)), (OptimizerStep("a", ADAM),)):
        refused, *others = where.call("apply_steps", steps)
        assert isinstance(refused, Failure) and LOST in refused.message
        assert all(isinstance(metrics, Mapping) and metrics["window_tokens:sum"] == 15 for metrics in others)
    for verb, *arguments in (
        ("save_run", "a", str(directory), True),
        ("begin_snapshot", 7, "a", str(directory)),
        ("export_adapter", "a"),
        ("clear_gradients", "a"),
    ):
        with pytest.raises(OperationError, match=LOST):
            where.call(verb, *arguments)
    answers = where.sample(greedy("lost", "a", 9), greedy("fine", "d", 9), greedy("base", None, 5))
    lost, rank_decodes_alone = answers["lost"], where.spec.tp == where.spec.ep == 1
    assert rank_decodes_alone or (isinstance(lost, Failure) and LOST in lost.message)
    assert isinstance(answers["fine"], SampleResponse) and isinstance(answers["base"], SampleResponse)


@pytest.mark.full
@pytest.mark.parametrize("spec", ["tp=2", "fsdp=2"])
def test_ranks_wait_for_a_slow_rank(spec: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """The pass takes longer than hang_seconds, as calls with a larger timeout may: see CallTimeouts."""
    with layout(tiny_models["qwen3"], ParallelSpec.parse(spec), tmp_path, hang_seconds=5.0) as where:
        where.hang_seconds = 60.0  # for the calls
        where.call("create_run", RunSpec("a", LORA))
        where.probe(MicroBatches.be_late, 0, 7.0)
        (output,) = where.run_pass(supervised("a", 1, 9, 8))
        assert isinstance(output, ForwardBackwardOutput)
        assert where.probe(shortest_timeout)[0] > 100 * 24 * 3600, "torch's default of half an hour is in force"
