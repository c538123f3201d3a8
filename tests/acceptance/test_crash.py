"""Training scripts continue while workers and the server are killed, and end with the same results."""

import random
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from ..live import DEPLOYMENTS
from .conftest import Undisturbed
from .crashing import OPTIONS, Crashing, Faults, assert_same, train


def delayed(crashing: Crashing, faults: Mapping[int, str]) -> Faults:
    """Each fault happens within a tenth of a second after its step."""
    drawn = random.Random(str(faults))

    def strike(killed: str) -> None:
        time.sleep(drawn.uniform(0, 0.1))
        crashing.strike(killed)

    return {step: partial(strike, killed) for step, killed in faults.items()}


@pytest.mark.slow
def test_training_scripts_survive_crashes_unchanged(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with Crashing(tiny_models["qwen3"], tmp_path).running() as crashing:
        found = train(crashing, 9, delayed(crashing, {2: "worker", 5: "both"}))
        assert "the worker died" in crashing.log
    assert_same(found, undisturbed(9))
    with pytest.raises(AssertionError):
        assert_same(found, undisturbed(9)[::-1])


def faults_of(num_steps: int, **numbers: int) -> dict[int, str]:
    """Draws the steps of so many faults of each kind."""
    kinds = [kind for kind, number in numbers.items() for _ in range(number)]
    steps = random.Random(0).sample(range(1, num_steps), len(kinds))
    return dict(zip(sorted(steps), kinds, strict=True))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pool", ["local", "ray"])
def test_thirteen_crashes_in_forty_steps_change_nothing(
    pool: str, tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with Crashing(tiny_models["qwen3"], tmp_path, OPTIONS | DEPLOYMENTS[pool]).running() as crashing:
        found = train(crashing, 40, delayed(crashing, faults_of(40, worker=5, server=5, both=3)))
    assert_same(found, undisturbed(40))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("deployment", ["local", "fsdp=2"])
def test_full_model_survives_crashes_unchanged(
    deployment: str, tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """An adapter trains on the same server; both sample the same before and after."""
    with Crashing(tiny_models["qwen3"], tmp_path, OPTIONS | DEPLOYMENTS[deployment]).running() as crashing:
        faults = delayed(crashing, faults_of(12, worker=2, server=2, both=1))
        found = train(crashing, 12, faults, "trainhouse", training="full")
        assert "the worker died" in crashing.log
    assert_same(found, undisturbed(12, "full"))
    assert "model.embed_tokens.weight" in found[0].weights and "model.embed_tokens.weight" not in found[1].weights


@pytest.mark.full
@pytest.mark.timeout(900)
def test_crashes_of_single_ranks_change_nothing(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Other crashes happen too. Rounding differs from one rank, and grows tenfold every five steps."""
    with Crashing(tiny_models["qwen3"], tmp_path, OPTIONS | DEPLOYMENTS["fsdp=2"]).running() as crashing:
        found = train(crashing, 24, delayed(crashing, faults_of(24, rank=4, worker=1, server=2, both=1)))
        assert "the worker died" in crashing.log
    assert_same(found, undisturbed(24))
