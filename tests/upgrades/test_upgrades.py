"""Today's server starts on the state directories of older versions, killed in the middle of training.

tests/upgrades/states has one for each format of the tables, and for the first commit that could serve: record.py.
"""

import json
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from trainhouse.server.store.migrations import FORMAT_VERSION

from ..live import LiveServer, live_server
from .scenario import MODEL, Client, Run, fixed_model

pytestmark = pytest.mark.slow

STATES = sorted(Path(__file__).with_name("states").glob("*.tar.xz"))
RELATIVE = 1e-4
"""The bound of docs/durability.md for losses after a recovery in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixed_model(tmp_path_factory.mktemp("fixed"))


def unpacked(archive: Path, directory: Path) -> tuple[Path, Mapping[str, Any]]:
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory / "state", json.loads((directory / "expected.json").read_text())


def format_of(state: Path) -> int:
    with sqlite3.connect(state / "trainhouse.db") as database:
        return database.execute("SELECT version FROM format").fetchone()[0]


def test_states_of_all_formats_are_here(tmp_path: Path) -> None:
    formats = set()
    for number, archive in enumerate(STATES):
        state, _ = unpacked(archive, tmp_path / str(number))
        formats.add(format_of(state))
    assert formats == set(range(1, FORMAT_VERSION + 1)), "record the state of the commit before a new format"


@pytest.mark.parametrize("archive", STATES, ids=lambda path: path.name.partition(".")[0])
def test_an_older_state_continues_where_it_was_killed(archive: Path, model: Path, tmp_path: Path) -> None:
    state, expected = unpacked(archive, tmp_path)
    with live_server({MODEL: model}, state) as server:
        client = Client(server.url)
        run = Run(client, expected["model_id"], expected["seq_id"])
        run.step()  # over gradients that only the journal had
        loss = run.loss("forward")
        assert loss == pytest.approx(expected["next_loss"], rel=RELATIVE)
        assert loss != pytest.approx(expected["last_loss"], rel=RELATIVE), "a step lost, or taken twice, is seen"
        from_saved = Run(client, loaded(client, expected["saved"]), 0)
        assert from_saved.loss("forward") == pytest.approx(expected["saved_loss"], rel=RELATIVE)
        assert listed(client) == {expected["saved"], expected["sampler"]}
        assert sampled(client, expected["sampler"])
        client.get(f"training_runs/{expected['model_id']}")
    assert format_of(state) == FORMAT_VERSION
    verify(server)


def loaded(client: Client, path: str) -> str:
    """Returns the id of a new run on a checkpoint with its optimizer's state."""
    session_id = client.post("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    return client.do("load_weights", body)["model_id"]


def listed(client: Client) -> set[str]:
    return {each["tinker_path"] for each in client.get("checkpoints")["checkpoints"]}


def sampled(client: Client, path: str) -> bool:
    """True if the sampler's checkpoint is sampled, to the last token."""
    body = {
        "model_path": path,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "num_samples": 1,
        "sampling_params": {"max_tokens": 8, "temperature": 0.0, "stop": []},
    }
    return len(client.do("asample", body)["sequences"][0]["tokens"]) == 8


def verify(server: LiveServer) -> None:
    command = [sys.executable, "-m", "trainhouse.server", "verify", "--state-dir", str(server.state_dir)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_state_of_a_newer_version_is_refused_with_the_remedy(model: Path, tmp_path: Path) -> None:
    state, _ = unpacked(STATES[0], tmp_path)
    with sqlite3.connect(state / "trainhouse.db") as database:
        database.execute("UPDATE format SET version = ?", [FORMAT_VERSION + 1])
    database.close()
    command = [sys.executable, "-m", "trainhouse.server", "serve", f"--base-model={MODEL}={model}", "--port=0"]
    refused = subprocess.run([*command, f"--state-dir={state}"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert f"has format {FORMAT_VERSION + 1}, but this trainhouse supports formats up to" in refused.stderr
    assert "upgrade trainhouse or choose another --state-dir" in refused.stderr
