"""Numbers of operations and samples belong to the requests that used them, after kill -9 and in a backup."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from trainhouse.server.cli.commands import main

from .crashing import Crashing
from .training_script import MODEL

pytestmark = pytest.mark.slow

DATA = [{"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]}}]
PASS: dict[str, Any] = {"data": DATA, "loss_fn": "cross_entropy"}
SAMPLE: dict[str, Any] = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}, "num_samples": 2}
STEP: dict[str, Any] = {"adam_params": {"learning_rate": 0.01}}


class Client:
    """Sends requests by their numbers, and keeps the first answer of each number."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-alice"}, timeout=60)
        self._sent: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def close(self) -> None:
        self._http.close()

    def post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(verb, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.post(verb, body)
        self._sent.append((verb, body, answer))
        return answer

    def result(self, submitted: dict[str, Any]) -> dict[str, Any]:
        while (
            answer := self._http.post("retrieve_future", json={"request_id": submitted["request_id"]})
        ).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        return answer.json()

    def check_numbers(self, num_known: int | None = None) -> None:
        """Checks that each used number returns its first answer to its first request, and refuses another one."""
        for verb, body, answer in self._sent[:num_known]:
            assert self.post(verb, dict(reversed(body.items()))) == answer
            others: list[tuple[str, dict[str, Any]]] = [(verb, body | {"num_samples": 1})]
            if verb != "asample":
                numbers = {name: body[name] for name in ("model_id", "seq_id")}
                others = [("save_weights", numbers | {"path": "a"}), ("optim_step", numbers | {"adam_params": {}})]
                others += [(other, numbers | PASS | {"loss_weight": 3.0}) for other in ("forward", "forward_backward")]
            for other, content in others:
                refused = self._http.post(other, json=content)
                was = verb.removeprefix("a")
                assert refused.status_code == 400 and f"seq_id {body['seq_id']} of" in refused.text, refused.text
                assert f" {was}, this is a" in refused.text and "is another process" in refused.text


def test_used_numbers_survive_kills_and_backups(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    copy, options = tmp_path / "copy", {"snapshot_steps": 1, "result_memory_bytes": 1, "slice_milliseconds": 1}
    with Crashing(tiny_models["qwen3"], tmp_path, options, state_dir=Path("state")).running() as crashing:
        client = Client(crashing.url)
        session_id = client.post("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
        model = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        run = {"model_id": client.result(client.post("create_model", model))["model_id"]}
        session = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = {"sampling_session_id": client.post("create_sampling_session", session)["sampling_session_id"]}
        short, long = {"sampling_params": {"max_tokens": 2}}, {"sampling_params": {"max_tokens": 200, "stop": []}}
        for seq_id in range(1, 9, 2):
            client.submit("forward_backward", run | {"seq_id": seq_id} | PASS)
            client.result(client.submit("optim_step", run | {"seq_id": seq_id + 1} | STEP))
        client.result(client.submit("forward", run | {"seq_id": 9} | PASS))
        client.result(client.submit("asample", sampler | {"seq_id": 0} | SAMPLE | short))
        num_known = len(client._sent)
        assert main(["backup", str(copy), f"--state-dir={crashing.state_dir}"]) == 0
        client.submit("asample", sampler | {"seq_id": 1} | SAMPLE | long)
        client.submit("forward_backward", run | {"seq_id": 10} | PASS)
        step = client.submit("optim_step", run | {"seq_id": 12} | STEP)  # behind a gap
        for _ in range(2):
            client.check_numbers()
            crashing.restart()
        client.check_numbers()
        assert "metrics" in client.result(client.submit("forward_backward", run | {"seq_id": 11} | PASS))
        assert "metrics" in client.result(step)
        client.check_numbers()
    with Crashing(tiny_models["qwen3"], tmp_path, options, state_dir=copy, port=crashing.port).running():
        client.check_numbers(num_known)
        client.close()
