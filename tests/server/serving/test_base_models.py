"""Two names of one source share one worker, and every run and checkpoint keeps the name that was requested."""

import json
from pathlib import Path

import httpx
import pytest

from ...acceptance.crashing import worker_pids
from ...drawn import Drawn, as_drawn
from ...live import LiveServer, live_server
from ..real import ALICE
from ..runs.test_restart import DATA, Client

NAMES = ("first/name", "second/name")


def names_served(server: LiveServer) -> list[str]:
    answer = httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers={"X-API-Key": ALICE}).json()
    return [model["model_name"] for model in answer["supported_models"]]


def create_run(client: Client, name: str) -> str:
    session_id = client.post("create_session", {"sdk_version": "0"})["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": name, "lora_config": {"rank": 4, "seed": 7}}
    return client.post("create_model", create)["model_id"]


def train_step(client: Client, model_id: str) -> float:
    losses = {"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy"}
    loss = client.post("forward_backward", losses)["metrics"]["loss:sum"]
    assert client.post("optim_step", {"model_id": model_id})["metrics"]
    return loss


def sample(client: Client, name: str) -> Drawn:
    session_id = client.post("create_session", {"sdk_version": "0"})["session_id"]
    asked = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": name}
    sampler = client.post("create_sampling_session", asked)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    asked = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 5, "seed": 1}}
    return as_drawn(client.post("sample", asked)["sequences"][0])


@pytest.mark.slow
def test_both_names_share_one_worker_and_survive_a_restart(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny_models["qwen3"])
    models: dict[str, Path | str] = dict(zip(NAMES, (tiny_models["qwen3"], tmp_path / "link"), strict=True))
    with live_server(models, tmp_path / "state") as server:
        client = Client(server)
        assert len(worker_pids(server.process.pid)) == 1 and names_served(server) == list(NAMES)
        runs = {name: create_run(client, name) for name in NAMES}
        losses = {name: train_step(client, runs[name]) for name in NAMES}
        assert losses[NAMES[0]] == losses[NAMES[1]] and sample(client, NAMES[0]) == sample(client, NAMES[1])
        for name in NAMES:
            info = client.post("get_info", {"model_id": runs[name]})
            assert info["model_data"]["model_name"] == name, info
            assert client.post("save_weights", {"model_id": runs[name], "path": "end"})["path"]
        server.process.kill()
        server.process.wait(20)
    with live_server(models, tmp_path / "state") as server:
        client = Client(server)
        assert len(worker_pids(server.process.pid)) == 1 and names_served(server) == list(NAMES)
        again = [train_step(client, runs[name]) for name in NAMES]
        assert again[0] == again[1] < losses[NAMES[0]]
        for name in NAMES:
            assert client.post("get_info", {"model_id": runs[name]})["model_data"]["model_name"] == name
    found = [
        json.loads(path.read_text()) for path in (tmp_path / "state").glob("checkpoints/*/weights/*/trainhouse.json")
    ]
    assert sorted(each["base_model"] for each in found) == sorted(NAMES)
