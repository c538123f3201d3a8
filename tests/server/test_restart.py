"""A server that is killed and started again on the same state directory."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from ..live import LiveServer, live_server
from .real import ALICE, MODEL, sample_body

DATA = [{"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}}]


@dataclass(frozen=True)
class Client:
    """Plain REST, waiting for each result."""

    server: LiveServer

    def post(self, path: str, body: dict, **headers: str) -> dict:
        headers = {"X-API-Key": ALICE, "Prefer": "wait=30"} | headers
        response = httpx.post(f"{self.server.url}/api/v1/{path}", json=body, headers=headers, timeout=60)
        return response.json() | {"status": response.status_code}


def test_after_kill_9_results_and_checkpoints_are_there_and_what_was_lost_is_said(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path) as server:
        client = Client(server)
        session_id = client.post("create_session", {"sdk_version": "0"})["session_id"]
        create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        model_id = client.post("create_model", create)["model_id"]
        before = client.post("forward_backward", {"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy"})
        assert client.post("optim_step", {"model_id": model_id})["metrics"]
        path = client.post("save_checkpoint", {"model_id": model_id, "path": "kept"})["path"]
        waiting = client.post("optim_step", {"model_id": model_id, "seq_id": 9}, Prefer="respond-async")
        time.sleep(0.5)  # results are written behind
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path) as server:
        client = Client(server)
        assert client.post("retrieve_future", {"request_id": f"{model_id}:1"}) == before
        lost = client.post("retrieve_future", {"request_id": waiting["request_id"]})
        assert lost["category"] == "server" and "server restarted" in lost["error"]
        assert client.post("optim_step", {"model_id": model_id})["status"] == 410
        resumed = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": True}
        model_id = client.post("load_checkpoint", resumed)["model_id"]
        after = client.post("forward_backward", {"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy"})
        assert after["metrics"]["loss:sum"] < before["metrics"]["loss:sum"]
        sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
        sampler_id = client.post("create_sampling_session", sampler)["sampling_session_id"]
        assert len(client.post("sample", sample_body(sampler_id))["sequences"]) == 1
