"""The unmodified official SDK against a live server process, on both pools."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pyrage
import pytest
import tinker
import torch
import trainhouse
from peft import LoraConfig, PeftModel, get_peft_model
from tinker import types
from transformers import AutoModelForCausalLM

from ..live import DEPLOYMENTS, EACH_DEPLOYMENT, LiveServer, live_server
from ..official import official_service

# The SDK leaves connections to its interpreter's end.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

MODEL = "tiny/qwen3"
VOCAB = 512


@pytest.fixture(scope="module", params=EACH_DEPLOYMENT)
def server(request: pytest.FixtureRequest, tiny_models: dict[str, Path], tmp_path_factory) -> Iterator[LiveServer]:
    with live_server(
        {MODEL: tiny_models["qwen3"]},
        tmp_path_factory.mktemp("state"),
        sdk_max_chunk_datums=3,
        **DEPLOYMENTS[request.param],
    ) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with official_service(server.url, "tml-acceptance") as client:
        yield client


@pytest.fixture(scope="module")
def rest(server: LiveServer) -> Iterator[tinker.RestClient]:
    client = tinker.RestClient(base_url=server.url, api_key="tml-acceptance")
    yield client
    client.holder.close()


@pytest.fixture
def make_training(service: tinker.ServiceClient) -> Callable[..., tinker.TrainingClient]:
    def make(rank: int = 8, seed: int = 1, **options: object) -> tinker.TrainingClient:
        return service.create_lora_training_client(MODEL, rank=rank, seed=seed, **options).result(60)

    return make


def datum(tokens: list[int], **inputs: object) -> types.Datum:
    given = inputs or {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    arrays = {
        name: np.asarray(value, dtype=np.int64 if name == "target_tokens" else np.float32)
        for name, value in given.items()
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in arrays.items()},
    )


def batch(num_datums: int = 4, seed: int = 0) -> list[types.Datum]:
    random = np.random.default_rng(seed)
    return [datum(random.integers(3, VOCAB, random.integers(6, 24)).tolist()) for _ in range(num_datums)]


def loss_of(output: types.ForwardBackwardOutput) -> float:
    return output.metrics["loss:sum"]


ADAM = types.AdamParams(learning_rate=1e-2)


def train(client: tinker.TrainingClient, data: list[types.Datum], num_steps: int) -> list[float]:
    """Sends both requests of a step before waiting for either result."""
    losses = []
    for _ in range(num_steps):
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
        losses.append(loss_of(passed.result(60)))
        stepped.result(60)
    return losses


def test_capabilities_name_the_served_model(rest: tinker.RestClient) -> None:
    models = rest.get_server_capabilities().result(60).supported_models
    assert [(model.model_name, model.max_context_length) for model in models] == [(MODEL, 1024)]


def test_thirty_steps_on_a_fixed_batch_halve_the_loss(make_training) -> None:
    losses = train(make_training(), batch(), 30)
    assert losses[-1] < losses[0] / 2


def test_get_info_describes_the_adapter(make_training) -> None:
    info = make_training(rank=4).get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 4, MODEL)


def test_pipelined_steps_equal_steps_one_by_one(make_training) -> None:
    ahead, one_by_one = make_training(), make_training()
    futures = []
    for _ in range(6):
        futures.append(ahead.forward_backward(batch(), "cross_entropy"))
        futures.append(ahead.optim_step(ADAM))
    pipelined = [loss_of(future.result(60)) for future in futures[::2]]
    for future in futures[1::2]:
        future.result(60)
    assert pipelined == train(one_by_one, batch(), 6)


def test_chunked_batch_gives_the_update_of_its_parts(make_training) -> None:
    """The server's chunk size is three datums: ten datums are sent as four concurrent requests."""
    chunked, by_hand = make_training(), make_training()
    data = batch(10)
    whole = chunked.forward_backward(data, "cross_entropy").result(60)
    parts = [loss_of(by_hand.forward_backward([one], "cross_entropy").result(60)) for one in data]
    assert len(whole.loss_fn_outputs) == 10
    assert loss_of(whole) == pytest.approx(sum(parts), rel=1e-5)
    for client in (chunked, by_hand):
        client.optim_step(ADAM).result(60)
    after = [loss_of(client.forward(data, "cross_entropy").result(60)) for client in (chunked, by_hand)]
    assert after[0] == pytest.approx(after[1], rel=1e-4)
    assert after[0] != pytest.approx(loss_of(whole), rel=1e-3)


