"""Evaluations and checkpoints that the server makes after optimizer steps, against a live server."""

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from trainhouse import AdamParams, CheckpointSchedule, Datum, RequestFailedError, ServiceClient, TrainingClient
from trainhouse.schemas.models import Checkpoint

from ..live import LiveServer

MODEL = "tiny/chat"
ADAM = AdamParams(learning_rate=1e-2)
KEY = "tml-schedules"


@pytest.fixture(scope="module")
def service(shared_server: LiveServer) -> Iterator[ServiceClient]:
    with ServiceClient(shared_server.url, KEY) as client:
        yield client


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=3)


def batch(seed: int = 0, num_datums: int = 2) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [datum(random.integers(3, 250, random.integers(5, 12)).tolist()) for _ in range(num_datums)]


def datum(tokens: list[int]) -> Datum:
    weights = [0.5] + [1.0] * (len(tokens) - 2)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights})


def steps(client: TrainingClient, num_steps: int) -> list[dict[str, float]]:
    """Submits steps without waiting, and returns the metrics of each."""
    stepped = []
    for _ in range(num_steps):
        client.forward_backward(batch(), "cross_entropy")
        stepped.append(client.optim_step(ADAM))
    return [dict(step.result(120).metrics or {}) for step in stepped]


def scheduled(service: ServiceClient, client: TrainingClient) -> dict[str, Checkpoint]:
    listed = service.create_rest_client().list_checkpoints(client.model_id).result(60).checkpoints
    return {checkpoint.checkpoint_id: checkpoint for checkpoint in listed}


def mean_loss(client: TrainingClient, data: list[Datum]) -> float:
    total = client.forward(data, "cross_entropy").result(60).metrics["loss:sum"]
    return total / sum(float(each.loss_fn_inputs["weights"].sum()) for each in data)


