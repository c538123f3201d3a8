"""A session lives as long as its client, even if the client sends no requests."""

import time
from pathlib import Path

import pytest
import trainhouse
from trainhouse.client import service as service_module

from ..live import live_server


@pytest.mark.full
def test_a_silent_client_keeps_its_session_by_heartbeats(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle(heartbeat_seconds: float) -> None:
        monkeypatch.setattr(service_module, "HEARTBEAT_SECONDS", heartbeat_seconds)
        with trainhouse.ServiceClient(server.url, "tml-heartbeat") as service:
            client = service.create_lora_training_client("tiny", rank=2)
            time.sleep(3)
            client.get_info()

    with live_server({"tiny": tiny_models["llama"]}, tmp_path, session_expiry_seconds=1.5) as server:
        idle(heartbeat_seconds=0.3)
        with pytest.raises(trainhouse.TrainhouseError):
            idle(heartbeat_seconds=60)
