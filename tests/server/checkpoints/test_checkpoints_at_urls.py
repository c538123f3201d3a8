"""A whole server whose checkpoints are stored at a URL: saving, loading, sampling, and uploads that fail or hang."""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import httpx
import numpy as np
import pytest
import trainhouse
from trainhouse import Datum, SamplingParams
from trainhouse.workers.dispatch import WorkerDispatch

from ...live import live_server, save_byte_tokenizer
from ...tiny import tiny_model
from ..hub import TOKEN, hub_server
from ..real import ALICE, MODEL, batch, running_server, sample, sample_body, server_config
from ..s3 import BUCKET, S3, names_at

pytestmark = pytest.mark.anyio

SOON_SECONDS = 30


@pytest.mark.slow
async def test_runs_and_samplers_load_a_checkpoint_from_a_url(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, s3: S3
) -> None:
    place = f"s3://{BUCKET}/served"
    config = server_config(tiny_models["qwen3"], tmp_path, checkpoints=place)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        await run.train(batch(), 3)
        path = (await run.do("save_weights", path="a"))["path"]
        assert (await run.do("save_weights_for_sampler", path="s"))["path"].endswith("sampler_weights/s")
        assert [name.rpartition("/")[2] for name in names_at(place)].count("manifest.json") == 2
        losses = await run.train(batch(), 2)
        assert (await run.do("load_weights", path=path, optimizer=True))["type"] == "load_weights"
        np.testing.assert_allclose(await run.train(batch(), 2), losses, rtol=1e-4)

        create = {"session_id": run.session_id, "sampling_session_seq_id": 0, "model_path": path, "base_model": MODEL}
        sampler_id = (await server.post("create_sampling_session", create))["sampling_session_id"]
        assert len((await sample(server, sample_body(sampler_id))).sequences[0].tokens) == 4


@pytest.mark.full
async def test_a_failed_save_is_reported_in_its_future_and_can_be_retried(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, s3: S3
) -> None:
    place = f"s3://{BUCKET}/failing"
    async with running_server(server_config(tiny_models["qwen3"], tmp_path, checkpoints=place), dispatch) as server:
        run = await server.create_run()
        s3.fails = lambda request: request.startswith("PUT")
        failed = await run.do("save_weights", path="b")
        assert place in failed["error"] and failed["category"] == "server"
        s3.fails = lambda request: False
        assert "error" not in await run.do("save_weights", path="b")


@pytest.mark.full
def test_a_stopping_server_leaves_hanging_uploads_to_the_next_one(
    tiny_models: dict[str, Path], tmp_path: Path, s3: S3
) -> None:
    flags = {"checkpoints": f"s3://{BUCKET}/stopped", "mirror": f"s3://{BUCKET}/stopped-mirror", "drain_seconds": 1}
    hanging, held, may_continue = ["/stopped-mirror/"], list[str](), threading.Event()

    def hangs(request: str) -> bool:
        if request.startswith("PUT") and any(place in request for place in hanging):
            held.append(request)
            may_continue.wait(10 * SOON_SECONDS)
        return False

    s3.fails = hangs
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, **flags) as server:
        headers = {"X-API-Key": ALICE}
        with httpx.Client(base_url=f"{server.url}/api/v1/", headers=headers | {"Prefer": "wait=30"}) as client:
            session_id = client.post("create_session", json={"sdk_version": "0"}).json()["session_id"]
            create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
            run = {"model_id": client.post("create_model", json=create).json()["model_id"]}
            assert "path" in client.post("save_weights", json={**run, "seq_id": 1, "path": "a"}).json()
            hanging.append("/stopped/")
            body = {**run, "seq_id": 2, "path": "b"}
            client.post("save_weights", json=body, headers={"Prefer": "wait=0"}).raise_for_status()
            wait_until(lambda: len(held) == 2)
        server.process.terminate()
        assert server.process.wait(SOON_SECONDS) == 0
    may_continue.set()
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, **flags) as server:
        url = f"{server.url}/api/v1/training_runs/{run['model_id']}/checkpoints"

        def states() -> dict[str, list[str]]:
            listed = httpx.get(url, headers=headers).json()["checkpoints"]
            return {one["checkpoint_id"]: [copy["state"] for copy in one["copies"] or ()] for one in listed}

        wait_until(lambda: states() == {"weights/a": ["copied"], "weights/b": ["copied"]})


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.full
def test_a_base_model_at_a_url_is_downloaded_only_once(tmp_path: Path, s3: S3) -> None:
    model = tiny_model("llama", tmp_path / "model")
    save_byte_tokenizer(model)
    url = f"s3://{BUCKET}/base-models/tiny"
    fsspec.filesystem("s3").put(str(model), url, recursive=True)
    s3.requests.clear()
    for _ in range(2):
        flags = {"model_cache": tmp_path / "models", "sampler_workers": 1}
        with live_server({MODEL: url}, tmp_path / "state", **flags) as server:
            with trainhouse.ServiceClient(server.url, ALICE) as service:
                client = service.create_lora_training_client(MODEL, rank=4)
                tokens = client.get_tokenizer().encode("url")
                data = [Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})]
                assert client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"] > 0
                sampler = service.create_sampling_client(base_model=MODEL)
                assert len(sampler.sample(tokens, 1, SamplingParams(max_tokens=2)).result().sequences[0].tokens)
            assert server.log.read_text().count(f"downloading {url}") == 1
        weights = [request for request in s3.requests if request.startswith("GET") and "safetensors" in request]
        assert len(weights) == 1


