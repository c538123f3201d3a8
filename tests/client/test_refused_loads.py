"""Errors about checkpoints that do not fit or are damaged name the checkpoint's path, never the server's
directories."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainhouse import APIFuture, SamplingParams, ServiceClient, TrainhouseError, TrainingClient
from trainhouse.schemas.checkpoints import SaveWeightsForSamplerResponse, SaveWeightsResponse
from trainhouse.server.files.manifest import MANIFEST, read_manifest, write_manifest

from ..live import LiveServer, live_server

pytestmark = pytest.mark.slow

MODEL = "tiny/qwen3"
BEFORE = " cannot be loaded: the checkpoint "
Saved = APIFuture[SaveWeightsResponse] | APIFuture[SaveWeightsForSamplerResponse]
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def service(server: LiveServer) -> Iterator[ServiceClient]:
    with ServiceClient(server.url, "tml-loads") as service:
        yield service


def refusal(server: LiveServer, load: Callable[[], Any]) -> str:
    """Returns the error that the tenant gets, which must not name the server's directories."""
    with pytest.raises(TrainhouseError) as refused:
        load()
    message = str(refused.value)
    assert str(server.state_dir) not in message
    return message


def path_of(saved: Saved) -> str:
    path = saved.result().path
    assert path is not None
    return path


def create_policy(service: ServiceClient, rank: int, **fields: Any) -> TrainingClient:
    return service.create_lora_training_client(MODEL, rank=rank, **fields)


def test_loading_a_checkpoint_of_another_shape_is_refused(server: LiveServer, service: ServiceClient) -> None:
    policy = create_policy(service, 4)
    path = path_of(policy.save_state("a"))
    for other, reason in (
        (create_policy(service, 8), "was saved with rank 4, the model has rank 8: create a model with rank 4"),
        (create_policy(service, 4, train_mlp=False), "adapts other layers than the model"),
    ):
        assert f"{path}{BEFORE}{reason}" in refusal(server, lambda other=other: other.load_state(path).result())


def test_loading_a_checkpoint_of_another_draft_is_refused(server: LiveServer, service: ServiceClient) -> None:
    path = path_of(service.create_draft_client(MODEL, "eagle3").save_state("a"))
    draft = service.create_draft_client(MODEL, "dflash")
    reason = f"{path}{BEFORE}was saved with "
    message = refusal(server, lambda: draft.load_state(path).result())
    assert reason in message and message.endswith("create a draft of that shape and load into that")


def other_format(files: Path) -> None:
    """Makes the checkpoint look as if a newer server had saved it, with a valid manifest."""
    about = read_manifest(files)
    (files / MANIFEST).unlink()
    (files / "trainhouse.json").write_text(json.dumps({"format": 99}))
    write_manifest(files, {name: each for name, each in about.items() if name != "files"})


def lost(files: Path) -> None:
    (files / "trainhouse.json").unlink()


@pytest.mark.parametrize(
    "damage, reason",
    [
        (other_format, BEFORE + "has format 99; this server reads formats 1 and 2"),
        (lost, " cannot be read: its files are lost, damaged or out of reach, and the server's log says why"),
    ],
    ids=["newer", "lost"],
)
def test_checkpoints_that_cannot_be_read_are_refused(
    server: LiveServer, service: ServiceClient, damage: Damage, reason: str
) -> None:
    policy, draft = create_policy(service, 4), service.create_draft_client(MODEL, "eagle3")
    name = damage.__name__
    policy_path = path_of(policy.save_state(name))
    sampler_path, draft_path = (path_of(each.save_weights_for_sampler(name)) for each in (policy, draft))
    for path in (policy_path, sampler_path, draft_path):
        (files,) = server.state_dir.glob(f"checkpoints/{path.removeprefix('tinker://').replace(':', '_')}.*")
        damage(files)

    def sample(**of: str) -> None:
        service.create_sampling_client(**of).sample([5, 6], 1, SamplingParams(max_tokens=2)).result()

    for path, load in (
        (policy_path, lambda: policy.load_state(policy_path).result()),
        (policy_path, lambda: service.create_training_client_from_state(policy_path)),
        (policy_path, lambda: draft.set_target(policy_path).result()),
        (policy_path, lambda: service.create_draft_client(MODEL, "eagle3", target_path=policy_path)),
        (sampler_path, lambda: sample(model_path=sampler_path)),
        (draft_path, lambda: sample(base_model=MODEL, draft_path=draft_path)),
    ):
        assert path + reason in refusal(server, load)
    if damage is lost:
        assert "trainhouse.json is missing" in server.log_tail()