def test_forward_changes_nothing(make_training) -> None:
    client = make_training()
    first = loss_of(client.forward(batch(), "cross_entropy").result(60))
    assert loss_of(client.forward(batch(), "cross_entropy").result(60)) == first
    with pytest.raises(tinker.RequestFailedError, match="forward_backward"):
        client.optim_step(ADAM).result(60)


def test_resume_from_a_saved_state_gives_identical_next_losses(service: tinker.ServiceClient, make_training) -> None:
    client = make_training()
    train(client, batch(), 5)
    path = client.save_state("resume-me").result(60).path
    expected = train(client, batch(), 4)
    resumed = service.create_training_client_from_state_with_optimizer(path).result(60)
    assert train(resumed, batch(), 4) == expected
    fresh_optimizer = service.create_training_client_from_state(path).result(60)
    without = train(fresh_optimizer, batch(), 4)
    assert without[0] == expected[0]
    assert without[2:] != expected[2:]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_imported_peft_adapter_trains_and_samples(
    service: tinker.ServiceClient, server: LiveServer, make_training, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """The adapter uses rsLoRA, and another alpha than new models."""
    base = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "down_proj"])
    tuned = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    tuned.save_pretrained(tmp_path)
    with trainhouse.ServiceClient(server.url, "tml-acceptance") as ours:
        path = ours.create_rest_client().import_adapter(tmp_path, MODEL).result().tinker_path

    tokens = [5, 9, 77, 130, 4, 301]
    with torch.no_grad():
        logprobs = tuned(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [logprobs[i, token].item() for i, token in enumerate(tokens[1:])]
    client = service.create_training_client_from_state(path).result(60)
    scored = client.forward([datum(tokens)], "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(scored, expected, atol=1e-4)
    bare = make_training().forward([datum(tokens)], "cross_entropy").result(60)
    assert np.abs(bare.loss_fn_outputs[0]["logprobs"].to_numpy() - expected).max() > 1e-2
    sampler = service.create_sampling_client(model_path=path).result(60)
    np.testing.assert_allclose(
        sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result(60)[1:], expected, atol=1e-4
    )
    losses = train(client, [datum(tokens)], 4)
    assert losses[-1] < losses[0]


def test_load_state_into_the_live_model_discards_pending_gradients(make_training) -> None:
    client = make_training()
    train(client, batch(), 3)
    path = client.save_state("before").result(60).path
    expected = train(client, batch(), 3)
    client.forward_backward(batch(seed=9), "cross_entropy").result(60)
    with pytest.warns(FutureWarning, match="deprecated"):
        client.load_state_with_optimizer(path).result(60)
    assert train(client, batch(), 3) == expected


def test_save_state_keeps_pending_gradients(make_training) -> None:
    saved, plain = make_training(), make_training()
    for client in (saved, plain):
        client.forward_backward(batch(), "cross_entropy").result(60)
    saved.save_state("in-between").result(60)
    for client in (saved, plain):
        client.optim_step(ADAM).result(60)
    losses = [loss_of(client.forward(batch(), "cross_entropy").result(60)) for client in (saved, plain)]
    assert losses[0] == losses[1]


def test_sampler_logprobs_equal_the_trainers(make_training) -> None:
    """Sampler and trainer share the weights, so log-probabilities agree to 1e-4 in float32."""
    client = make_training()
    train(client, batch(), 8)
    sampler = client.save_weights_and_get_sampling_client().result(60)
    prompt = [7, 8, 9, 10]
    params = types.SamplingParams(max_tokens=12, temperature=0.9, seed=3, stop=[])
    response = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=3, sampling_params=params).result(60)
    base = make_training(seed=2)
    for sequence in response.sequences:
        assert len(sequence.tokens) == 12 and sequence.stop_reason == "length"
        data = [datum(prompt + list(sequence.tokens))]
        trainer = logprobs_of(client.forward(data, "cross_entropy").result(60))[len(prompt) - 1 :]
        np.testing.assert_allclose(trainer, sequence.logprobs, atol=1e-4)
        untrained = logprobs_of(base.forward(data, "cross_entropy").result(60))[len(prompt) - 1 :]
        assert np.abs(untrained - np.asarray(sequence.logprobs)).max() > 1e-2


def logprobs_of(output: types.ForwardBackwardOutput, index: int = 0) -> np.ndarray:
    return output.loss_fn_outputs[index]["logprobs"].to_numpy()


def test_a_seed_gives_the_same_tokens_again(make_training) -> None:
    sampler = make_training().save_weights_and_get_sampling_client().result(60)
    params = types.SamplingParams(max_tokens=8, seed=11, stop=[])
    prompt = types.ModelInput.from_ints([5, 6, 7])
    tokens = [
        [list(sequence.tokens) for sequence in sampler.sample(prompt, 2, params).result(60).sequences] for _ in range(2)
    ]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]


