"""Draft models through our client; most of these tests use workers that compute nothing."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse import (
    AdamParams,
    APIFuture,
    CapturedData,
    Datum,
    ForwardBackwardOutput,
    ServiceClient,
    TrainhouseError,
    TrainingClient,
)
from trainhouse.schemas.models import FeatureStock

from ..live import live_server
from ..server.noting import NOTING, RESOLVED

pytestmark = pytest.mark.slow

MODEL = "tiny/qwen3"
DATA = [Datum([5, 6, 7], {})]
SUPERVISED = Datum([5, 6, 7], {"target_tokens": [6, 7, 8], "weights": [1.0] * 3})


@pytest.fixture(scope="module")
def service(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    directory = tmp_path_factory.mktemp("server")
    with (
        live_server({MODEL: tiny_models["qwen3"]}, directory, module=NOTING) as server,
        ServiceClient(server.url, "tml-draft") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def real_service(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    """A client of a server whose workers compute."""
    directory = tmp_path_factory.mktemp("real")
    with (
        live_server(
            {MODEL: tiny_models["qwen3"]}, directory, tenant_feature_bytes=200_000, sdk_max_chunk_datums=2
        ) as server,
        ServiceClient(server.url, "tml-draft") as client,
    ):
        yield client


def learned(metrics: dict[str, float]) -> dict[str, float]:
    """Leaves out the metrics that depend on time, or on whether the target ran."""
    return {name: value for name, value in metrics.items() if name not in ("mfu:mean", "model_flops:sum")}


def draft_metric(draft: TrainingClient, name: str, loss_fn: str = "eagle3", **config: float | str) -> float:
    return draft.forward(DATA, loss_fn, config).result(60).metrics[f"{name}:last"]


def saved_policy(service: ServiceClient, seed: int) -> str | None:
    policy = service.create_lora_training_client(MODEL, rank=4, seed=seed)
    return policy.save_weights_for_sampler("a").result(60).path


def test_a_draft_is_created_and_described_with_the_resolved_defaults(service: ServiceClient) -> None:
    path = saved_policy(service, 3)
    draft = service.create_draft_client(
        MODEL,
        "dflash",
        target_path=path,
        num_layers=2,
        capture_layers=[0, 2],
        draft_vocab_size=40,
        intermediate_size=32,
        block_size=4,
        mask_token_id=1,
        seed=9,
        user_metadata={"for": "a test"},
    )
    info = draft.get_info()
    assert info.draft is not None and info.draft.model_dump() == {
        "training": "draft",
        "algorithm": "dflash",
        "num_layers": 2,
        "capture_layers": (0, 2),
        "draft_vocab_size": 40,
        "intermediate_size": 32,
        "block_size": 4,
        "mask_token_id": 1,
        "target_repr": None,
        "target_top_k": None,
        "seed": 9,
    }
    assert (info.model_role, info.target_path, info.is_lora) == ("draft", path, False)
    assert draft_metric(draft, "target_seed") == 3
    run = service.create_rest_client().get_training_run(draft.model_id).result(60)
    assert (run.is_lora, run.lora_rank, run.model_role, run.user_metadata) == (False, None, "draft", {"for": "a test"})


def test_a_draft_created_without_options_has_the_defaults(service: ServiceClient) -> None:
    left_open = service.create_draft_client_async(MODEL, "eagle3").result(60).get_info()
    assert left_open.draft is not None and left_open.target_path is None
    assert RESOLVED.items() <= left_open.draft.model_dump().items() and left_open.draft.seed is not None


def test_a_vocabulary_is_counted_from_sequences_or_given_counts(service: ServiceClient) -> None:
    draft = service.create_draft_client(MODEL, "eagle3", draft_vocab_size=3)
    counted = draft.build_vocab_map([[9, 9, 7], [4, 8]], [[1, 1, 1], [0, 1]]).result(60)
    assert (counted.num_tokens, counted.covered, counted.size, len(counted.hash)) == (4, 1.0, 3, 16)
    assert draft.build_vocab_map(counts={9: 2, 7: 1, 8: 1}).result(60) == counted
    as_arrays = [np.array([9, 9, 7]), np.array([4, 8])], [np.ones(3), np.array([0, 1])]
    assert draft.build_vocab_map(*as_arrays).result(60) == counted
    assert draft_metric(draft, "first_token") == 7


def test_losses_of_a_draft_have_options(service: ServiceClient) -> None:
    draft = service.create_draft_client(MODEL, "eagle3")
    assert draft_metric(draft, "objective_letters", objective="lk_lambda", ttt_length=7) == 9


def test_a_draft_can_be_retargeted(service: ServiceClient) -> None:
    draft, path = service.create_draft_client(MODEL, "eagle3"), saved_policy(service, 4)
    assert draft.set_target(path).result(60).target_path == path
    assert draft_metric(draft, "target_seed") == 4
    assert draft.set_target(None).result(60).target_path is None
    assert draft_metric(draft, "target_seed") == -1


def test_a_saved_draft_is_resumed_with_its_target(service: ServiceClient) -> None:
    path = saved_policy(service, 4)
    draft = service.create_draft_client(MODEL, "eagle3", target_path=path)
    for saved in (draft.save_state("a"), draft.save_weights_for_sampler("a"), draft.save_weights_external("a")):
        assert saved.result(60).path
    path_of_state = draft.save_state("b").result(60).path
    again = service.create_training_client_from_state_with_optimizer(path_of_state)
    assert (again.get_info().target_path, draft_metric(again, "target_seed")) == (path, 4)
    assert draft.load_state_with_optimizer(path_of_state).result(60).path == path_of_state


def test_a_random_loss_gets_a_new_seed_for_each_request(service: ServiceClient) -> None:
    draft = service.create_draft_client(MODEL, "dflash")
    seeds = {draft_metric(draft, "seed", "dflash") for _ in range(3)}
    assert len(seeds) == 3 and -1 not in seeds
    assert draft_metric(draft, "seed", "dflash", seed=12) == 12


def test_captured_features_train_like_the_target_until_they_are_released(real_service: ServiceClient) -> None:
    draft = real_service.create_draft_client(MODEL, "eagle3")
    random = np.random.default_rng(1)
    data = [Datum(random.integers(3, 500, 9), {}) for _ in range(5)]
    online = draft.forward(data, "eagle3").result(60)
    before = time.time()
    captured = draft.capture(data, uses=1, ttl_seconds=600).result(60)
    assert [each.tokens.tolist() for each in captured] == [each.tokens.tolist() for each in data]
    assert len({each.feature_ref for each in captured}) == 5
    offline = draft.forward(captured, "eagle3").result(60)
    # The target's products of few rows, as in one of these passes, sum in another order than those of many.
    assert learned(offline.metrics) == pytest.approx(learned(online.metrics), rel=1e-6)
    draft.forward_backward(captured[:2], "eagle3")
    draft.optim_step().result(60)
    features = real_service.get_workers().features
    assert features is not None and (features.num_sequences, features.num_references) == (3, 3)
    used = real_service.get_limits().feature_bytes
    assert used is not None and used.used == features.num_bytes > 0
    assert captured.num_bytes / 5 == features.num_bytes / 3
    assert before + 600 <= captured.expires_at <= time.time() + 600
    assert draft.release_features(captured[2:3]).result(60).num_released == 1
    assert draft.release_features().result(60).num_released == 2
    with pytest.raises(TrainhouseError, match="it was released; capture it again"):
        draft.forward(captured[4:], "eagle3").result(60)
    with pytest.raises(TrainhouseError, match="and none is left"):
        draft.forward(captured[:1], "eagle3").result(60)
    given = Datum(data[0].tokens, {}, feature_ref=draft.capture(data[:1]).result(60)[0].feature_ref)
    assert given.feature_ref and draft.forward([given], "eagle3").result(60).metrics["loss:sum"] > 0


def test_a_step_after_a_refused_feature_ref_fails_and_clears_the_gradients(real_service: ServiceClient) -> None:
    draft = real_service.create_draft_client(MODEL, "eagle3")
    first = learned(draft.forward_backward(DATA, "eagle3").result(60).metrics)
    draft.forward_backward([Datum([5, 6, 7], {}, feature_ref="lost")], "eagle3")
    with pytest.raises(TrainhouseError, match=r"optim_step was not taken: .*feature_ref lost cannot be used"):
        draft.optim_step().result(60)
    with pytest.raises(TrainhouseError, match="no gradients"):
        draft.optim_step().result(60)
    assert learned(draft.forward_backward(DATA, "eagle3").result(60).metrics) == first
    draft.optim_step().result(60)


def start_capture_without_room(
    service: ServiceClient,
) -> tuple[TrainingClient, list[Datum], APIFuture[CapturedData], APIFuture[ForwardBackwardOutput]]:
    """Starts a capture that waits for room.

    Returns the draft, data that it captured before, the capture, and a pass submitted after it over other captured
    data.
    """
    draft, random = service.create_draft_client(MODEL, "eagle3"), np.random.default_rng(2)
    earlier, now, later = [[Datum(random.integers(3, 500, 100), {})] for _ in range(3)]
    earlier, now = [draft.capture(each).result(60) for each in (earlier, now)]
    capturing, learning = draft.capture(later), draft.forward_backward(now, "eagle3")
    wait_until(lambda: stock(service).num_waiting == 1)
    return draft, earlier, capturing, learning


def test_a_release_runs_before_a_capture_that_waits_for_room(real_service: ServiceClient) -> None:
    """Earlier passes that need the released features still run first, even those submitted after the capture."""
    with ServiceClient(real_service._connection.base_url, "tml-room") as service:
        draft, earlier, capturing, learning = start_capture_without_room(service)
        assert draft.release_features(earlier).result(10).num_released == 1
        later = capturing.result(60)
        assert learning.result(60).metrics["loss:sum"] > 0
        learning, released = draft.forward_backward(later, "eagle3"), draft.release_features()
        assert released.result(60).num_released == 2
        assert learning.result(60).metrics["loss:sum"] > 0
        assert stock(service).num_put_off == 0


def test_a_release_runs_after_earlier_passes_that_need_the_features(real_service: ServiceClient) -> None:
    with ServiceClient(real_service._connection.base_url, "tml-order") as service:
        draft, earlier, capturing, learning = start_capture_without_room(service)
        releasing = draft.release_features()
        draft.release_features(earlier).result(10)
        assert learning.result(60).metrics["loss:sum"] > 0
        assert releasing.result(60).num_released >= 1
        assert len(capturing.result(60)) == 1


def stock(service: ServiceClient) -> FeatureStock:
    features = service.get_workers().features
    assert features is not None
    return features


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


FORMS: dict[str, dict[str, Any]] = {
    "hidden_state": {"draft_vocab_size": 40},
    "logits": {"draft_vocab_size": 40, "target_repr": "logits"},
    "vocabulary": {"draft_vocab_size": 40, "target_repr": "pruned_logits"},
    "top": {"draft_vocab_size": 40, "target_repr": "pruned_logits", "target_top_k": 6},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_the_targets_distribution_is_captured_alone_and_with_a_policy(
    form: str, real_service: ServiceClient
) -> None:
    policy = real_service.create_lora_training_client(MODEL, rank=4, seed=3)
    path = policy.save_weights_for_sampler("a").result(60).path
    draft = real_service.create_draft_client(MODEL, "eagle3", target_path=path, seed=1, **FORMS[form])
    draft.build_vocab_map([[5, 6, 7, 8, 9]]).result(60)
    config = draft.get_info().draft
    assert config is not None and FORMS[form].items() <= config.model_dump().items()
    tokens = [[number, 5, 6, 7] for number in range(5)]
    data = [Datum(each[:-1], {"target_tokens": each[1:], "weights": [1.0] * 3}) for each in tokens]
    online = learned(draft.forward(data, "eagle3").result(60).metrics)
    captured = draft.capture(data).result(60)
    # Float32: two layers of 64, and what is stored of the output.
    of_output = {"hidden_state": 64, "logits": 512, "vocabulary": 40 + 2, "top": 2 * 6 + 1}[form]
    assert 0 < captured.num_bytes / 5 - 4 * 3 * (2 * 64 + of_output) < 600, "a header for each file"
    refs = policy.forward_backward(data, "cross_entropy", capture_for=draft).result(60).feature_refs
    assert len(set(refs)) == 5 == len(policy.forward(data, "cross_entropy", capture_for=draft).result(60).feature_refs)
    with_policy = [
        Datum(each.tokens, each.loss_fn_inputs, feature_ref=ref) for each, ref in zip(data, refs, strict=True)
    ]
    for given in (captured, with_policy):
        assert learned(draft.forward(given, "eagle3").result(60).metrics) == pytest.approx(online, rel=1e-4)
    again = real_service.create_training_client_from_state(draft.save_state("a").result(60).path)
    assert again.get_info().draft == config
    assert learned(again.forward(captured, "eagle3").result(60).metrics) == pytest.approx(online, rel=1e-4)
    other = "logits" if form == "hidden_state" else "hidden_state"
    reads_other = real_service.create_draft_client(MODEL, "eagle3", target_path=path, seed=1, **FORMS[other])
    reads_other.build_vocab_map([[5, 6, 7, 8, 9]]).result(60)
    with pytest.raises(TrainhouseError, match=f"but the draft reads 0, 1 with {other}: capture them again with"):
        reads_other.forward(captured, "eagle3").result(60)
    assert draft.release_features().result(60).num_released == 15


def test_logits_of_a_vocabulary_that_was_not_chosen_are_not_captured(real_service: ServiceClient) -> None:
    policy = real_service.create_lora_training_client(MODEL, rank=4, seed=3)
    draft = real_service.create_draft_client(MODEL, "eagle3", draft_vocab_size=40, target_repr="pruned_logits")
    with pytest.raises(TrainhouseError, match="call build_vocab_map with your corpus first"):
        draft.capture(DATA).result(60)
    with pytest.raises(TrainhouseError, match="call build_vocab_map with your corpus first"):
        policy.forward_backward([SUPERVISED], "cross_entropy", capture_for=draft).result(60)


def test_a_step_sent_after_a_captured_pass_runs_after_it(real_service: ServiceClient) -> None:
    policy = real_service.create_lora_training_client(MODEL, rank=4, seed=3)
    draft = real_service.create_draft_client(MODEL, "eagle3")
    draft.set_target(policy.save_weights_for_sampler("a").result(60).path)
    passed = policy.forward_backward([SUPERVISED], "cross_entropy", capture_for=draft)
    stepped = policy.optim_step(AdamParams(learning_rate=1e-2))
    (ref,) = passed.result(60).feature_refs
    stepped.result(60)
    of_old = draft.forward([Datum(SUPERVISED.tokens, {}, feature_ref=ref)], "eagle3")
    assert of_old.result(60).metrics["loss:sum"] > 0


def test_a_capture_split_into_several_requests_acts_as_one(real_service: ServiceClient) -> None:
    draft = real_service.create_draft_client(MODEL, "dflash")
    data = [Datum([number, 5, 6], {}) for number in range(5)]
    captured = draft.capture(data).result(60)
    assert [each.tokens[0] for each in captured] == [0, 1, 2, 3, 4]
    assert len({str(each.feature_ref).rpartition("-")[2] for each in captured}) == 3
    again, one = draft.capture(data, ttl_seconds=60).result(60), draft.capture(data[:1]).result(60)
    assert again.num_bytes == captured.num_bytes == 5 * one.num_bytes > 0
    assert again.expires_at < captured.expires_at
    assert draft._next_seq_id == 8


def test_operations_for_another_kind_of_model_are_refused(service: ServiceClient) -> None:
    policy = service.create_lora_training_client(MODEL, rank=4)
    draft = service.create_draft_client(MODEL, "eagle3")
    with pytest.raises(ValueError, match="set_target is for draft models, and this is a policy"):
        policy.set_target(None)
    with pytest.raises(ValueError, match="build_vocab_map is for draft models, and this is a policy"):
        policy.build_vocab_map(counts={1: 1})
    with pytest.raises(ValueError, match="capture is for draft models, and this is a policy"):
        policy.capture(DATA)
    with pytest.raises(ValueError, match="data is empty: capture at least one datum"):
        draft.capture([])
    with pytest.raises(ValueError, match="a draft has no log-probabilities for a custom loss"):
        draft.forward_backward_custom(DATA, lambda data, logprobs: (0.0, logprobs))
    misspelt: Any = "eagle"
    for wrong, words in (
        (lambda: draft.build_vocab_map(), "neither tokens nor counts are given: give either tokens or counts"),
        (lambda: draft.build_vocab_map([[1]], counts={1: 1}), "tokens and counts are both given: give either"),
        (lambda: draft.capture(DATA, uses=0), "uses is 0: it should be greater than or equal to 1"),
        (
            lambda: service.create_draft_client(MODEL, misspelt),
            "algorithm is 'eagle': it should be 'eagle3' or 'dflash'",
        ),
        (lambda: service.create_lora_training_client(MODEL, rank=0), "rank is 0: it should be greater than or equal"),
        (lambda: service.create_sampling_client(MODEL).sample([1], 0), "num_samples is 0: it should be greater than"),
    ):
        with pytest.raises(ValueError, match=f"^{words}[^\\n]*$"):
            wrong()
    with pytest.raises(TrainhouseError, match="a draft cannot be sampled by itself"):
        draft.save_weights_and_get_sampling_client()
    with pytest.raises(TrainhouseError, match="there is no checkpoint"):
        service.create_draft_client(MODEL, "eagle3", target_path="tinker://none:train:0/weights/none")
    with pytest.raises(TrainhouseError, match="block_size is of dflash"):
        service.create_draft_client(MODEL, "eagle3", block_size=4)
    saved = draft.save_state("c").result(60).path
    with pytest.raises(TrainhouseError, match="was saved by a draft: no reference can be created from it"):
        service.create_reference_client(path=saved)
    with pytest.raises(TrainhouseError, match="was saved by a draft, which cannot sample"):
        service.create_sampling_client(model_path=saved)
    assert draft_metric(draft, "target_seed") == -1, "the refused calls used no seq_id"
