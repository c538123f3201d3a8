"""Full models through our client, with workers that compute nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainhouse import ServiceClient, TrainhouseError

from ..live import live_server
from ..server.noting import NOTING

MODEL = "tiny/qwen3"


@pytest.fixture
def service(tiny_models: dict[str, Path], tmp_path: Path) -> Iterator[ServiceClient]:
    with (
        live_server({MODEL: tiny_models["qwen3"]}, tmp_path, module=NOTING, max_full_models=4) as server,
        ServiceClient(server.url, "tml-full") as client,
    ):
        yield client


def test_a_full_model_is_created_saved_and_resumed(service: ServiceClient) -> None:
    made = service.create_full_training_client(MODEL, seed=3, user_metadata={"for": "a test"}, model_role="critic")
    saved = made.save_state("a").result(60).path
    policy = service.create_full_training_client_async(MODEL).result(60)
    for client in (
        made,
        policy,
        service.create_training_client_from_state(saved),
        service.create_training_client_from_state_with_optimizer(saved),
    ):
        info = client.get_info()
        assert (info.is_lora, info.lora_rank, info.lora_alpha, info.target_modules) == (False, 0, 0.0, [])
    run = service.create_rest_client().get_training_run(made.model_id).result(60)
    assert (run.is_lora, run.lora_rank, run.model_role, run.user_metadata) == (False, None, "critic", {"for": "a test"})
    assert made.load_state_with_optimizer(saved).result(60).path == saved
    lora = service.create_lora_training_client(MODEL, rank=4)
    assert lora.get_info().is_lora
    with pytest.raises(TrainhouseError, match="create a model from it"):
        policy.load_state(lora.save_state("b").result(60).path).result(60)
    with pytest.raises(TrainhouseError, match="as many full models as max_full_models 4"):
        service.create_full_training_client(MODEL)