def test_compute_logprobs_equals_forward(service: tinker.ServiceClient, make_training) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result(60)
    tokens = [5, 6, 7, 8, 9, 10]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result(60)
    forward = logprobs_of(make_training().forward([datum(tokens)], "cross_entropy").result(60))
    assert scored[0] is None
    np.testing.assert_allclose(np.asarray(scored[1:], dtype=np.float64), forward, atol=1e-4)


def test_prompt_and_topk_logprobs(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result(60)
    response = sampler.sample(
        types.ModelInput.from_ints([5, 6, 7, 8]),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=2, seed=1, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result(60)
    assert response.prompt_logprobs is not None and len(response.prompt_logprobs) == 4
    assert response.topk_prompt_logprobs is not None
    assert [None if row is None else len(row) for row in response.topk_prompt_logprobs] == [None, 3, 3, 3]


def test_named_sampler_weights_do_not_change_after_saving(service: tinker.ServiceClient, make_training) -> None:
    client = make_training()
    train(client, batch(), 3)
    path = client.save_weights_for_sampler("snapshot").result(60).path
    sampler = service.create_sampling_client(model_path=path).result(60)
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    before = sampler.compute_logprobs(prompt).result(60)
    train(client, batch(), 5)
    assert sampler.compute_logprobs(prompt).result(60) == before
    assert client.save_weights_and_get_sampling_client().result(60).compute_logprobs(prompt).result(60) != before


def test_forward_backward_custom_equals_the_built_in_loss(make_training) -> None:
    def negative_log_likelihood(data, logprobs_list):
        loss = -sum(logprobs.sum() for logprobs in logprobs_list)
        return loss, {"mine": float(loss.detach())}

    custom, built_in = make_training(), make_training()
    output = custom.forward_backward_custom(batch(), negative_log_likelihood).result(60)
    expected = built_in.forward_backward(batch(), "cross_entropy").result(60)
    assert loss_of(output) == pytest.approx(loss_of(expected), rel=1e-5)
    for client in (custom, built_in):
        client.optim_step(ADAM).result(60)
    losses = [loss_of(client.forward(batch(), "cross_entropy").result(60)) for client in (custom, built_in)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses_train_on_sampled_tokens(make_training, loss: str) -> None:
    client = make_training()
    tokens = [5, 6, 7, 8, 9, 10]
    old = logprobs_of(client.forward([datum(tokens)], "cross_entropy").result(60))
    data = [datum(tokens, target_tokens=tokens[1:], logprobs=old, advantages=[1.0] * 5)]
    output = client.forward_backward(data, loss)
    client.optim_step(ADAM).result(60)
    assert np.isfinite(loss_of(output.result(60)))
    assert logprobs_of(client.forward([datum(tokens)], "cross_entropy").result(60)).sum() > old.sum()


def test_two_dimensional_targets_dense_and_sparse_agree(make_training) -> None:
    tokens = [5, 6, 7, 8, 9]
    targets = torch.zeros(4, 8, dtype=torch.int64)
    weights = torch.zeros(4, 8)
    targets[:, 0], weights[:, 0] = torch.tensor(tokens[1:]), 0.5
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},  # sparsified by the SDK
    )
    dense = datum(tokens, target_tokens=targets.numpy(), weights=weights.numpy())
    client = make_training()
    losses = [loss_of(client.forward([one], "cross_entropy").result(60)) for one in (sparse, dense, datum(tokens))]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2] / 2, rel=1e-5)


def test_bad_data_fails_only_its_future(make_training) -> None:
    client = make_training()
    bad = client.forward_backward([datum([5, 6, VOCAB + 7])], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=str(VOCAB + 7)):
        bad.result(60)
    with pytest.raises(tinker.RequestFailedError, match="forward_backward"):
        client.optim_step(ADAM).result(60)
    assert train(client, batch(), 2)[1] > 0


