"""`get_tokenizer()` of the official SDK for models served under various names, without a network."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from trainhouse.server.cli.commands import main

from ..hub_cache import add_to_hub_cache
from ..live import live_server, save_byte_tokenizer

HUB_ID = "acme/tiny-chat"
KEY = "tml-tokenizers"
PROGRAM = """
import sys, tinker
url, key, *models = sys.argv[1:]
with tinker.ServiceClient(base_url=url, api_key=key) as service:
    for model in models:
        training = service.create_lora_training_client(model, rank=1).result()
        for client in (training, service.create_sampling_client(base_model=model).result()):
            try:
                print(client.get_tokenizer().encode("abc", add_special_tokens=False))
            except OSError as error:
                print("none")
"""


@pytest.fixture
def model(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    """A model with a tokenizer, in a path with more than two slashes."""
    directory = shutil.copytree(tiny_models["llama"], tmp_path / "models" / "chat")
    save_byte_tokenizer(directory)
    return directory


def tokens(url: str, key: str, names: Sequence[str], home: Path) -> list[str]:
    """Returns the tokens of a text from both SDK clients of each name; "none" if no tokenizer is found."""
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    command = [sys.executable, "-c", PROGRAM, url, key, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_sdk_clients_resolve_hub_ids_and_directories(model: Path, tmp_path: Path) -> None:
    add_to_hub_cache(tmp_path / "hf", HUB_ID, model)
    with live_server({HUB_ID: model, str(model): model, "chat": model}, tmp_path / "state") as server:
        found = tokens(server.url, KEY, (HUB_ID, str(model), "chat"), tmp_path / "hf")
        log = server.log.read_text()
    assert len(json.loads(found[0])) == 3
    assert found == [found[0]] * 5 + ["none"], "sampling clients have only the name"
    (warning,) = [line for line in log.splitlines() if "is not a hub id" in line]
    assert '"chat is not a hub id' in warning and f"serve {model} under the name ORGANISATION/MODEL" in warning


@pytest.mark.slow
def test_remote_clients_get_the_hub_id_from_the_config(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that listens beyond loopback does not reveal its directories."""
    add_to_hub_cache(tmp_path / "hf", HUB_ID, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"_name_or_path": HUB_ID}))
    state = tmp_path / "state"
    assert main(["keys", "create", "me", f"--state-dir={state}"]) == 0
    key = capsys.readouterr().out.strip()
    with live_server({"chat": model}, state, host="0.0.0.0") as server:
        assert tokens(server.url, key, ["chat"], tmp_path / "hf")[0] != "none"
        assert f"serve {model} under the name {HUB_ID}" in server.log.read_text()
