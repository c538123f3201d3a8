"""Training scripts go on while workers and the server are killed, and end as if nothing had happened."""

import random
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from ..live import MANNERS
from .conftest import Undisturbed
from .crashing import OPTIONS, Crashing, Faults, assert_same, train


def striking(crashing: Crashing, faults: Mapping[int, str]) -> Faults:
    """Each within a tenth of a second."""
    drawn = random.Random(str(faults))

    def strike(killed: str) -> None:
        time.sleep(drawn.uniform(0, 0.1))
        crashing.strike(killed)

    return {step: partial(strike, killed) for step, killed in faults.items()}


def test_training_scripts_do_not_notice(tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path) -> None:
    with Crashing(tiny_models["qwen3"], tmp_path).running() as crashing:
        found = train(crashing, 15, striking(crashing, {2: "worker", 6: "both"}))
        assert "the worker died" in crashing.log
    assert_same(found, undisturbed(15))
    with pytest.raises(AssertionError):
        assert_same(found, undisturbed(15)[::-1])


def faults_of(worker: int, rank: int, server: int, both: int, num_steps: int) -> dict[int, str]:
    """At steps drawn at random."""
    kinds = ["worker"] * worker + ["rank"] * rank + ["server"] * server + ["both"] * both
    steps = random.Random(0).sample(range(1, num_steps), len(kinds))
    return dict(zip(sorted(steps), kinds, strict=True))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("manner", ["local", "ray", "fsdp=2"])
def test_thirteen_crashes_in_forty_steps(
    manner: str, tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Of several ranks one dies now and then, and all of them others."""
    faults = faults_of(1, 4, 5, 3, 40) if manner == "fsdp=2" else faults_of(5, 0, 5, 3, 40)
    with Crashing(tiny_models["qwen3"], tmp_path, OPTIONS | MANNERS[manner]).running() as crashing:
        found = train(crashing, 40, striking(crashing, faults))
    assert_same(found, undisturbed(40))