def test_rest_listing_ttl_publish_and_delete(rest: tinker.RestClient, make_training) -> None:
    client = make_training()
    train(client, batch(), 1)
    path = client.save_state("listed", ttl_seconds=7200).result(60).path
    run_id = path.removeprefix("tinker://").split("/")[0]
    assert run_id in [run.training_run_id for run in rest.list_training_runs(limit=100).result(60).training_runs]
    assert rest.get_training_run(run_id).result(60).lora_rank == 8

    def listed() -> dict[str, types.Checkpoint]:
        return {one.checkpoint_id: one for one in rest.list_checkpoints(run_id).result(60).checkpoints}

    checkpoint = listed()["weights/listed"]
    assert checkpoint.tinker_path == path and checkpoint.size_bytes and not checkpoint.public
    assert checkpoint.expires_at is not None
    assert 7000 < (checkpoint.expires_at - datetime.now(UTC)).total_seconds() <= 7200
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(60)
    assert listed()["weights/listed"].expires_at is None
    rest.publish_checkpoint_from_tinker_path(path).result(60)
    assert listed()["weights/listed"].public
    rest.unpublish_checkpoint_from_tinker_path(path).result(60)
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    assert listed() == {}


def test_checkpoints_are_scheduled_by_the_metadata_of_a_model(rest: tinker.RestClient, make_training) -> None:
    metadata = {"trainhouse.checkpoints": '{"every": 2, "keep_last": 1}'}
    training = make_training(user_metadata=metadata)
    data = [datum([5, 6, 7, 8])]
    stepped = []
    for _ in range(5):
        training.forward_backward(data, "cross_entropy")
        stepped.append(training.optim_step(types.AdamParams(learning_rate=1e-3)))
    saved = [step.result(60).metrics.get("checkpoint_step:last") for step in stepped]
    assert saved == [None, 2, None, 4, None]
    listed = rest.list_checkpoints(training.get_info().model_id).result(60).checkpoints
    assert [each.checkpoint_id for each in listed] == ["weights/step-000004"]


def test_another_tenant_sees_and_loads_nothing(server: LiveServer, make_training) -> None:
    client = make_training()
    train(client, batch(), 1)
    path = client.save_state("private").result(60).path
    with official_service(server.url, "tml-stranger") as stranger:
        rest = tinker.RestClient(base_url=server.url, api_key="tml-stranger")
        assert rest.list_user_checkpoints().result(60).checkpoints == []
        with pytest.raises((tinker.APIError, tinker.RequestFailedError, ValueError)):
            stranger.create_training_client_from_state(path).result(60)


