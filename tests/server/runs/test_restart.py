"""A server that is killed and restarted on the same state directory."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ...live import LiveServer, live_server
from ..api import needs_drafts
from ..gated import GATED
from ..real import ALICE, MODEL, sample_body

DATA = [{"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}}]


@dataclass(frozen=True)
class Client:
    """A plain REST client that waits for each result."""

    server: LiveServer

    def post(self, path: str, body: dict, **headers: str) -> dict:
        headers = {"X-API-Key": ALICE, "Prefer": "wait=30"} | headers
        response = httpx.post(f"{self.server.url}/api/v1/{path}", json=body, headers=headers, timeout=60)
        return response.json() | {"status": response.status_code}

    def wait(self, request_id: str) -> dict:
        """Polls a future until it answers."""
        while (answer := self.post("retrieve_future", {"request_id": request_id}))["status"] == 408:
            pass
        return answer


@pytest.mark.full
def test_after_kill_9_everything_continues(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path) as server:
        client = Client(server)
        session_id = client.post("create_session", {"sdk_version": "0"})["session_id"]
        create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        model_id = client.post("create_model", create)["model_id"]
        losses = {"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy"}
        before = client.post("forward_backward", losses)
        assert client.post("optim_step", {"model_id": model_id})["metrics"]
        trained = client.post("forward", losses)
        sampler = client.post("save_weights_for_sampler", {"model_id": model_id, "sampling_session_seq_id": 3})
        sampled = client.post("sample", sample_body(sampler["sampling_session_id"]))
        waiting = client.post("optim_step", {"model_id": model_id, "seq_id": 9}, Prefer="respond-async")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, long_poll_seconds=1) as server:
        client = Client(server)
        assert client.post("retrieve_future", {"request_id": f"{model_id}:1"}) == before
        still = client.post("retrieve_future", {"request_id": waiting["request_id"]})
        assert still["status"] == 408 and "seq_id 5" in still["queue_state_reason"]
        again = client.post("forward", losses | {"seq_id": 5})
        assert again["metrics"]["loss:sum"] == pytest.approx(trained["metrics"]["loss:sum"], rel=1e-6)
        assert again["metrics"]["loss:sum"] < before["metrics"]["loss:sum"]
        resampled = client.post("sample", sample_body(sampler["sampling_session_id"]))
        assert resampled["sequences"] == sampled["sequences"]
        assert client.post("create_model", create)["model_id"] == model_id


@pytest.mark.slow
@needs_drafts
def test_after_kill_9_a_draft_has_its_full_target_though_no_snapshot_contains_it(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    models = {MODEL: tiny_models["qwen3"]}
    with live_server(models, tmp_path, snapshot_steps=1) as server:
        client = Client(server)
        session_id = client.post("create_session", {"sdk_version": "0"})["session_id"]
        create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
        policy_id = client.post("create_model", create | {"training": "full"})["model_id"]
        client.post("forward_backward", {"model_id": policy_id, "data": DATA, "loss_fn": "cross_entropy"})
        client.post("optim_step", {"model_id": policy_id, "adam_params": {"learning_rate": 0.1}})
        path = client.post("save_weights_for_sampler", {"model_id": policy_id, "path": "a"})["path"]
        draft = {"model_seq_id": 1, "model_role": "draft", "draft": {"algorithm": "eagle3"}, "target_path": path}
        model_id = client.post("create_model", create | draft)["model_id"]
        losses = {"model_id": model_id, "data": [{"model_input": [5, 6, 7], "loss_fn_inputs": {}}], "loss_fn": "eagle3"}
        for _ in range(3):
            client.post("forward_backward", losses)
            assert client.post("optim_step", {"model_id": model_id})["metrics"]
        loss = client.post("forward", losses)["metrics"]["loss:sum"]
        snapshots = tmp_path / "snapshots" / model_id.replace(":", "_")
        deadline = time.monotonic() + 60
        while not list(snapshots.glob("[1-9]*/manifest.json")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
    assert not list(snapshots.glob("*/target*"))
    with live_server(models, tmp_path) as server:
        client = Client(server)
        again = client.post("forward", losses)["metrics"]["loss:sum"]
        assert again == pytest.approx(loss, rel=1e-4)
        assert "from the snapshot behind seq_id" in server.log.read_text()
        client.post("set_target", {"model_id": model_id, "path": None})
        assert client.post("forward", losses)["metrics"]["loss:sum"] != pytest.approx(loss, rel=1e-3)


@pytest.mark.full
def test_operations_of_a_model_no_longer_served_are_reported_as_lost(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path) as server:
        client = Client(server)
        session_id = client.post("create_session", {"sdk_version": "0"})["session_id"]
        create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        model_id = client.post("create_model", create)["model_id"]
        waiting = client.post("optim_step", {"model_id": model_id, "seq_id": 9}, Prefer="respond-async")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
    with live_server({"tiny/other": tiny_models["llama"]}, tmp_path) as server:
        client = Client(server)
        lost = client.post("retrieve_future", {"request_id": waiting["request_id"]})
        assert lost["category"] == "server" and "server restarted" in lost["error"]
        assert client.post("optim_step", {"model_id": model_id})["status"] == 410


@pytest.mark.slow
def test_sigterm_finishes_accepted_operations_and_leaves_nothing_to_repeat(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    models, options = {MODEL: tiny_models["qwen3"]}, {"module": GATED, "drain_seconds": 250}
    with live_server(models, tmp_path / "state", **options) as server, ThreadPoolExecutor(1) as threads:
        client = Client(server)
        session_id = client.post("create_session", {"sdk_version": "0"})["session_id"]
        create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        model_id = client.post("create_model", create)["model_id"]
        losses = {"model_id": model_id, "data": 12 * DATA, "loss_fn": "cross_entropy"}
        accepted = []
        gate.touch()
        for seq_id in range(1, 13, 2):
            for path, body in (("forward_backward", losses), ("optim_step", {"model_id": model_id})):
                number = seq_id + (path == "optim_step")
                accepted.append(client.post(path, body | {"seq_id": number}, Prefer="respond-async")["request_id"])
        poll = threads.submit(client.wait, accepted[8])
        server.process.terminate()
        while httpx.get(f"{server.url}/api/v1/readyz", timeout=60).json()["status"] != "stopping":
            time.sleep(0.1)
        refused = client.post("optim_step", {"model_id": model_id, "seq_id": 99})
        assert refused["status"] == 503 and "stopping" in refused["detail"]
        gate.unlink()
        assert server.process.wait(250) == 0
        assert poll.result()["status"] == 200 and poll.result()["metrics"]
        assert "WARNING" not in server.log.read_text()
    with live_server(models, tmp_path / "state") as server:
        client = Client(server)
        assert httpx.get(f"{server.url}/api/v1/readyz").json() == {
            "status": "ready",
            "base_models": {MODEL: "up"},
            "runs": 1,
            "runs_to_make_again": 1,
            "holder": None,
            "reason": None,
        }
        assert all(client.wait(one)["metrics"] for one in accepted)
        assert client.post("forward", losses)["metrics"]["loss:sum"] > 0
        assert "from the snapshot behind seq_id 12 and 0 operations" in server.log.read_text()
        assert httpx.get(f"{server.url}/api/v1/readyz").json()["runs_to_make_again"] == 0
