"""Checkpoints of any layout resume under any other, and are the same files."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.protocol.calls import OptimizerStep

from .case import Case
from .training import ADAM, Layout, close, distance, largest_error, layout, next_losses, supervised, train

LAYOUTS = ("single", "replicas=2", "fsdp=2", "replicas=2,fsdp=2", "tp=2", "fsdp=2,tp=2", "sp=2", "sp=2,tp=2")
EXPERT_LAYOUTS = ("ep=2", "fsdp=2,ep=2", "ep=2,tp=2")


def cases(kind: str, specs: Sequence[str], heads: str = "4x2") -> tuple[Case, ...]:
    """Returns each layout, and tp=2 with whole activations as well."""
    whole = [Case("tp=2", kind, "whole", heads)] if "tp=2" in specs else []
    return (*(Case(spec, kind, heads=heads) for spec in specs), *whole)


CORE = (Case("fsdp=2", "qwen3_tied"), Case("tp=2", "qwen3_tied"))
FULL = {
    **{kind: cases(kind, LAYOUTS) for kind in ("qwen3", "qwen3_tied")},
    **{kind: cases(kind, LAYOUTS + EXPERT_LAYOUTS) for kind in ("qwen3_moe", "qwen3_moe_mixed")},
    # 6x2: rings between two teams along sp=4, and of two ranks with tp. 6x3: tp is impossible; rings wherever sp=2.
    "qwen3_moe-6x2": cases("qwen3_moe", (*LAYOUTS, *EXPERT_LAYOUTS, "sp=4"), "6x2"),
    "qwen3_moe-6x3": cases(
        "qwen3_moe", (*(spec for spec in LAYOUTS + EXPERT_LAYOUTS if "tp" not in spec), "ep=2,sp=2"), "6x3"
    ),
}
MATRICES = [
    pytest.param(CORE, id="core"),
    *(pytest.param(cases, id=name, marks=[pytest.mark.full, pytest.mark.timeout(900)]) for name, cases in FULL.items()),
]
TOLERANCE = 1e-4
# For weights that two steps moved by at most 0.01 each.
SAME = 1e-6


@dataclass(frozen=True)
class Saved:
    """Files of one layout. run: checkpoint of run "a". snapshot: of run "b", in the middle of a window.

    losses, window: the next results without an interruption.
    """

    case: Case
    where: Layout
    run: Path
    snapshot: Path
    losses: list[float]
    window: list[float]


@pytest.fixture(scope="module", params=MATRICES)
def matrix(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Saved]]:
    cases: tuple[Case, ...] = request.param
    model = cases[0].model(tiny_models, tmp_path_factory.mktemp("model"))
    with ExitStack() as stack:
        wheres = [
            stack.enter_context(layout(model, case.parallel, tmp_path_factory.mktemp("files"), **case.options))
            for case in cases
        ]
        yield [trained(case, where) for case, where in zip(cases, wheres, strict=True)]


def trained(case: Case, where: Layout) -> Saved:
    train(where, 2)
    where.run_pass(supervised("b", 3, 9, 14, 7))
    run, snapshot = where.saved("a"), where.snapshot("b")
    return Saved(case, where, run, snapshot, next_losses(where), rest_of_window(where))


def rest_of_window(where: Layout) -> list[float]:
    """Returns, for run "b", the loss of another batch, the gradient's norm with it, and the loss after the step."""
    numbers = []
    for seed in (4, 5):
        (output,) = where.run_pass(supervised("b", seed, 21, 2))
        assert isinstance(output, ForwardBackwardOutput)
        (metrics,) = where.call("apply_steps", (OptimizerStep("b", ADAM),))
        numbers += [output.metrics["loss:sum"], metrics["unclipped_grad_l2:mean"]]
    return numbers


def test_checkpoints_of_each_layout_resume_under_each(matrix: list[Saved]) -> None:
    for saved in matrix:
        for each in matrix:
            each.where.call("load_run", "a", str(saved.run), True)
            assert close(next_losses(each.where), saved.losses, TOLERANCE), f"{saved.case} -> {each.case}"
        # This bound detects two more steps, or a reset optimizer.
        assert not close(next_losses(saved.where), saved.losses, TOLERANCE)
        saved.where.call("load_run", "a", str(saved.run), False)
        assert not close(next_losses(saved.where), saved.losses, TOLERANCE)


def test_started_windows_of_each_layout_are_completed_under_each(matrix: list[Saved]) -> None:
    for saved in matrix:
        for each in matrix:
            each.where.call("load_run", "b", str(saved.snapshot), True)
            assert close(rest_of_window(each.where), saved.window, TOLERANCE), f"{saved.case} -> {each.case}"
        saved.where.call("load_run", "b", str(saved.snapshot), True)
        saved.where.call("clear_gradients", "b")
        assert not close(rest_of_window(saved.where), saved.window, TOLERANCE)


def test_same_training_exports_the_same_adapter(matrix: list[Saved]) -> None:
    first, *others = (files_of(saved.run) for saved in matrix)
    for saved, files in zip(matrix[1:], others, strict=True):
        for name, matrices in files.items():
            assert types_of(matrices) == types_of(first[name])
        assert furthest(files["adapter_model"], first["adapter_model"]) <= SAME, saved.case
        assert largest_error([files["optimizer"]], [first["optimizer"]]) <= TOLERANCE, saved.case
    another = {name: 1.0001 * values for name, values in first["adapter_model"].items()}
    assert furthest(another, first["adapter_model"]) > SAME


def test_each_layout_saves_a_loaded_checkpoint_bit_for_bit(matrix: list[Saved]) -> None:
    (wanted, texts), weights = contents(matrix[0].run), None
    for each in matrix:
        each.where.call("load_run", "a", str(matrix[0].run), True)
        found, own_texts = contents(each.where.saved("a"))
        assert own_texts == texts
        assert found.keys() == wanted.keys()
        for name, values in found.items():
            assert values.tobytes() == wanted[name].tobytes(), f"{name} under {each.case}"
        exported = each.where.call("export_adapter", "a").weights
        weights = exported if weights is None else weights
        assert np.array_equal(exported, weights)


def files_of(directory: Path) -> dict[str, dict[str, np.ndarray]]:
    return {name: load_file(directory / f"{name}.safetensors") for name in ("adapter_model", "optimizer")}


def contents(directory: Path) -> tuple[dict[str, np.ndarray], Sequence[str]]:
    """Returns all tensors by file and name, and the texts of the JSON files."""
    files = {
        f"{name}/{key}": values for name, matrices in files_of(directory).items() for key, values in matrices.items()
    }
    return files, [path.read_text() for path in sorted(directory.glob("*.json"))]


def furthest(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    return distance(list(ours.values()), [theirs[name] for name in ours])


def types_of(matrices: dict[str, np.ndarray]) -> dict[str, tuple[object, ...]]:
    return {name: (values.shape, values.dtype) for name, values in matrices.items()}
