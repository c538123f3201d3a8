"""Drafts on ranks with their own data learn as on one rank."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from trainhouse.schemas.models import Algorithm, DraftConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE

from .case import Case
from .rank_weights import forward_weights
from .training import ADAM, Layout, close, largest_error, layout

ALGORITHMS: tuple[Algorithm, ...] = ("eagle3", "dflash")
CONFIGS = {"eagle3": {"ttt_length": 3}, "dflash": {"seed": 5, "num_anchors": 3}}
SHAPES = {"eagle3": {}, "dflash": {"block_size": 4, "mask_token_id": 2}}

SHORT: dict[Case, Algorithm] = {
    Case("fsdp=2"): "dflash",
    Case("tp=2"): "eagle3",
    Case("sp=2"): "eagle3",
    Case("fsdp=2", draft="tp=2"): "dflash",
}
"""Cases of a short test run, with one algorithm each; test_draft_gradients compares gradients of both."""
CASES = (
    *SHORT,
    *(Case(spec) for spec in ("replicas=2", "sp=2,tp=2", "fsdp=2,tp=2", "fsdp=2,sp=2")),
    Case("fsdp=2", "qwen3_tied"),
    Case("tp=2", tp_activations="whole"),
    Case("fsdp=2,tp=2", draft="sp=2,tp=2"),
    Case("sp=2", heads="4x1"),
)


def draft_request(algorithm: Algorithm, seed: int, *lengths: int) -> ForwardBackwardRequest:
    random = np.random.default_rng(seed)
    data = [
        Datum(
            random.integers(3, 512, length).astype(np.int32),
            {"weights": random.uniform(size=length).astype(np.float32)},
        )
        for length in lengths
    ]
    return ForwardBackwardRequest("draft", 1, tuple(data), algorithm, CONFIGS[algorithm])


class Trained:
    """Two steps with two accumulations each: sums and norms, and the saved draft."""

    def __init__(self, where: Layout, algorithm: Algorithm) -> None:
        where.call(
            "create_run", RunSpec("draft", DraftConfig(algorithm=algorithm, seed=1, **SHAPES[algorithm]), "draft")
        )
        self.results: list[float] = []
        for step in range(2):
            for seed, lengths in ((step, (9, 30, 4, 17)), (step + 7, (11,))):
                (output,) = where.run_pass(draft_request(algorithm, seed, *lengths))
                assert isinstance(output, ForwardBackwardOutput), output
                self.results += [value for name, value in output.metrics.items() if name.endswith(":sum")]
            (metrics,) = where.call("apply_steps", (OptimizerStep("draft", ADAM, "mean"),))
            assert isinstance(metrics, dict), metrics
            self.results.append(metrics["unclipped_grad_l2:mean"])
        self.directory = where.saved("draft")
        paths = self.directory.glob("model*.safetensors")
        self.weights = {name: each for path in paths for name, each in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "algorithm"),
    [
        pytest.param(case, algorithm, marks=() if SHORT.get(case) == algorithm else pytest.mark.full)
        for case in CASES
        for algorithm in ALGORITHMS
    ],
    ids=str,
)
def test_a_draft_learns_as_on_one_rank(
    case: Case, algorithm: Algorithm, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model = case.model(tiny_models, tmp_path)
    with layout(model, SINGLE, tmp_path) as alone, layout(model, case.parallel, tmp_path, **case.options) as many:
        theirs, ours = Trained(alone, algorithm), Trained(many, algorithm)
        assert close(ours.results, theirs.results)
        assert not close(ours.results, [1.001 * each for each in theirs.results])
        assert ours.weights.keys() == theirs.weights.keys()
        assert largest_error([ours.weights], [theirs.weights]) <= 1e-3
        for where, directory in ((alone, ours.directory), (many, theirs.directory)):
            where.call("load_run", "draft", str(directory), True)
            where.run_pass(draft_request(algorithm, 3, 21, 6))
        snapshots = [where.snapshot("draft") for where in (many, alone)]
        for where, directory in zip((alone, many), snapshots, strict=True):
            where.call("load_run", "draft", str(directory), True)
        results = [step_and_pass(where, algorithm) for where in (alone, many)]
        assert close(results[1], results[0])
        alone.call("load_run", "draft", str(ours.directory), False)
        alone.run_pass(draft_request(algorithm, 3, 21, 6))
        assert not close(step_and_pass(alone, algorithm), results[0])


def step_and_pass(where: Layout, algorithm: Algorithm) -> list[float]:
    """Takes a step with the pending gradients, then makes a pass."""
    (metrics,) = where.call("apply_steps", (OptimizerStep("draft", ADAM, "mean"),))
    assert isinstance(metrics, dict), metrics
    (output,) = where.run_pass(draft_request(algorithm, 4, 8, 13))
    assert isinstance(output, ForwardBackwardOutput), output
    return [metrics["unclipped_grad_l2:mean"], output.metrics["loss:sum"]]


# A step moves weights by less than bfloat16 resolves.
SMALL_STEP = AdamParams(learning_rate=1e-4, eps=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("fsdp=2"),
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in (Case("sp=2"), Case("fsdp=2,sp=2"), Case("fsdp=2", draft="tp=2"))
        ),
    ],
    ids=str,
)
def test_bfloat16_drafts_learn_in_sharded_float32_weights(
    case: Case, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    model, options = tiny_models["qwen3"], {"dtype": "bfloat16"}
    with (
        layout(model, SINGLE, tmp_path, **options) as alone,
        layout(model, case.parallel, tmp_path / "many", **options, **case.options) as many,
    ):
        for where in (alone, many):
            where.call("create_run", RunSpec("draft", DraftConfig(algorithm="eagle3", seed=1), "draft"))
        first, theirs = saved_weights(alone), small_steps(alone)
        assert computes_with(many, first)
        ours = small_steps(many)
        assert not computes_with(many, first)
        print(f"\n{case}: {distance_moved(first, ours, theirs):.1e}")
        assert distance_moved(first, ours, theirs) < 0.02
        assert distance_moved(*(rounded(each) for each in (first, ours)), theirs, first) > 0.5
        assert computes_with(many, ours)
        many.answers("offload")
        assert computes_with(many, ours)
        snapshot = alone.snapshot("draft")
        many.call("load_run", "draft", str(snapshot), True)
        assert computes_with(many, theirs)
        assert largest_error([saved_weights(many)], [theirs]) == 0
        alone.call("load_run", "draft", str(many.snapshot("draft")), True)
        assert distance_moved(theirs, small_steps(many), small_steps(alone)) < 0.02


def small_steps(where: Layout) -> Mapping[str, np.ndarray]:
    """Returns the saved weights after three small steps."""
    for step in range(3):
        where.run_pass(draft_request("eagle3", step, 9, 30, 4, 17))
        (metrics,) = where.call("apply_steps", (OptimizerStep("draft", SMALL_STEP, "mean"),))
        assert isinstance(metrics, dict), metrics
    return saved_weights(where)


def saved_weights(where: Layout) -> Mapping[str, np.ndarray]:
    paths = where.saved("draft").glob("model*.safetensors")
    return {name: each for path in paths for name, each in load_file(path).items()}


def rounded(weights: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    return {name: torch.from_numpy(each).bfloat16().float().numpy() for name, each in weights.items()}


def distance_moved(
    first: Mapping[str, np.ndarray],
    ours: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
    their_first: Mapping[str, np.ndarray] | None = None,
) -> float:
    """Returns the distance between how far we and they moved from the first weights, relative to theirs."""
    their_moves = {name: each - (their_first or first)[name] for name, each in theirs.items()}
    differences = [ours[name] - first[name] - move for name, move in their_moves.items()]
    return norm(differences) / norm(their_moves.values())


def norm(matrices: Iterable[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(each, dtype=np.float64).sum() for each in matrices)))


def computes_with(where: Layout, weights: Mapping[str, np.ndarray]) -> bool:
    """True if all ranks compute with these weights, rounded to bfloat16, or with their parts of them."""
    wanted = rounded(weights)
    return all(
        np.array_equal(own, part_of(wanted[name], own.shape, rank))
        for rank, of_rank in enumerate(where.probe(forward_weights, "draft"))
        for name, own in of_rank.items()
    )


def part_of(whole: np.ndarray, shape: tuple[int, ...], rank: int) -> np.ndarray:
    for dim, size in enumerate(shape):
        parts = np.split(whole, whole.shape[dim] // size, dim)
        whole = parts[rank % len(parts)]
    return whole
