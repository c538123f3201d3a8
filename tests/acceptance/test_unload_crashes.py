"""A model that was unloaded stays so when the server is killed, whenever that happens."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from .crashing import Crashing
from .killed_in_hooks import ARMED, KILLED_IN_HOOKS
from .training_script import MODEL

pytestmark = pytest.mark.slow

DATA = [{"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]}}]
PASS: dict[str, Any] = {"data": DATA, "loss_fn": "cross_entropy"}


class Client:
    def __init__(self, url: str) -> None:
        self._url = f"{url}/api/v1/"

    def _post(self, verb: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self._url + verb, json=body, headers={"X-API-Key": "tml-alice"}, timeout=60)

    def post(self, verb: str, body: dict[str, Any], status: int = 200) -> Any:
        answer = self._post(verb, body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def result(self, submitted: dict[str, Any]) -> Any:
        while (answer := self._post("retrieve_future", {"request_id": submitted["request_id"]})).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        return answer.json()

    def create(self, session_id: str, number: int) -> dict[str, Any]:
        body = {"session_id": session_id, "model_seq_id": number, "base_model": MODEL, "lora_config": {"rank": 4}}
        return {"model_id": self.result(self.post("create_model", body))["model_id"]}


@pytest.mark.parametrize("snapshot_steps", [1, 100])
def test_an_unloaded_model_stays_so(tiny_models: dict[str, Path], tmp_path: Path, snapshot_steps: int) -> None:
    options = {"snapshot_steps": snapshot_steps}
    with Crashing(tiny_models["qwen3"], tmp_path, options).running() as crashing:
        client = Client(crashing.url)
        session_id = client.post("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
        gone, stays = client.create(session_id, 0), client.create(session_id, 1)
        for run in (gone, stays):
            for _ in range(3):
                passed = client.post("forward_backward", run | PASS)
                client.result(client.post("optim_step", run))
        loss = client.result(client.post("forward", stays | PASS))["metrics"]["loss:sum"]
        answer = client.result(passed)
        unloaded = client.post("unload_model", gone)
        result = client.result(unloaded)
        for _ in range(2):
            crashing.restart()
            for verb, body in (("forward", PASS), ("get_info", {}), ("optim_step", {"seq_id": 1})):
                assert "it was unloaded" in client.post(verb, gone | body, status=410)["detail"], verb
            assert client.post("unload_model", gone) == unloaded and client.result(unloaded) == result
            assert client.result(passed) == answer
            again = client.result(client.post("forward", stays | PASS))["metrics"]["loss:sum"]
            assert again == pytest.approx(loss, rel=1e-5)
        assert not (crashing.state_dir / "snapshots" / gone["model_id"].replace(":", "_")).exists()


@pytest.mark.parametrize("point", ["before-end", "end"])
def test_a_model_is_unloaded_whole_when_the_server_dies_meanwhile(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    armed = tmp_path / "armed"
    monkeypatch.setenv(ARMED, str(armed))
    options = {"snapshot_steps": 1}
    with Crashing(tiny_models["qwen3"], tmp_path, options, module=KILLED_IN_HOOKS).running() as crashing:
        client = Client(crashing.url)
        session_id = client.post("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
        gone, stays = client.create(session_id, 0), client.create(session_id, 1)
        for _ in range(2):
            client.post("forward_backward", gone | PASS)
            client.result(client.post("optim_step", gone))
        waiting = client.post("optim_step", gone | {"seq_id": 9})  # behind a gap
        armed.write_text(f"{point} server")
        with pytest.raises(httpx.TransportError):
            client.post("unload_model", gone)
        crashing.restart_dead()
        assert "it was unloaded" in client.post("forward", gone | PASS, status=410)["detail"]
        assert client.result(client.post("unload_model", gone)) == gone | {"type": "unload_model"}
        assert "error" in client.result(waiting)
        assert "metrics" in client.result(client.post("forward", stays | PASS))
        assert not (crashing.state_dir / "snapshots" / gone["model_id"].replace(":", "_")).exists()