@pytest.mark.full
def test_base_model_and_mirror_can_both_be_at_the_hub(tmp_path: Path) -> None:
    model, state = tiny_model("llama", tmp_path / "model"), tmp_path / "state"
    save_byte_tokenizer(model)
    flags = {"model_cache": tmp_path / "models", "mirror": "hf://alice/checkpoints"}
    data = [Datum([5, 6, 7], {"target_tokens": [6, 7, 8], "weights": [1.0] * 3})]
    (tmp_path / "hub").mkdir()
    with hub_server(tmp_path / "hub") as hub:
        hub.create("alice/tiny", is_private=True)
        for path in model.iterdir():
            hub.add("alice/tiny", path.name, path.read_bytes())

        def loss(client: trainhouse.TrainingClient) -> float:
            return client.forward(data, "cross_entropy").result().metrics["loss:sum"]

        with live_server({MODEL: "hf://alice/tiny@main"}, state, **flags) as server:
            with trainhouse.ServiceClient(server.url, ALICE) as service:
                client = service.create_lora_training_client(MODEL, rank=4, seed=1)
                untrained = loss(client)
                client.forward_backward(data, "cross_entropy").result()
                client.optim_step(trainhouse.AdamParams(learning_rate=0.1)).result()
                saved, trained = client.save_state("a").result().path, loss(client)
            run_id = saved.removeprefix("tinker://").partition("/")[0]
            url = f"{server.url}/api/v1/training_runs/{run_id}/checkpoints"

            def states() -> list[str]:
                listed = httpx.get(url, headers={"X-API-Key": ALICE}).json()["checkpoints"]
                return [copy["state"] for copy in listed[0]["copies"]]

            wait_until(lambda: states() == ["copied"])
        assert hub.repositories["alice/checkpoints"].is_private and trained < untrained - 0.1
        shutil.rmtree(state / "checkpoints")
        with live_server({MODEL: "hf://alice/tiny@main"}, state, **flags) as server:
            with trainhouse.ServiceClient(server.url, ALICE) as service:
                assert loss(service.create_training_client_from_state(saved)) == pytest.approx(trained, rel=1e-5)
            assert "was restored from hf://alice/checkpoints/" in server.log.read_text()
        verify = [sys.executable, "-m", "trainhouse.server", "verify", f"--state-dir={state}"]
        assert "all is whole" in subprocess.run(verify, capture_output=True, text=True, check=True).stdout
    assert not any(TOKEN.encode() in path.read_bytes() for path in state.rglob("*") if path.is_file())