def test_stable_reinforce_uses_logprobs_recorded_by_the_sampler(make_training) -> None:
    client = make_training()
    prompt = [7, 8, 9, 10]
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result(60)
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    (sampled,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(60).sequences
    tokens = prompt + list(sampled.tokens)
    advantages = [0.0] * 3 + [1.0] * 6
    one = datum(tokens, target_tokens=tokens[1:], advantages=advantages)

    def with_provenance(sequence_id: str) -> types.Datum:
        in_prompt = types.PromptProvenanceSpan(sequence_id=sequence_id, length=4)
        drawn = types.SampledProvenanceSpan(sequence_id=sequence_id, length=5)
        targets = [
            types.PromptProvenanceSpan(sequence_id=sequence_id, offset=1, length=3),
            types.SampledProvenanceSpan(sequence_id=sequence_id, length=6),
        ]
        return one.with_provenance([in_prompt, drawn], targets)

    output = client.forward_backward([with_provenance(sampled.sequence_id)], "stable_reinforce").result(60)
    assert loss_of(output) == pytest.approx(-sum(sampled.logprobs), abs=1e-3)  # the ratio is one, the drift zero
    client.optim_step(ADAM).result(60)
    after = logprobs_of(client.forward([datum(tokens)], "cross_entropy").result(60))[3:]
    assert after.sum() > sum(sampled.logprobs)
    with pytest.raises(tinker.RequestFailedError, match="nobody"):
        client.forward_backward([with_provenance("nobody:sample:0:0")], "stable_reinforce").result(60)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
def test_external_weights_download_as_a_peft_adapter(
    rest: tinker.RestClient, make_training, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    client = make_training()
    train(client, batch(), 4)
    path = client.save_weights_external("export").result(60).path
    download(rest, path, tmp_path)
    tokens = torch.tensor([5, 6, 7, 8, 9, 10])
    model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float32)
    expected = logprobs_of(client.forward([datum(tokens.tolist())], "cross_entropy").result(60))
    bare = token_logprobs(model, tokens)
    np.testing.assert_allclose(token_logprobs(PeftModel.from_pretrained(model, tmp_path), tokens), expected, atol=1e-4)
    assert np.abs(bare - expected).max() > 1e-2


def download(rest: tinker.RestClient, path: str, directory: Path) -> list[str]:
    urls = rest.get_external_weights_urls(path).result(60).urls
    for file, url in urls.items():
        with urlopen(url, timeout=30) as response:
            (directory / file).write_bytes(response.read())
    return sorted(urls)


def test_export_is_encrypted_to_age_recipients(
    service: tinker.ServiceClient, rest: tinker.RestClient, make_training, tmp_path: Path
) -> None:
    """These are the steps of the cookbook's `weights.download` for a training checkpoint."""
    source = make_training()
    train(source, batch(), 2)
    client = service.create_training_client_from_state(source.save_state("saved").result(60).path).result(60)
    identity, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    saving = client.save_weights_external(
        "download", ttl_seconds=86400, age_encryption_recipients=[str(identity.to_public())]
    )
    path = saving.result(60).path
    plain, encrypted = tmp_path / "plain", tmp_path / "encrypted"
    plain.mkdir(), encrypted.mkdir()
    names = download(rest, client.save_weights_external("plain").result(60).path, plain)
    assert download(rest, path, encrypted) == [f"{name}.age" for name in names]
    for name in names:
        content = (encrypted / f"{name}.age").read_bytes()
        assert pyrage.decrypt(content, [identity]) == (plain / name).read_bytes()
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(content, [other])
    rest.set_checkpoint_ttl_from_tinker_path(path, 86400).result(60)
    rest.delete_checkpoint_from_tinker_path(path).result(60)


def test_invalid_age_recipient_is_refused(make_training) -> None:
    client = make_training()
    with pytest.raises(tinker.RequestFailedError, match=r"'age1nobody' is not an age public key"):
        client.save_weights_external("never", age_encryption_recipients=["age1nobody"]).result(60)
    assert train(client, batch(), 1)


# Names that loggers use: the cookbook, Weights & Biases, TensorBoard, MLflow and transformers' Trainer.
LOGGER_NAMES = {
    *("step", "epoch", "progress", "time", "timestamp", "runtime", "wall_time", "global_step", "loss", "grad_norm"),
    *("lr", "learning_rate", "num_sequences", "num_tokens", "num_loss_tokens", "_step", "_runtime", "_timestamp"),
}


def test_metrics_do_not_use_names_of_loggers(make_training) -> None:
    client = make_training()
    passed = client.forward_backward(batch(), "cross_entropy").result(60).metrics
    for clip in (0.0, 1e-9):
        client.forward_backward(batch(), "cross_entropy").result(60)
        adam = types.AdamParams(learning_rate=1e-3, grad_clip_norm=clip)
        metrics = client.optim_step(adam).result(60).metrics
        assert metrics is not None and not LOGGER_NAMES & {*passed, *metrics}
        assert metrics["unclipped_grad_l2:mean"] > 1e-2 and metrics["grad_clipped:mean"] == (clip > 0)


@torch.no_grad()
def token_logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    logprobs = model(input_ids=tokens[None, :-1]).logits[0].log_softmax(-1)
    return logprobs[torch.arange(len(tokens) - 1), tokens[1:]].numpy()


@pytest.mark.slow
def test_the_sdks_command_line_lists_checkpoints(server: LiveServer, make_training) -> None:
    client = make_training()
    train(client, batch(), 1)
    client.save_state("from-the-cli").result(60)
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-acceptance"}
    command = Path(sys.executable).with_name("tinker")
    done = subprocess.run(
        [command, "--format", "json", "checkpoint", "list"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "weights/from-the-cli" in done.stdout


@pytest.mark.slow
def test_samples_polled_together_in_one_request(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with (
        live_server({MODEL: tiny_models["qwen3"]}, tmp_path, sdk_sample_polling="together") as server,
        official_service(server.url, "tml-acceptance") as client,
    ):
        sampler = client.create_sampling_client(base_model=MODEL).result(60)
        params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
        futures = [sampler.sample(types.ModelInput.from_ints([5, 6, n]), 1, params) for n in range(3, 23)]
        assert [len(future.result(60).sequences[0].tokens) for future in futures] == [4] * 20
        stop_string = types.SamplingParams(max_tokens=4, stop=["x"])
        with pytest.raises(tinker.RequestFailedError, match="tokenizer"):
            sampler.sample(types.ModelInput.from_ints([5]), 1, stop_string).result(60)


def test_result_that_is_not_ready_is_waited_for(make_training) -> None:
    """A result that is not ready is waited for, not failed."""
    client = make_training()
    future = client.forward_backward(batch(64), "cross_entropy")
    started = time.monotonic()
    try:
        future.result(0.0)
    except (FutureTimeout, TimeoutError):
        assert time.monotonic() - started < 30
    assert loss_of(future.result(60)) > 0
