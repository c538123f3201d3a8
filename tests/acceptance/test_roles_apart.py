"""Critics and references in separate rank groups: kill -9 of one group's worker does not affect the others' runs."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ..live import LiveServer, live_server
from ..server.runs.test_restart import DATA, Client
from ..server.runs.test_roles import VALUES
from ..workers.ray_nodes import ray_head
from .crashing import until, worker_pids
from .training_script import MODEL

APART: dict[str, Any] = {"role_group": ["critic=single", "reference=single"]}
ROLES = ("policy", "critic", "reference")


class Runs:
    """Holds one run of each role, by plain REST."""

    def __init__(self, server: LiveServer) -> None:
        self._client = Client(server)
        self._session = {"session_id": self._client.post("create_session", {"sdk_version": "0"})["session_id"]}
        self._num_created = 0
        self.ids = {role: self.create(role) for role in ROLES}

    def create(self, role: str) -> str:
        lora = {"rank": 4, "seed": 7}
        body = {"model_seq_id": self._num_created, "base_model": MODEL, "lora_config": lora, "model_role": role}
        self._num_created += 1
        return self._client.post("create_model", self._session | body)["model_id"]

    def move(self, server: LiveServer) -> None:
        """Uses another server that has the same runs."""
        self._client = Client(server)

    def scored(self, role: str) -> np.ndarray:
        answer = self._client.post("forward", self._batch(role, self.ids[role]))
        (output,) = answer["loss_fn_outputs"]
        return np.array(output["values" if role == "critic" else "logprobs"]["data"])

    def train(self, role: str, num_steps: int, model_id: str | None = None) -> list[float]:
        losses = []
        for _ in range(num_steps):
            passed = self._client.post("forward_backward", self._batch(role, model_id or self.ids[role]))
            losses.append(passed["metrics"]["loss:sum"])
            params = {"adam_params": {"learning_rate": 1e-3}}
            assert self._client.post("optim_step", {"model_id": model_id or self.ids[role]} | params)["metrics"]
        return losses

    def move_reference(self) -> None:
        """Loads the policy's current weights into the reference."""
        path = self._client.post("save_weights", {"model_id": self.ids["policy"], "path": "now"})["path"]
        assert self._client.post("load_weights", {"model_id": self.ids["reference"], "path": path})["path"] == path

    def _batch(self, role: str, model_id: str) -> dict[str, Any]:
        if role == "critic":
            return {"model_id": model_id, "data": VALUES, "loss_fn": "value_mse"}
        return {"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy"}


def states(server: LiveServer) -> str:
    """Returns the state of the base model."""
    return httpx.get(f"{server.url}/api/v1/readyz").json()["base_models"][MODEL]


def pid_of(server: LiveServer, role: str) -> int:
    """Returns the process id from the role's last "ready" line in the log."""
    return int(re.findall(rf"{MODEL} \({role}\) ready in .*process (\d+)", server.log.read_text())[-1])


@pytest.mark.full
def test_crash_of_the_reference_worker_does_not_affect_other_roles(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, **APART) as server, ThreadPoolExecutor(2) as threads:
        runs = Runs(server)
        runs.train("policy", 2)
        runs.move_reference()
        before, others = runs.scored("reference"), set(worker_pids(server.process.pid)) - {pid_of(server, "reference")}
        assert states(server) == "up" and len(others) == 2
        training = {role: threads.submit(runs.train, role, 40) for role in ("policy", "critic")}
        os.kill(pid_of(server, "reference"), signal.SIGKILL)
        until(lambda: states(server) == "restarting")
        assert not any(each.done() for each in training.values()), "the training ended too early"
        np.testing.assert_allclose(runs.scored("reference"), before, rtol=1e-5)
        assert states(server) == "up"
        found = {role: each.result() for role, each in training.items()}
        assert others < set(worker_pids(server.process.pid))
        again = re.findall(r"([\w:]+) is rebuilt", server.log.read_text())
        assert again == [runs.ids["reference"]]
        # Undisturbed; an offset of two steps would show.
        undisturbed = runs.train("policy", 42, runs.create("policy"))
        assert found["policy"] == pytest.approx(undisturbed[2:], rel=1e-5)
        assert found["policy"] != pytest.approx(undisturbed[:40], rel=1e-3)
        assert found["critic"] == pytest.approx(runs.train("critic", 40, runs.create("critic")), rel=1e-5)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_kept_workers_support_role_groups(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    models, state_dir = {MODEL: tiny_models["qwen3"]}, tmp_path / "state"
    with ray_head(num_cpus=3) as nodes:
        options = {"pool": "ray", "ray_address": nodes.address, "keep_workers_seconds": 600, **APART}
        with live_server(models, state_dir, **options) as server:
            ranks = nodes.ranks()
            assert len(ranks) == 3
            runs = Runs(server)
            for role in ("policy", "critic"):
                runs.train(role, 2)
            runs.move_reference()
            before = {role: runs.scored(role) for role in ROLES}
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(20)
        with live_server(models, state_dir, **options) as server:
            assert nodes.ranks() == ranks
            runs.move(server)
            for role in ROLES:
                np.testing.assert_allclose(runs.scored(role), before[role], rtol=1e-5)
            os.kill(pid_of(server, "reference"), signal.SIGKILL)
            np.testing.assert_allclose(runs.scored("reference"), before["reference"], rtol=1e-5)
            assert len(set(ranks) & set(nodes.ranks())) == 2
