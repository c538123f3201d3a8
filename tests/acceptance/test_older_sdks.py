"""One program for the official SDK, with releases of last winter to now, as their users have pinned them.

`make setup` installs these releases side by side, each in a folder of its own, without what they need: the environment
has that.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trainhouse
from peft import PeftModel
from safetensors.torch import load_file
from trainhouse.server.http.sdk_version import NEWEST_TESTED, parse_version
from transformers import AutoModelForCausalLM

from ..live import LiveServer, live_server

MODEL, KEY = "tiny/qwen3", "tml-older"
SDKS = Path(os.environ.get("TRAINHOUSE_SDKS", Path(sys.prefix) / "sdks"))
VERSIONS = ("0.7.0", "0.18.2", "0.25.0", "0.30.4", "0.38.0")
PROGRAM = Path(__file__).with_name("sdk_program.py")


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path_factory.mktemp("state")) as running:
        yield running


def post(server: LiveServer, verb: str, **body: object) -> dict[str, Any]:
    headers = {"X-API-Key": KEY, "Prefer": "wait=30"}
    answer = httpx.post(f"{server.url}/api/v1/{verb}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def external(server: LiveServer) -> str:
    """An external checkpoint of the same tenant, which older SDKs do not know."""
    session_id = post(server, "create_session", sdk_version="curl")["session_id"]
    model = post(
        server, "create_model", session_id=session_id, model_seq_id=0, base_model=MODEL, lora_config={"rank": 4}
    )
    return post(server, "save_weights_external", model_id=model["model_id"], path="exported")["path"]


def test_the_newest_of_them_is_the_newest_that_the_server_names() -> None:
    assert max(map(parse_version, VERSIONS), key=lambda version: version or (0, 0)) == NEWEST_TESTED


@pytest.mark.parametrize("version", VERSIONS)
def test_a_program_runs_with_this_sdk(version: str, server: LiveServer, external: str) -> None:
    folder = SDKS / version
    assert folder.is_dir(), f"no SDK in {folder}: make setup installs it"
    environment = {**os.environ, "PYTHONPATH": str(folder), "TINKER_TELEMETRY": "0"}
    command = [sys.executable, "-P", str(PROGRAM), server.url, KEY]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    seen = next((json.loads(line[5:]) for line in ran.stdout.splitlines() if line.startswith("SEEN ")), None)
    assert seen is not None, f"{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}"
    assert seen["version"] == version and seen["file"].startswith(str(folder))
    assert seen["losses"][-1] < seen["losses"][0] and seen["lora_rank"] == 8
    assert seen["live"] == seen["saved"]
    assert seen["resumed_loss"] == pytest.approx(seen["next_loss"], rel=1e-4), "with its optimizer's state"
    model_id = seen["model_id"]
    assert seen["models"] == [MODEL] and model_id in seen["runs"]
    assert {"weights/whole", "sampler_weights/alone"} <= set(seen["own"])
    is_known = parse_version(version) >= (0, 28)  # pyright: ignore[reportOptionalOperand]
    assert seen["of_user"]["external_weights/exported"] == ("external" if is_known else "sampler")
    if parse_version(version) <= (0, 35):  # pyright: ignore[reportOptionalOperand]
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(seen["archive"])
        assert seen["archive"][-1] == "checkpoint_complete"
    session_id = model_id.partition(":")[0]
    assert f"console: {server.url}/console/sessions/{session_id}" in seen["said"]
    if seen["unloaded"] is not None:
        assert seen["unloaded"] == {"model_id": model_id, "type": "unload_model"}
        gone = httpx.post(f"{server.url}/api/v1/get_info", json={"model_id": model_id}, headers={"X-API-Key": KEY})
        assert gone.status_code == 410 and "it was unloaded" in gone.text


# PEFT's warning of adapters on experts, see docs/checkpoints.md, and of what it uses of transformers.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")
def test_an_archive_of_experts_has_the_form_that_peft_loads(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Experts share matrices in our files, and have their own in PEFT's."""
    model = "tiny/experts"
    with live_server({model: tiny_models["qwen3_moe"]}, tmp_path / "state") as server:
        with trainhouse.ServiceClient(server.url, KEY) as service:
            client = service.create_lora_training_client(model, rank=4)
            path = client.save_weights_for_sampler("alone").result().path
            service.create_rest_client().export_checkpoint(path, tmp_path / "exported", "peft").result()
        place = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        answer = httpx.get(
            f"{server.url}/api/v1/training_runs/{place}/archive", headers={"X-API-Key": KEY}, follow_redirects=True
        )
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        archive.extractall(tmp_path / "archive", filter="data")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("archive", "exported"))
    assert ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert any(".experts.3." in name for name in ours), "each expert has its own"
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_models["qwen3_moe"]), tmp_path / "archive")
