"""The client against a live server: every method, sync and async, and the errors it raises."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainhouse
from trainhouse import AdamParams, Datum, SamplingClient, SamplingParams, ServiceClient, TrainingClient
from trainhouse.client.rest import PEFT_FILES

from ..drawn import Drawn, as_drawn
from ..live import LiveServer
from ..server.hub import hub_server

MODEL = "tiny/chat"
ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def service(shared_server: LiveServer) -> Iterator[ServiceClient]:
    with ServiceClient(shared_server.url, "tml-client-tests") as client:
        yield client


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return new_client(service)


def new_client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=3)


def batch(num_datums: int = 2, seed: int = 0) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [datum(random.integers(3, 250, random.integers(5, 12)).tolist()) for _ in range(num_datums)]


def datum(tokens: Sequence[int]) -> Datum:
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})


def train(client: TrainingClient, data: list[Datum], num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        losses.append(passed.result(60).metrics["loss:sum"])
        stepped.result(60)
    return losses


def loss(client: TrainingClient, data: list[Datum]) -> float:
    return client.forward(data, "cross_entropy").result(60).metrics["loss:sum"]


def test_training_halves_the_loss(client: TrainingClient) -> None:
    losses = train(client, batch(), 20)
    assert losses[-1] < losses[0] / 2


def test_get_limits_reports_limits_and_usage(service: ServiceClient, client: TrainingClient) -> None:
    limits = service.get_limits()
    assert limits.tenant.startswith("local-"), "the tenant of a made-up key"
    assert 1 <= limits.runs.used <= limits.runs.limit == 2000
    assert limits.queued_operations.used == 0
    assert limits.tokens_per_minute.limit is None


def test_an_inflight_sampler_follows_its_run(client: TrainingClient) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)

    def drawn(sampler: SamplingClient) -> Drawn:
        return as_drawn(sampler.sample([5, 6, 7], 1, params).result(60).sequences[0])

    still = client.save_weights_and_get_sampling_client()
    moving = client.save_weights_and_get_sampling_client(kind="inflight")
    assert (before := drawn(still)) == drawn(moving)
    train(client, batch(), 10)
    newest = client.save_weights_and_get_sampling_client(kind="inflight")
    assert drawn(still) == before != drawn(moving) == drawn(newest)


def test_get_workers_reports_the_memory_of_the_workers(service: ServiceClient, client: TrainingClient) -> None:
    (of_group,) = service.get_workers().groups.values()
    assert of_group["base_weights"] == of_group["base_weights_on_device"] > 0
    assert of_group["num_adapters_on_device"] > 0 and of_group["offloads"] == 0


def test_a_pass_reports_its_operations_and_utilization(service: ServiceClient, client: TrainingClient) -> None:
    forward = client.forward(batch(), "cross_entropy").result(60).metrics
    trained = client.forward_backward(batch(), "cross_entropy").result(60).metrics
    client.optim_step(ADAM).result(60)
    assert 2 < trained["model_flops:sum"] / forward["model_flops:sum"] < 3, "two forwards, three for adapters"
    sampler = client.save_weights_and_get_sampling_client()
    sampler.sample([5, 6, 7], 1, SamplingParams(max_tokens=8)).result(60)
    (speed,) = service.get_workers().utilization.values()
    assert speed.peak_flops > 1e9
    # At most 1, since small products are slower than those that the peak is measured with.
    for found in (forward["mfu:mean"], trained["mfu:mean"], speed.training, speed.sampling):
        assert found is not None and 0 < found < 1


def test_a_base_url_may_include_the_api_path(shared_server: LiveServer) -> None:
    with ServiceClient(f"{shared_server.url}/api/v1/", "tml-client-tests") as service:
        assert service.get_server_capabilities().supported_models


def test_everything_can_be_awaited_in_a_running_loop(shared_server: LiveServer, client: TrainingClient) -> None:
    expected = train(client, batch(), 2)

    async def same() -> list[float]:
        async with ServiceClient(shared_server.url, "tml-client-tests") as service:
            lora = (await new_client(service).get_info_async()).lora_rank
            client = await service.create_lora_training_client_async(MODEL, rank=lora, seed=3)
            losses = []
            for _ in range(2):
                passed, stepped = client.forward_backward(batch(), "cross_entropy"), client.optim_step(ADAM)
                losses.append((await passed).metrics["loss:sum"])
                await stepped
            sampler = await client.save_weights_and_get_sampling_client_async()
            assert len((await sampler.sample([5, 6], 1, SamplingParams(max_tokens=2, stop=[]))).sequences) == 1
            # Blocking calls also work in a running loop, as in a notebook.
            assert client.get_info().lora_rank == lora
            return losses

    assert asyncio.run(same()) == expected


def test_a_batch_over_the_chunk_limit_equals_its_parts(service: ServiceClient) -> None:
    chunked, by_hand = new_client(service), new_client(service)
    data = batch(12)
    whole = chunked.forward_backward(data, "cross_entropy").result(60)
    parts = [by_hand.forward_backward([one], "cross_entropy").result(60) for one in data]
    assert [len(output["logprobs"]) for output in whole.loss_fn_outputs] == [len(one.tokens) for one in data]
    assert whole.metrics["loss:sum"] == pytest.approx(sum(part.metrics["loss:sum"] for part in parts), rel=1e-5)
    before = loss(chunked, data)
    for one in (chunked, by_hand):
        one.optim_step(ADAM).result(60)
    assert loss(chunked, data) == pytest.approx(loss(by_hand, data), rel=1e-4)
    assert loss(chunked, data) != pytest.approx(before, rel=1e-3)


def test_a_loss_weight_and_a_gradient_scale_change_the_weights_equally(service: ServiceClient) -> None:
    weighted, scaled, plain = (new_client(service) for _ in range(3))
    # An eps as large as the gradients makes Adam notice their scale.
    adam = AdamParams(learning_rate=1e-2, eps=1.0)
    weighted.forward_backward(batch(), "cross_entropy", loss_weight=0.25)
    weighted.optim_step(adam).result(60)
    scaled.forward_backward(batch(), "cross_entropy")
    scaled.optim_step(adam, gradient_scale=0.25).result(60)
    plain.forward_backward(batch(), "cross_entropy")
    plain.optim_step(adam).result(60)
    assert loss(weighted, batch()) == pytest.approx(loss(scaled, batch()), rel=1e-6)
    assert loss(weighted, batch()) != pytest.approx(loss(plain, batch()), rel=1e-4)


def test_resuming_gives_identical_next_losses(service: ServiceClient, client: TrainingClient) -> None:
    train(client, batch(), 3)
    path = client.save_state("resume").result(60).path
    expected = train(client, batch(), 3)
    assert train(service.create_training_client_from_state_with_optimizer(path), batch(), 3) == expected
    fresh = train(service.create_training_client_from_state(path), batch(), 3)
    assert fresh[0] == expected[0] and fresh[2] != expected[2]
    client.load_state_with_optimizer(path).result(60)
    assert train(client, batch(), 3) == expected


def test_at_steps_evaluates_between_queued_steps(service: ServiceClient) -> None:
    """A forward submitted by at_steps gives the loss at that step, and does not change later gradients."""
    data, watched, plain = batch(), new_client(service), new_client(service)
    found = {}
    watched.at_steps(2, lambda step: found.update({step: watched.forward(data, "cross_entropy")}), num_steps=10)
    for _ in range(5):
        watched.forward_backward(data, "cross_entropy")
        watched.optim_step(ADAM)
    losses = train(plain, data, 5)
    assert list(found) == [12, 14]
    assert [each.result(60).metrics["loss:sum"] for each in found.values()] == pytest.approx([losses[2], losses[4]])
    assert loss(watched, data) == pytest.approx(loss(plain, data))
    with pytest.raises(ValueError, match="every is 0"):
        watched.at_steps(0, print)


def test_a_custom_loss_in_numpy_equals_the_built_in_one(service: ServiceClient) -> None:
    custom, built_in = new_client(service), new_client(service)

    def negative_log_likelihood(data: Sequence[object], logprobs: Sequence[np.ndarray]):
        return -sum(float(one.sum()) for one in logprobs), [-np.ones_like(one) for one in logprobs]

    output = custom.forward_backward_custom(batch(), negative_log_likelihood).result(60)
    expected = built_in.forward_backward(batch(), "cross_entropy").result(60)
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    for one in (custom, built_in):
        one.optim_step(ADAM).result(60)
    assert loss(custom, batch()) == pytest.approx(loss(built_in, batch()), rel=1e-5)


def test_samplers_use_base_saved_or_live_weights(service: ServiceClient, client: TrainingClient) -> None:
    train(client, batch(), 5)
    path = client.save_weights_for_sampler("sampler").result(60).path
    live = client.save_weights_and_get_sampling_client()
    saved = service.create_sampling_client(model_path=path)
    base = service.create_sampling_client(base_model=MODEL)
    assert saved.base_model == MODEL
    scores = [sampler.compute_logprobs([5, 6, 7]).result(60) for sampler in (live, saved, base)]
    assert scores[0][0] is None
    np.testing.assert_allclose(scores[0][1:], scores[1][1:], atol=1e-5)
    assert np.abs(np.subtract(scores[0][1:], scores[2][1:])).max() > 1e-2


def test_a_sample_has_logprobs_and_a_sequence_id(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    targets = np.asarray([[6], [7]])
    response = sampler.sample(
        [5, 6, 7],
        2,
        SamplingParams(max_tokens=3, stop=[], seed=1),
        include_prompt_logprobs=True,
        target_prompt_logprobs=targets,
    ).result(60)
    assert [(len(one.tokens), len(one.logprobs), one.stop_reason) for one in response.sequences] == [
        (3, 3, "length")
    ] * 2
    assert len({one.sequence_id for one in response.sequences} - {None}) == 2
    assert response.prompt_logprobs is not None and response.target_prompt_logprobs is not None
    np.testing.assert_allclose(response.target_prompt_logprobs[:, 0], response.prompt_logprobs[1:], atol=1e-5)


def test_the_tokenizer_is_fetched_from_the_server(client: TrainingClient) -> None:
    tokenizer = client.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Grüße, 123")) == "Grüße, 123"
    assert tokenizer.eos_token_id == 2


def test_runs_and_sessions_are_listed(service: ServiceClient, client: TrainingClient) -> None:
    rest = service.create_rest_client()
    run = rest.get_training_run(client.model_id).result(60)
    assert (run.base_model, run.lora_rank) == (MODEL, 4)
    assert client.model_id in [one.training_run_id for one in rest.list_training_runs().result(60).training_runs]
    session = rest.get_session(client.model_id.partition(":")[0]).result(60)
    assert client.model_id in session.training_run_ids
    assert client.model_id.partition(":")[0] in rest.list_sessions(1000).result(60).sessions


def test_checkpoints_can_expire_and_be_published(service: ServiceClient, client: TrainingClient) -> None:
    rest = service.create_rest_client()
    path = client.save_state("kept").result(60).path
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(60)
    rest.publish_checkpoint_from_tinker_path(path).result(60)
    (listed,) = rest.list_checkpoints(client.model_id).result(60).checkpoints
    assert (listed.tinker_path, listed.public, listed.expires_at is not None) == (path, True, True)
    rest.unpublish_checkpoint_from_tinker_path(path).result(60)
    (listed,) = rest.list_checkpoints(client.model_id).result(60).checkpoints
    assert not listed.public


def test_checkpoints_can_be_downloaded_copied_and_deleted(
    service: ServiceClient, client: TrainingClient, tmp_path: Path
) -> None:
    rest = service.create_rest_client()
    path = client.save_state("kept").result(60).path
    export = client.save_weights_external("export").result(60).path
    names = {one.name for one in rest.download_checkpoint(export, tmp_path / "export").result(60)}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    copy = rest.copy_weights(path).result(60).tinker_path
    assert copy != path and rest.get_weights_info_by_tinker_path(copy).result(60).lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    remaining = rest.list_user_checkpoints().result(60).checkpoints
    assert export in [one.tinker_path for one in remaining]
    assert path not in [one.tinker_path for one in remaining]


def test_a_sampler_is_listed_in_its_session(service: ServiceClient, client: TrainingClient) -> None:
    path = client.save_weights_for_sampler("listed").result(60).path
    service.create_sampling_client(model_path=path)
    rest = service.create_rest_client()
    session = rest.get_session(client.model_id.partition(":")[0]).result(60)
    samplers = [rest.get_sampler(sampler_id).result(60) for sampler_id in session.sampler_ids]
    assert (MODEL, path) in [(one.base_model, one.model_path) for one in samplers]


def test_a_failed_operation_has_a_category_and_the_next_one_works(client: TrainingClient) -> None:
    with pytest.raises(trainhouse.TrainhouseError, match="no_such_loss") as caught:
        client.forward_backward(batch(), "no_such_loss").result(60)
    if isinstance(caught.value, trainhouse.RequestFailedError):
        assert caught.value.category == "user"
    before = loss(client, batch())
    client.forward_backward(batch(), "cross_entropy")
    with pytest.raises(trainhouse.RequestFailedError):
        # The window held a refused operation.
        client.optim_step(ADAM).result(60)
    train(client, batch(), 1)
    assert loss(client, batch()) != before


def test_refusals_raise_specific_exceptions(shared_server: LiveServer, client: TrainingClient) -> None:
    with ServiceClient(shared_server.url, "not-a-key") as stranger, pytest.raises(trainhouse.AuthenticationError):
        stranger.get_server_capabilities()
    with ServiceClient(shared_server.url, "tml-somebody-else") as other:
        with pytest.raises((trainhouse.NotFoundError, trainhouse.PermissionDeniedError)):
            other.create_rest_client().get_training_run(client.model_id).result(60)
        with pytest.raises(trainhouse.TrainhouseError, match="no/such-model"):
            other.create_lora_training_client("no/such-model")


def test_wrong_use_is_refused_before_anything_is_sent(service: ServiceClient, client: TrainingClient) -> None:
    with pytest.raises(ValueError, match="empty"):
        client.forward_backward([], "cross_entropy")
    with pytest.raises(ValueError, match="model_path"):
        service.create_sampling_client()
    with pytest.raises(ValueError, match="api_key is empty: give a key"):
        ServiceClient(api_key="")
    with pytest.raises(trainhouse.BadRequestError, match="a served model is named as base_model"):
        service.create_sampling_client(model_path=MODEL)
    with pytest.raises(ValueError, match="learning_rate"):
        client.optim_step(AdamParams(learning_rate=-1))
    with pytest.raises(TypeError, match=r"data is one Datum: give a list of them, \[datum\]"):
        client.forward_backward(batch()[0], "cross_entropy")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"data\[2\] is of type dict: pass trainhouse.Datum\(tokens, loss_fn_inputs\)"):
        client.forward_backward([*batch(), {"a": 1}], "cross_entropy")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"data\[0\] is of type dict"):
        client.forward_backward_custom([{"a": 1}], lambda data, logprobs: (0.0, []))  # pyright: ignore[reportArgumentType]
    train(client, batch(), 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda client: client.log({"a": "x"}), r"metrics\['a'\] is 'x': it should be a number"),
        (lambda client: client.log({"a": [1, 2]}), r"metrics\['a'\] is \[1, 2\]: it should be a number"),
        (lambda client: client.log(5), "metrics is 5: give a dict"),
        (lambda client: client.forward_backward(batch(), "cross_entropy", 0.5), "loss_fn_config is 0.5: give a dict"),
        (lambda client: client.forward_backward(batch(), "ppo", {"beta": None}), "beta is None: it should be a number"),
        (lambda client: client.forward_backward(batch(), len), "loss_fn is <built-in .*forward_backward_custom"),
        (
            lambda client: client.forward_backward(batch(), "cross_entropy", loss_weight="a"),
            "loss_weight is 'a': it sh",
        ),
        (lambda client: client.forward_backward(batch(), "cross_entropy", capture_for="d"), "capture_for is 'd': give"),
        (lambda client: client.forward_backward(iter(batch()), "cross_entropy"), "data is of type list_iterator: give"),
        (lambda client: client.create_evaluation("h", 10, 10), "data is of type int: give a list"),
        (lambda client: client.create_evaluation(batch(), "h", 10), "name is .*: give a text"),
        (lambda client: client.create_evaluation("h", 1.5, batch()), "every is 1.5: give a number of steps"),
        (lambda client: client.optim_step(AdamParams(), "average"), "gradient_scale is 'average': it should be a num"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[Any], object], words: str, client: TrainingClient) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call(client)


@pytest.mark.slow
def test_an_adapter_can_be_imported_by_client_or_command_and_trained(
    service: ServiceClient, shared_server: LiveServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trained = new_client(service)
    train(trained, batch(), 1)
    exported = trained.save_state("to-import").result().path
    rest = service.create_rest_client()
    rest.download_checkpoint(exported, tmp_path).result()
    path = rest.import_adapter(tmp_path).result().tinker_path
    losses = [
        service.create_training_client_from_state(one).forward(batch(), "cross_entropy").result().metrics["loss:sum"]
        for one in (path, exported)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert train(service.create_training_client_from_state(path), batch(), 2)

    command = [sys.executable, "-m", "trainhouse.server", "import", tmp_path.as_uri(), f"--base-model={MODEL}"]
    command += ["--name=mine", f"--base-url={shared_server.url}", "--api-key=tml-client-tests"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip().endswith("/weights/mine"), done.stderr
    done = subprocess.run([*command, "--base-model=other"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "base model other is not served here" in done.stderr
    with hub_server(tmp_path_factory.mktemp("hub")) as hub:
        hub.create("alice/adapters", is_private=True)
        for name in PEFT_FILES:
            hub.add("alice/adapters", f"pirate/{name}", (tmp_path / name).read_bytes())
        command[command.index(tmp_path.as_uri())] = "hf://alice/adapters@main/pirate"
        done = subprocess.run([*command, "--name=of-the-hub"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.strip().endswith("/weights/of-the-hub"), done.stderr
    imported = service.create_training_client_from_state(done.stdout.strip())
    assert imported.forward(batch(), "cross_entropy").result().metrics["loss:sum"] == pytest.approx(losses[0], rel=1e-5)
    with pytest.raises(ValueError, match=r"adapter_config.json is missing"):
        rest.import_adapter(tmp_path / "none").result()
