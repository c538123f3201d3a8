"""Drafts in a worker: trained, moved to other targets, saved and resumed."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import Algorithm, DraftConfig, LoraConfig
from trainhouse.schemas.training import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
)
from trainhouse.workers.protocol.calls import Failure, OperationPart, OptimizerStep, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker

from ..model_state import add_noise, pending_gradients, pending_window
from ..requests import repeatable

LENGTHS = (9, 30, 4, 17)
ADAM = AdamParams(learning_rate=3e-3, grad_clip_norm=1.0)


ALGORITHMS = {"eagle3": {"ttt_length": 3}, "dflash": {"seed": 5, "num_anchors": 40}}
SHAPES: dict[str, dict[str, Any]] = {"eagle3": {}, "dflash": {"block_size": 4, "mask_token_id": 2}}


@pytest.fixture(params=["llama", "qwen3"])
def directory(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Path:
    return tiny_models[request.param]


@pytest.fixture
def worker(directory: Path) -> Worker:
    return new_worker(directory)


def new_worker(directory: Path, **options: Any) -> Worker:
    return Worker(WorkerConfig(ServedModel("tiny", str(directory)), threads=1, **options))


def create_draft(worker: Worker, run_id: str = "draft", algorithm: Algorithm = "eagle3", **fields: Any) -> None:
    config = DraftConfig(algorithm=algorithm, seed=3, **(SHAPES[algorithm] | fields))
    worker.create_run(RunSpec(run_id, config, "draft"))


def some_data(seed: int, lengths: Sequence[int] = LENGTHS) -> tuple[Datum, ...]:
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        weights = (random.uniform(size=length) * (random.uniform(size=length) > 0.3)).astype(np.float32)
        data.append(Datum(random.integers(3, 512, length).astype(np.int32), {"weights": weights}))
    return tuple(data)


def request(
    data: Sequence[Datum], run_id: str = "draft", forward_only: bool = False, loss_fn: str = "eagle3"
) -> ForwardBackwardRequest:
    config = ALGORITHMS[loss_fn]
    return ForwardBackwardRequest(run_id, 1, tuple(data), loss_fn, config, forward_only=forward_only)


def run_pass(worker: Worker, *requests: ForwardBackwardRequest) -> list[ForwardBackwardOutput]:
    answers = worker.run_pass(tuple(OperationPart(number, each) for number, each in enumerate(requests)))
    assert all(isinstance(answer, ForwardBackwardOutput) for answer in answers), answers
    return list(answers)  # pyright: ignore[reportReturnType]


def refused(worker: Worker, requested: ForwardBackwardRequest) -> str:
    (answer,) = worker.run_pass((OperationPart(0, requested),))
    assert isinstance(answer, Failure) and answer.category == "user", answer
    return answer.message


def step(worker: Worker, run_id: str = "draft") -> dict[str, float]:
    (metrics,) = worker.apply_steps((OptimizerStep(run_id, ADAM, "mean"),))
    assert isinstance(metrics, dict), metrics
    return metrics


def train(worker: Worker, num_steps: int, loss_fn: str = "eagle3") -> list[float]:
    found = []
    for number in range(num_steps):
        (output,) = run_pass(worker, request(some_data(number % 2), loss_fn=loss_fn))
        found.append(output.metrics["loss:sum"])
        step(worker)
    return found


def loss(worker: Worker, run_id: str = "draft", loss_fn: str = "eagle3") -> float:
    (output,) = run_pass(worker, request(some_data(7), run_id, forward_only=True, loss_fn=loss_fn))
    return output.metrics["loss:sum"]


def saved_policy(worker: Worker, directory: Path, seed: int) -> Path:
    """Saves a policy that predicts other tokens than the base model."""
    worker.create_run(RunSpec("policy", LoraConfig(rank=4, seed=seed)))
    add_noise(worker, "policy", 0.2, seed)
    path = directory / f"policy-{seed}"
    path.mkdir(parents=True)
    worker.save_run("policy", str(path), optimizer=False)
    worker.drop_run("policy")
    return path


def snapshot(worker: Worker, path: Path) -> Path:
    path.mkdir()
    worker.begin_snapshot(1, "draft", str(path))
    while not (ended := worker.ended_snapshots()):
        time.sleep(0.01)
    assert ended == {1: None}
    return path


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_lowers_the_loss_and_forward_changes_nothing(worker: Worker, algorithm: Algorithm) -> None:
    create_draft(worker, algorithm=algorithm)
    before = loss(worker, loss_fn=algorithm)
    assert loss(worker, loss_fn=algorithm) == before
    losses = train(worker, 30, algorithm)
    assert losses[-2] < 0.97 * losses[0]
    assert losses[-1] < 0.97 * losses[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_small_micro_batches_give_the_same_gradient(worker: Worker, directory: Path, algorithm: Algorithm) -> None:
    other = new_worker(directory, micro_batch_tokens=12, head_chunk_tokens=5)
    outputs = []
    for each in (worker, other):
        create_draft(each, algorithm=algorithm)
        outputs += run_pass(each, request(some_data(1), loss_fn=algorithm))
    assert repeatable(outputs[1].metrics) == pytest.approx(repeatable(outputs[0].metrics), rel=1e-5, abs=1e-5)
    wanted, found = (pending_gradients(each, "draft") for each in (worker, other))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    one, another = (pending_window(each, "draft").weight_sum for each in (worker, other))
    assert another == pytest.approx(one)
    run_pass(other, request(some_data(1)[:1], loss_fn=algorithm))
    assert (pending_gradients(other, "draft") - wanted).abs().max() > 1e-2


def test_sums_of_a_batch_do_not_depend_on_how_it_is_split_into_requests(worker: Worker) -> None:
    create_draft(worker)
    data = some_data(1)
    (whole,) = run_pass(worker, request(data))
    weights = sum(float(datum.loss_fn_inputs["weights"][1:-1].sum()) for datum in data)
    assert pending_window(worker, "draft").weight_sum == pytest.approx(weights)
    gradient = pending_gradients(worker, "draft")
    worker.clear_gradients("draft")
    parts = [run_pass(worker, request([datum]))[0] for datum in reversed(data)]
    torch.testing.assert_close(pending_gradients(worker, "draft"), gradient, rtol=1e-4, atol=1e-5)
    for name, value in whole.metrics.items():
        if name.endswith(":sum"):
            assert sum(part.metrics[name] for part in parts) == pytest.approx(value, rel=1e-5, abs=1e-5), name
    means = np.mean([part.metrics["acceptance/1:mean"] for part in parts])
    assert means != pytest.approx(whole.metrics["acceptance/1:mean"], rel=1e-3), "a mean of means would differ"
    for output, wanted in zip(reversed(parts), whole.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(output.loss_fn_outputs[0]["losses"], wanted["losses"], atol=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_saved_draft_loads_unchanged(worker: Worker, tmp_path: Path, algorithm: Algorithm) -> None:
    create_draft(worker, algorithm=algorithm)
    train(worker, 2, algorithm)
    worker.save_run("draft", str(tmp_path), optimizer=True)
    create_draft(worker, "other", algorithm)
    assert loss(worker, "other", algorithm) != pytest.approx(loss(worker, loss_fn=algorithm), rel=1e-4)
    worker.load_run("other", str(tmp_path), optimizer=True)
    assert loss(worker, "other", algorithm) == loss(worker, loss_fn=algorithm)
    create_draft(worker, "third", "dflash" if algorithm == "eagle3" else "eagle3")
    with pytest.raises(OperationError, match=f"was saved with .* {algorithm}|create a draft of that shape"):
        worker.load_run("third", str(tmp_path), optimizer=True)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_a_draft_that_only_proposes_keeps_weights_in_the_dtype_of_products_alone(
    tiny_models: dict[str, Path], tmp_path: Path, dtype: str, num_bytes: int
) -> None:
    worker = new_worker(tiny_models["qwen3"], dtype=dtype)
    create_draft(worker)
    train(worker, 2)
    worker.save_run("draft", str(tmp_path), optimizer=False)
    trained, size = loss(worker), worker._models.get("draft").layout.size
    before = worker.memory()["drafts_on_device"]
    worker.load_draft("proposer", str(tmp_path))
    assert loss(worker, "proposer") == trained
    kept = worker.memory()["drafts_on_device"] - before
    assert kept == num_bytes * size != (4 + num_bytes) * size
    worker.offload()
    assert loss(worker, "proposer") == trained, "after it was away from the device"


def test_snapshot_resumes_a_draft_in_the_middle_of_a_window(directory: Path, tmp_path: Path) -> None:
    """The draft has pending gradients, a target other than the base model, and a pruned vocabulary."""
    worker, other = new_worker(directory), new_worker(directory)
    target = str(saved_policy(worker, tmp_path, 5))
    for each in (worker, other):
        create_draft(each, draft_vocab_size=200)
        each.set_vocabulary("draft", np.arange(100, 500, 2, dtype=np.int64))
        each.set_target("draft", target)
        train(each, 3)
        run_pass(each, request(some_data(11)))
    again = new_worker(directory)
    create_draft(again, draft_vocab_size=200)
    again.load_run("draft", str(snapshot(worker, tmp_path / "snapshot")), optimizer=True)
    assert loss(again) != pytest.approx(loss(other), rel=1e-4), "the target is not in the snapshot"
    again.set_target("draft", target)
    assert loss(again) == loss(other)
    run_pass(again, request(some_data(12)))
    run_pass(other, request(some_data(12)))
    assert step(again) == step(other)
    assert train(again, 2) == train(other, 2)
    again.set_target("draft", None)
    assert loss(again) != pytest.approx(loss(other), rel=1e-4)


def test_loading_a_checkpoint_does_not_change_the_target(worker: Worker, tmp_path: Path) -> None:
    create_draft(worker)
    train(worker, 2)
    base_loss = loss(worker)
    (tmp_path / "saved").mkdir()
    worker.save_run("draft", str(tmp_path / "saved"), optimizer=True)
    assert not (tmp_path / "saved" / "target").exists()
    create_draft(worker, "other")
    worker.set_target("other", str(saved_policy(worker, tmp_path, 5)))
    worker.load_run("other", str(tmp_path / "saved"), optimizer=True)
    assert loss(worker, "other") != pytest.approx(base_loss, rel=1e-4)
    worker.set_target("other", None)
    assert loss(worker, "other") == base_loss


def test_loss_depends_on_the_saved_policy_that_is_the_target(worker: Worker, tmp_path: Path) -> None:
    create_draft(worker)
    directory = saved_policy(worker, tmp_path, 5)
    base_loss = loss(worker)
    worker.set_target("draft", str(directory))
    policy_loss = loss(worker)
    worker.set_target("draft", str(saved_policy(worker, tmp_path, 6)))
    assert len({base_loss, policy_loss, loss(worker)}) == 3
    worker.set_target("draft", str(directory))
    assert loss(worker) == policy_loss
    worker.drop_run("draft")
    assert not any(held for name, held in worker.memory().items() if name.startswith(("adapters", "drafts")))


def test_impossible_draft_configs_are_refused(worker: Worker) -> None:
    with pytest.raises(OperationError, match="capture_layers has 9: the target has layers 0 to 1"):
        create_draft(worker, capture_layers=(0, 9))


@pytest.mark.parametrize(
    ("loss_fn", "config", "inputs", "message"),
    [
        ("cross_entropy", {}, {}, "for another kind of model: this one takes eagle3"),
        ("eagle3", {"objective": "mse"}, {}, "objective is 'mse': it must be one of kl, lk_alpha, lk_lambda"),
        ("eagle3", {"ttt_length": 0}, {}, "ttt_length is 0: it must be a whole number, at least 1"),
        ("eagle3", {"ttt_length": 33}, {}, "ttt_length is 33: a draft predicts at most 32 tokens ahead"),
        ("eagle3", {"decay": 1e200}, {}, "decay is 1e+200: it must be between 0 and 1"),
        ("eagle3", {"decay": "x"}, {}, "decay is 'x': it must be a finite number"),
        ("eagle3", {}, {"advantages": [1.0] * 4}, "eagle3 has no input advantages"),
        (
            "eagle3",
            {},
            {"target_tokens": [5, 6, 8, 9]},
            "target_tokens has token id 6 at position 1, model_input 7 at 2",
        ),
    ],
)
def test_bad_training_requests_fail_with_the_reason(
    worker: Worker, loss_fn: str, config: dict[str, Any], inputs: dict[str, Any], message: str
) -> None:
    create_draft(worker)
    data = (Datum(np.array([4, 5, 7, 8]), {name: np.array(each) for name, each in inputs.items()}),)
    wrong = ForwardBackwardRequest("draft", 1, data, loss_fn, config)
    assert message in refused(worker, wrong)


def test_explicit_targets_include_the_last_token(worker: Worker) -> None:
    create_draft(worker)
    row = np.array([4, 5, 7, 8, 11])
    given = Datum(row[:-1], {"target_tokens": row[1:]})
    (with_targets,) = run_pass(worker, request([given], forward_only=True))
    (without,) = run_pass(worker, request([Datum(row[:-1], {})], forward_only=True))
    assert with_targets.metrics["accuracy/1/of:sum"] == 3
    assert without.metrics["accuracy/1/of:sum"] == 2
    losses = with_targets.loss_fn_outputs[0]["losses"]
    np.testing.assert_array_equal(losses[:3], without.loss_fn_outputs[0]["losses"][:3])
    assert losses[3] > 0


@pytest.mark.parametrize("forward_only", [False, True])
def test_pruned_draft_trains_only_after_its_vocabulary_is_chosen(worker: Worker, forward_only: bool) -> None:
    """The refused operation is not part of its first step."""
    create_draft(worker, draft_vocab_size=200)
    requested = request(some_data(1), forward_only=forward_only)
    assert refused(worker, requested) == (
        "draft_vocab_size is 200 of the target's 512 tokens, and the draft's vocabulary was not chosen: call"
        " build_vocab_map with your corpus first, or create a draft without draft_vocab_size"
    )
    worker.set_vocabulary("draft", np.arange(20, 220))
    run_pass(worker, requested, request(some_data(1)))
    step(worker)


@pytest.mark.parametrize("is_chosen", [True, False, None])
@pytest.mark.parametrize("is_snapshot", [True, False])
def test_saved_draft_records_whether_its_vocabulary_was_chosen(
    worker: Worker, directory: Path, tmp_path: Path, is_chosen: bool | None, is_snapshot: bool
) -> None:
    """Even if the chosen tokens are the lowest ids. Drafts of earlier versions, without a record (None), may train."""
    create_draft(worker, draft_vocab_size=200)
    if is_chosen:
        worker.set_vocabulary("draft", np.arange(200))
    saved = tmp_path / "saved"
    if is_snapshot:
        snapshot(worker, saved)
    else:
        saved.mkdir()
        worker.save_run("draft", str(saved), optimizer=True)
    if is_chosen is None:
        description = json.loads((saved / "trainhouse.json").read_text())
        del description["vocabulary_is_chosen"]
        (saved / "trainhouse.json").write_text(json.dumps(description))
    again = new_worker(directory)
    create_draft(again, draft_vocab_size=200)
    again.load_run("draft", str(saved), optimizer=True)
    if is_chosen is False:
        assert "was not chosen" in refused(again, request(some_data(1)))
        again.set_vocabulary("draft", np.arange(200))
    train(again, 1)


def test_vocabulary_must_be_chosen_before_training(worker: Worker, tmp_path: Path) -> None:
    create_draft(worker, draft_vocab_size=10)
    with pytest.raises(OperationError, match="12 tokens do not fit a draft_vocab_size of 10"):
        worker.set_vocabulary("draft", np.arange(12))
    worker.set_vocabulary("draft", np.arange(20, 30))
    train(worker, 1)
    with pytest.raises(OperationError, match="the draft was already trained with its vocabulary, for 1 steps"):
        worker.set_vocabulary("draft", np.arange(10))
    worker.save_run("draft", str(tmp_path), optimizer=False)
    create_draft(worker, "other", draft_vocab_size=10)
    worker.load_run("other", str(tmp_path), optimizer=False)
    with pytest.raises(OperationError, match="for 0 steps and before it was loaded"):
        worker.set_vocabulary("other", np.arange(10))
