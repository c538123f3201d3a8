"""Critics and references over plain REST, before and after a server is killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ...live import live_server
from ..real import MODEL
from .test_restart import DATA, Client

VALUES = [{"model_input": [5, 6, 7], "loss_fn_inputs": {"returns": [1.0, -1.0, 0.5], "old_values": [0.0, 0.0, 0.0]}}]


APART: dict[str, Any] = {"role_group": ["critic=single", "reference=single"]}
IN_TURN = APART | {"shared_devices": "turns", "idle_device_seconds": 0.5}


@pytest.mark.full
@pytest.mark.parametrize(
    ("options_before", "options_after"),
    [({}, {}), (APART, APART), (APART, {}), ({}, {"role_group": "critic+reference=fsdp=2"}), (IN_TURN, IN_TURN)],
    ids=["in one group", "apart", "apart, then in one group", "in one group, then apart", "in turn"],
)
def test_critics_and_references_are_unchanged_after_kill_9(
    options_before: dict[str, Any], options_after: dict[str, Any], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, **options_before) as server:
        client = Client(server)
        session = {"session_id": client.post("create_session", {"sdk_version": "0"})["session_id"]}

        def create_run(number: int, role: str) -> str:
            body = {"model_seq_id": number, "base_model": MODEL, "lora_config": {"rank": 4}, "model_role": role}
            return client.post("create_model", session | body)["model_id"]

        critic, reference, policy = (
            create_run(number, role) for number, role in enumerate(("critic", "reference", "policy"))
        )
        at_first = outputs(client.post("forward", {"model_id": critic, "data": VALUES, "loss_fn": "value_mse"}))
        for model_id, data, loss_fn in ((critic, VALUES, "value_mse"), (policy, DATA, "cross_entropy")):
            for _ in range(2):
                assert client.post("forward_backward", {"model_id": model_id, "data": data, "loss_fn": loss_fn})[
                    "metrics"
                ]
                assert client.post("optim_step", {"model_id": model_id})["metrics"]
        path = client.post("save_weights", {"model_id": policy, "path": "two-steps"})["path"]
        assert client.post("load_weights", {"model_id": reference, "path": path})["path"] == path
        forwards = [
            {"model_id": critic, "data": VALUES, "loss_fn": "value_mse"},
            *({"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy"} for model_id in (reference, policy)),
        ]
        before = [outputs(client.post("forward", each)) for each in forwards]
        assert before[0].keys() == {"values"} and before[1] == before[2]
        assert before[0]["values"] != pytest.approx(at_first["values"], rel=1e-4), "two steps show"
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, **options_after) as server:
        client = Client(server)
        for each, wanted in zip(forwards, before, strict=True):
            found = outputs(client.post("forward", each))
            assert found.keys() == wanted.keys()
            for name, values in wanted.items():
                assert found[name] == pytest.approx(values, rel=1e-5)
        for model_id, role in ((critic, "critic"), (reference, "reference"), (policy, "policy")):
            assert client.post("get_info", {"model_id": model_id})["model_role"] == role
        refused = client.post("forward_backward", {"model_id": reference, "data": DATA, "loss_fn": "cross_entropy"})
        assert "a reference is not trained" in str(refused)


def outputs(answer: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the outputs of the only datum."""
    (output,) = answer["loss_fn_outputs"]
    return {name: tensor["data"] for name, tensor in output.items()}
