"""Scheduled checkpoints and evaluations while workers and the server are killed around them, with the same results."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse import AdamParams, APIFuture, CheckpointSchedule, Datum, ServiceClient

from .crashing import Crashing, until
from .killed_in_hooks import ARMED, KILLED_IN_HOOKS
from .training_script import MODEL

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

NUM_STEPS = 12
ADAM = AdamParams(learning_rate=3e-3)
METRIC = "evaluation/heldout/loss:mean"
TOLERANCE = 1e-4
STRIKES = {2: "worker", 4: "server", 5: "both", 6: "server", 8: "worker", 10: "both"}
# Where in the work after a step the server or its worker dies. The first deletion is after step 8.
POINTS = {2: "evaluation server", 4: "evaluation worker", 6: "save server", 8: "save worker"}
MORE_POINTS = {2: "publication server", 8: "before-deletion server", 10: "deletion server", 12: "publication server"}


@dataclass
class Results:
    """metrics: of the scheduled work, by step. values: of the kept checkpoints' metric. weights: theirs, by name."""

    metrics: list[dict[str, float]]
    values: Mapping[str, float]
    weights: Mapping[str, Mapping[str, np.ndarray]]


def data(seed: int, num_datums: int) -> list[Datum]:
    texts = np.random.default_rng(seed).integers(5, 60, (num_datums, 24)).tolist()
    return [Datum(text[:-1], {"target_tokens": text[1:], "weights": [1.0] * 23}) for text in texts]


def trained(
    crashing: Crashing,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int, APIFuture[Any]], None] = lambda step, stepped: None,
    waits: bool = False,
) -> Results:
    """Returns the results of a run. before, after: called around the submission of each optimizer step, after it with
    its future."""
    with ServiceClient(crashing.url, "tml-schedules") as service:
        client = service.create_lora_training_client(MODEL, rank=4, seed=0)
        client.create_evaluation("heldout", 2, data(1, 300)).result(120)
        schedule = CheckpointSchedule(every=2, keep_last=2, keep_best=1, metric=METRIC, best="max")
        client.schedule_checkpoints(schedule).result(120)
        stepped = []
        for step in range(1, NUM_STEPS + 1):
            client.forward_backward(data(0, 4), "cross_entropy")
            before(step)
            stepped.append(client.optim_step(ADAM))
            after(step, stepped[-1])
            if waits:  # so that what follows one step does not happen while the next one is armed
                stepped[-1].result(240)
        metrics = [dict(each.result(240).metrics or {}) for each in stepped]
        kept = service.create_rest_client().list_checkpoints(client.model_id).result(120).checkpoints
    directory = crashing.state_dir / "checkpoints" / client.model_id.replace(":", "_") / "weights"
    names = [each.checkpoint_id.removeprefix("weights/") for each in kept]
    assert sorted(path.name.partition(".")[0] for path in directory.iterdir()) == sorted(names), "files without a row"
    return Results(
        [{name: value for name, value in each.items() if "evaluation" in name or "step" in name} for each in metrics],
        {name: float((each.user_metadata or {})["trainhouse.metric"]) for name, each in zip(names, kept, strict=True)},
        {name: load_file(next(directory.glob(f"{name}.*")) / "adapter_model.safetensors") for name in names},
    )


def test_schedules_survive_crashes_and_count_each_step_once(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """No step has two deaths of the worker: the work after it would be left out."""
    drawn, struck = random.Random(0), list[APIFuture[Any]]()

    def strike(step: int, stepped: APIFuture[Any]) -> None:
        killed = STRIKES.get(step)
        if killed in ("worker", "both"):
            for each in struck:
                each.result(240)
            struck[:] = [stepped]
        if killed is not None:
            time.sleep(drawn.uniform(0, 0.5))
            crashing.strike(killed)

    with Crashing(tiny_models["qwen3"], tmp_path / "undisturbed").running() as crashing:
        wanted = trained(crashing)
    with Crashing(tiny_models["qwen3"], tmp_path / "struck").running() as crashing:
        assert_same(trained(crashing, after=strike), wanted)


@pytest.mark.parametrize("points", [POINTS, MORE_POINTS], ids=["work", "publication"])
def test_what_a_crash_interrupts_after_a_step_is_done_exactly_once(
    points: Mapping[int, str], tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in an evaluation's pass, a save, a publication or a deletion leaves the results of a run without it."""
    armed = tmp_path / "armed"
    monkeypatch.setenv(ARMED, str(armed))

    def arm(step: int) -> None:
        if step in points:
            armed.write_text(points[step])

    def wait_for_kill(step: int, stepped: APIFuture[Any]) -> None:
        until(lambda: not armed.exists())
        if points.get(step, "").endswith("server"):
            crashing.restart_dead()

    with Crashing(tiny_models["qwen3"], tmp_path / "undisturbed").running() as crashing:
        wanted = trained(crashing)
    with Crashing(tiny_models["qwen3"], tmp_path / "struck", module=KILLED_IN_HOOKS).running() as crashing:
        assert_same(trained(crashing, arm, wait_for_kill, waits=True), wanted)
        assert len(crashing.pids) == 1 + sum(each.endswith("server") for each in points.values())


def assert_same(struck: Results, wanted: Results) -> None:
    """Checks results against those of an undisturbed run, and that these are what the schedules ask for."""
    assert [each["optimizer_step:last"] for each in struck.metrics] == [*range(1, NUM_STEPS + 1)]
    assert [each.keys() for each in struck.metrics] == [each.keys() for each in wanted.metrics]
    for one, other in zip(struck.metrics, wanted.metrics, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
    measured = [each[METRIC] for each in wanted.metrics if METRIC in each]
    assert len(measured) == NUM_STEPS // 2 and not np.allclose(measured[1:], measured[:-1], rtol=TOLERANCE)
    assert list(wanted.values) == ["step-000002", "step-000010", "step-000012"]
    assert struck.values == pytest.approx(wanted.values, rel=TOLERANCE)
    for name, weights in wanted.weights.items():
        for key, each in weights.items():
            tolerance = TOLERANCE * max(1, np.abs(each).max())
            np.testing.assert_allclose(struck.weights[name][key], each, atol=tolerance)
    assert not np.allclose(*(next(iter(wanted.weights[name].values())) for name in list(wanted.weights)[1:]), atol=1e-5)
