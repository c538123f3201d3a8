"""The official SDK resumes full models, though it cannot create them; the workers are stubs."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tinker
from trainhouse import ServiceClient

from ..live import LiveServer, live_server
from ..official import official_service
from ..server.noting import NOTING

# The SDK leaves connections to its interpreter's end.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

MODEL = "tiny/qwen3"
KEY = "tml-full"


@pytest.fixture
def server(tiny_models: dict[str, Path], tmp_path: Path) -> Iterator[LiveServer]:
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, module=NOTING) as running:
        yield running


@pytest.mark.slow
def test_official_sdk_resumes_a_full_checkpoint(server: LiveServer) -> None:
    with ServiceClient(server.url, KEY) as service:
        made = service.create_full_training_client(MODEL)
        saved = made.save_state("a").result(60).path
        sampled = made.save_weights_for_sampler("a").result(60).path
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    with closing(rest.holder), official_service(server.url, KEY) as official:
        for create in (
            official.create_training_client_from_state,
            official.create_training_client_from_state_with_optimizer,
        ):
            training = create(saved).result(60)
            info = training.get_info()
            assert (info.is_lora, info.lora_rank, info.model_name) == (False, 0, MODEL)
            again = training.save_state("again").result(60).path
            weights = rest.get_weights_info_by_tinker_path(again).result(60)
            assert (weights.is_lora, weights.lora_rank, weights.train_mlp) == (False, None, None)
            run = rest.get_training_run(training.model_id).result(60)
            assert (run.is_lora, run.lora_rank) == (False, None)
        assert official.create_sampling_client(model_path=sampled).result(60).get_base_model() == MODEL
