"""Gradients of drafts do not depend on how ranks, micro-batches and packing divide the work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.models import Algorithm, DraftConfig, LoraConfig
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.checkpoint.description import CheckpointDescription
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE

from .case import Case
from .drafting import see_own_tokens_only
from .test_drafts import ALGORITHMS, SHAPES, draft_request
from .training import ADAM, Layout, close, layout, supervised

# By seed: a long sequence among short ones, and a single one, which leaves other ranks without data.
BATCHES = {0: (9, 30, 4, 17, 2), 1: (11,)}
TOLERANCE = 1e-6

# Micro-batches of more than one sequence, and of one.
MANY, FEW = 1 << 14, 16

CASES = [
    (Case("tp=2"), MANY),
    (Case("sp=2"), MANY),
    (Case("fsdp=2", draft="tp=2"), FEW),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            (Case("single"), FEW),
            (Case("fsdp=2"), FEW),
            (Case("replicas=2"), MANY),
            (Case("tp=2"), FEW),
            (Case("tp=2", tp_activations="whole"), MANY),
            (Case("sp=2"), FEW),
            (Case("sp=2", heads="4x1"), MANY),
            (Case("sp=2", heads="6x3-96"), MANY),
            (Case("sp=2,tp=2"), MANY),
            (Case("fsdp=2,sp=2"), MANY),
            *(
                (Case(spec, draft=draft), FEW)
                for spec, draft in (
                    ("tp=2", "sp=2"),
                    ("tp=2", "tp=2"),
                    ("sp=2", "replicas=2"),
                    ("sp=2", "tp=2"),
                    ("fsdp=2", "sp=2"),
                    ("fsdp=2,tp=2", "replicas=2,tp=2"),
                    ("fsdp=2,tp=2", "sp=2,tp=2"),
                    ("fsdp=2,tp=2", "sp=2,replicas=2"),
                    ("fsdp=2,sp=2", "tp=2,sp=2"),
                    ("replicas=2,tp=2", "replicas=2,sp=2"),
                )
            ),
        )
    ),
]


@dataclass(frozen=True)
class Gradient:
    """of_sum: gradient of the summed losses, by matrix. denominator: divisor for "mean". losses: of each token."""

    of_sum: Mapping[str, np.ndarray]
    denominator: float
    losses: Sequence[np.ndarray]

    @property
    def mean(self) -> dict[str, np.ndarray]:
        return {name: each / self.denominator for name, each in self.of_sum.items()}


def difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """Returns the norm of the difference over all matrices, relative to the norm of `theirs`."""
    assert ours.keys() == theirs.keys()
    between = [ours[name].astype(np.float64) - each for name, each in theirs.items()]
    return _norm(between) / _norm(list(theirs.values()))


def _norm(matrices: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(each, dtype=np.float64).sum() for each in matrices)))


def gradient(where: Layout, algorithm: Algorithm, seeds: Sequence[int] = tuple(BATCHES)) -> Gradient:
    """Returns the gradient of a new draft over these batches."""
    where.call("create_run", RunSpec("draft", DraftConfig(algorithm=algorithm, seed=1, **SHAPES[algorithm]), "draft"))
    found = window(where, algorithm, seeds)
    where.call("drop_run", "draft")
    return found


def window(where: Layout, algorithm: Algorithm, seeds: Sequence[int]) -> Gradient:
    losses: list[np.ndarray] = []
    for seed in seeds:
        (output,) = where.run_pass(draft_request(algorithm, seed, *BATCHES[seed]))
        assert isinstance(output, ForwardBackwardOutput), output
        losses += [each["losses"] for each in output.loss_fn_outputs]
    directory = where.snapshot("draft")
    of_sum = {name: each for path in directory.glob("window*.safetensors") for name, each in load_file(path).items()}
    return Gradient(of_sum, CheckpointDescription.read(directory).window.weight_sum, losses)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_draft_gradients_equal_those_of_one_rank(
    case: tuple[Case, int], algorithm: Algorithm, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    how, tokens = case
    model = how.model(tiny_models, tmp_path)
    options = how.options | {"micro_batch_tokens": tokens}
    with layout(model, SINGLE, tmp_path) as alone, layout(model, how.parallel, tmp_path / "many", **options) as many:
        wanted, found = (gradient(where, algorithm) for where in (alone, many))
        parts = [gradient(alone, algorithm, [seed]) for seed in BATCHES]
        error = difference(found.mean, wanted.mean)
        print(f"\n{how} {algorithm}: {error:.1e}")
        assert error <= TOLERANCE
        for ours, theirs in zip(found.losses, wanted.losses, strict=True):
            assert close(ours, theirs, 1e-6)
        means = {name: np.mean([part.mean[name] for part in parts], axis=0) for name in wanted.of_sum}
        assert difference(means, wanted.mean) > 1e-2


def test_ignoring_the_tokens_of_the_next_rank_changes_gradients(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model, case = tiny_models["qwen3"], Case("sp=2")
    with (
        layout(model, SINGLE, tmp_path) as alone,
        layout(model, case.parallel, tmp_path / "many", **case.options) as many,
    ):
        many.probe(see_own_tokens_only)
        assert difference(gradient(many, "eagle3").mean, gradient(alone, "eagle3").mean) > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("case", [Case("sp=2"), Case("fsdp=2", draft="tp=2")], ids=str)
def test_recompute_gives_the_same_gradients(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """The recomputation includes exchanges."""
    model, recompute = tiny_models["qwen3"], case.options | {"activations": "recompute"}
    with (
        layout(model, case.parallel, tmp_path, **case.options) as keeps,
        layout(model, case.parallel, tmp_path / "again", **recompute) as recomputes,
    ):
        wanted, found = gradient(keeps, "eagle3").mean, gradient(recomputes, "eagle3").mean
        assert difference(found, wanted) == 0 < difference(found, gradient(keeps, "eagle3", [0]).mean)


@pytest.mark.full
@pytest.mark.parametrize("case", [Case("tp=2"), Case("sp=2")], ids=str)
def test_pruned_draft_learns_from_a_policy_as_on_one_rank(
    case: Case, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """The target has a trained output head."""
    token_ids = np.sort(np.random.default_rng(4).permutation(512)[:100]).astype(np.int64)
    draft = DraftConfig(algorithm="eagle3", seed=1, draft_vocab_size=len(token_ids))
    with (
        layout(tiny_models["qwen3"], SINGLE, tmp_path) as alone,
        layout(tiny_models["qwen3"], case.parallel, tmp_path / "many", **case.options) as many,
    ):
        alone.call("create_run", RunSpec("policy", LoraConfig(rank=4, seed=2)))
        for seed in range(3):
            alone.run_pass(supervised("policy", seed, 20, 20))
            alone.call("apply_steps", (OptimizerStep("policy", ADAM),))
        target = str(alone.saved("policy"))
        base_gradients, found = [], []
        for where in (alone, many):
            where.call("create_run", RunSpec("draft", draft, "draft"))
            where.call("set_vocabulary", "draft", token_ids)
            base_gradients.append(window(where, "eagle3", [0]))
            where.call("clear_gradients", "draft")
            where.call("set_target", "draft", target)
            found.append(window(where, "eagle3", [0]))
        assert difference(found[1].mean, found[0].mean) <= TOLERANCE
        assert difference(base_gradients[1].mean, base_gradients[0].mean) <= TOLERANCE
        assert difference(base_gradients[1].mean, found[0].mean) > 1e-2
