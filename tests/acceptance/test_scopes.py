"""The official SDK and our client with keys of minimal scopes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import trainhouse
from tinker import types
from trainhouse.server.cli.commands import main

from ..fuzz.serving import Served, served
from ..official import official_service
from ..server.real import MODEL, batch, server_config

# The SDK leaves connections to its interpreter's end.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(server_config(tiny_models["qwen3"], tmp_path_factory.mktemp("state"))) as running:
        yield running


def key_with(server: Served, scopes: str, capsys: pytest.CaptureFixture[str]) -> str:
    place = ["--state-dir", str(server.services.config.store.state_dir)]
    assert main(["keys", "create", "team", "--scopes", scopes, *place]) == 0
    return capsys.readouterr().out.strip()


def test_sdk_trains_saves_and_samples_without_admin(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    key = key_with(server, "train,sample,read", capsys)
    with official_service(server.url, key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1).result(60)
        losses = []
        for _ in range(2):
            losses.append(training.forward_backward(batch(), "cross_entropy").result(60).metrics["loss:sum"])
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
        assert losses[1] < losses[0]
        saved = training.save_state("state").result(60).path
        again = service.create_training_client_from_state_with_optimizer(saved).result(60)
        assert again.get_info().model_data.model_name == MODEL
        sampler = training.save_weights_and_get_sampling_client().result(60)
        prompt = types.ModelInput.from_ints([5, 6, 7])
        params = types.SamplingParams(max_tokens=4, seed=1)
        assert sampler.sample(prompt, 1, params).result(60).sequences[0].tokens
    rest = tinker.RestClient(base_url=server.url, api_key=key)
    assert rest.get_server_capabilities().result(60).supported_models
    assert rest.list_user_checkpoints().result(60).checkpoints
    for refused in (rest.delete_checkpoint_from_tinker_path, rest.publish_checkpoint_from_tinker_path):
        with pytest.raises(tinker.PermissionDeniedError, match="needs admin"):
            refused(saved).result(60)
    rest.holder.close()


def test_sdk_samples_with_a_sample_only_key(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    key = key_with(server, "sample", capsys)
    with official_service(server.url, key) as service:
        sampler = service.create_sampling_client(base_model=MODEL).result(60)
        prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=4, seed=1)
        assert sampler.sample(prompt, 1, params).result(60).sequences[0].tokens
        with pytest.raises(tinker.PermissionDeniedError, match=r"has the scope sample, and .* needs train"):
            service.create_lora_training_client(MODEL, rank=4).result(60)


def test_our_client_lists_with_a_read_only_key(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with trainhouse.ServiceClient(server.url, key_with(server, "read", capsys)) as service:
        assert service.get_server_capabilities()
        with pytest.raises(Exception, match="needs train or sample"):
            service.create_sampling_client(base_model=MODEL).sample([5, 6], 1).result(30)