def test_an_evaluation_gives_the_loss_at_its_steps_and_changes_nothing(
    service: ServiceClient, client: TrainingClient
) -> None:
    heldout = batch(seed=7, num_datums=600)  # more than one piece
    plain = service.create_lora_training_client(MODEL, rank=4, seed=3)
    created = client.create_evaluation("heldout", 3, heldout).result(120)
    assert created.metrics["evaluation/heldout/loss:mean"] == pytest.approx(mean_loss(plain, heldout), rel=1e-5)
    found, expected = steps(client, 7), []
    for number, metrics in enumerate(steps(plain, 7), 1):
        assert {name: found[number - 1][name] for name in metrics} == pytest.approx(metrics)
    fresh = service.create_lora_training_client(MODEL, rank=4, seed=3)
    for _ in range(2):
        steps(fresh, 3)
        expected.append(mean_loss(fresh, heldout))
    metric = "evaluation/heldout/loss:mean"
    values = {number: each[metric] for number, each in enumerate(found, 1) if metric in each}
    assert list(values) == [3, 6] and list(values.values()) == pytest.approx(expected, rel=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3
    client.delete_evaluation("heldout").result(60)
    assert not any("evaluation" in name for each in steps(client, 3) for name in each)


def test_scheduled_checkpoints_are_those_of_their_steps(service: ServiceClient, client: TrainingClient) -> None:
    client.schedule_checkpoints(CheckpointSchedule(every=2, keep_last=2)).result(60)
    found = steps(client, 7)
    assert [each.get("checkpoint_step:last") for each in found] == [None, 2, None, 4, None, 6, None]
    assert list(scheduled(service, client)) == ["weights/step-000004", "weights/step-000006"]
    path = scheduled(service, client)["weights/step-000004"].tinker_path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    again, norm = steps(resumed, 3), "unclipped_grad_l2:mean"
    assert [each[norm] for each in again] == pytest.approx([each[norm] for each in found[4:]])
    client.schedule_checkpoints(None).result(60)
    steps(client, 3)
    assert list(scheduled(service, client)) == ["weights/step-000004", "weights/step-000006"]


def test_the_best_by_a_metric_are_kept(service: ServiceClient, client: TrainingClient) -> None:
    """The first checkpoints are the worst by an evaluation of what is trained, whose own interval is longer."""
    client.create_evaluation("own", 1000, batch()).result(60)
    metric = "evaluation/own/loss:mean"
    best = CheckpointSchedule(every=1, keep_last=1, keep_best=2, metric=metric, best="max", prefix="worst")
    client.schedule_checkpoints(best).result(60)
    found = [each[metric] for each in steps(client, 6)]
    assert found == sorted(found, reverse=True)
    kept = scheduled(service, client)
    assert list(kept) == ["weights/worst-000001", "weights/worst-000002", "weights/worst-000006"]
    values = [float((each.user_metadata or {})["trainhouse.metric"]) for each in kept.values()]
    assert values == [found[0], found[1], found[5]]


def test_a_schedule_that_fails_is_a_warning_of_the_step(service: ServiceClient, client: TrainingClient) -> None:
    client.schedule_checkpoints(CheckpointSchedule(every=1, keep_best=1, metric="nothing:mean")).result(60)
    client.forward_backward(batch(), "cross_entropy")
    stepped = client.optim_step(ADAM).result(60)
    assert stepped.warnings == ["step 1 has no metric nothing:mean: it is not one of the best"]
    assert list(scheduled(service, client)) == ["weights/step-000001"]


def test_loading_weights_starts_the_count_of_steps_anew(service: ServiceClient, client: TrainingClient) -> None:
    steps(client, 3)
    path = client.save_state("three").result(60).path
    client.schedule_checkpoints(CheckpointSchedule(every=2)).result(60)
    client.load_state(path)
    assert [each.get("checkpoint_step:last") for each in steps(client, 3)] == [None, 2, None]
    client.load_state_with_optimizer(path)
    assert [each.get("checkpoint_step:last") for each in steps(client, 3)] == [4, None, 6]


def test_bad_schedules_are_refused(service: ServiceClient, client: TrainingClient) -> None:
    with pytest.raises(ValueError, match="keep_best needs a metric"):
        CheckpointSchedule(every=1, keep_best=1)
    with pytest.raises(ValueError, match="did you mean keep_last"):
        CheckpointSchedule.model_validate({"every": 1, "keep": 2})
    with pytest.raises(Exception, match=r"evaluation\.every is 0: it must be at least 1 step"):
        client.create_evaluation("a", 0, batch()).result(60)
    with pytest.raises(RequestFailedError, match="loss"):
        client.create_evaluation("a", 1, batch(), "no_such_loss").result(60)
    wrong = Datum([1, 2], {"target_tokens": [2, 3], "weights": [1.0, 1.0]}, feature_ref="x")
    with pytest.raises(RequestFailedError, match="cannot use or capture features"):
        client.create_evaluation("a", 1, [wrong]).result(60)
    assert not any("evaluation" in name for name in steps(client, 1)[0])


def test_evaluations_are_bounded(service: ServiceClient, client: TrainingClient) -> None:
    for number in range(16):
        client.create_evaluation(f"e{number}", 10, batch()).result(60)
    with pytest.raises(RequestFailedError, match="16 evaluations, which is the most"):
        client.create_evaluation("more", 10, batch()).result(60)
    client.create_evaluation("e3", 20, batch()).result(60)
    used = service.get_limits().evaluation_bytes
    assert used is not None and used.used > 0
    for number in range(16):
        client.delete_evaluation(f"e{number}").result(60)
    left = service.get_limits().evaluation_bytes
    assert left is not None and left.used < used.used


def test_checkpoints_can_be_scheduled_by_metadata(service: ServiceClient, shared_server: LiveServer) -> None:
    """Clients that have only the protocol's fields ask for them when they create the model."""
    metadata = {"trainhouse.checkpoints": '{"every": 1, "keep_last": 1}'}
    client = service.create_lora_training_client(MODEL, rank=4, user_metadata=metadata)
    steps(client, 3)
    assert list(scheduled(service, client)) == ["weights/step-000003"]
    headers = {"X-API-Key": KEY}
    run = httpx.get(f"{shared_server.url}/api/v1/training_runs/{client.model_id}", headers=headers).json()
    assert run["schedules"]["checkpoints"]["keep_last"] == 1
    with pytest.raises(Exception, match=r"user_metadata trainhouse\.checkpoints: .*every"):
        service.create_lora_training_client(MODEL, user_metadata={"trainhouse.checkpoints": '{"every": 0}'})
