"""A client trains before an upgrade, with plain requests that every version answers, on a model of fixed weights."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from ..tiny import tiny_model

MODEL = "tiny/fixed"
KEY = "tml-upgrade"
NUM_STEPS = 3
STEPS_SINCE = 2
_SECONDS = 120.0
_TOKENS = [[5, 9, 13, 2, 30, 7], [8, 8, 21, 3]]
_DATA = [
    {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [len(tokens) - 1]},
            "weights": {"data": [1.0] * (len(tokens) - 1), "dtype": "float32", "shape": [len(tokens) - 1]},
        },
    }
    for tokens in _TOKENS
]
_ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


def fixed_model(directory: Path) -> Path:
    """Saves a small Llama whose weights are sines, so that no release of torch or transformers changes them."""
    from safetensors.torch import load_file, save_file

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    tiny_model("llama", directory, **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    path = directory / "model.safetensors"
    weights = {}
    for number, (name, each) in enumerate(sorted(load_file(path).items())):
        values = [0.2 * math.sin(0.7 * index + number) for index in range(each.numel())]
        weights[name] = torch.tensor(values).reshape(each.shape) + (1.0 if each.ndim == 1 else 0.0)
    save_file(weights, path, metadata={"format": "pt"})
    return directory


@dataclass
class Client:
    """A client's requests to a server, as plain JSON."""

    url: str

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = httpx.post(f"{self.url}/api/v1/{path}", json=body, headers={"X-API-Key": KEY}, timeout=60)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", headers={"X-API-Key": KEY}, timeout=60)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def result(self, request_id: str) -> Any:
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            answer = httpx.post(
                f"{self.url}/api/v1/retrieve_future",
                json={"request_id": request_id},
                headers={"X-API-Key": KEY},
                timeout=60,
            )
            if answer.status_code != 408 and answer.json().get("type") != "try_again":
                return answer.json()
        raise TimeoutError(request_id)

    def do(self, path: str, body: Mapping[str, Any]) -> Any:
        """Submits an operation and returns its result."""
        return self.result(self.post(path, body)["request_id"])

    def create_run(self, session_id: str, number: int) -> "Run":
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": MODEL,
            "lora_config": {"rank": 2, "seed": 7},
        }
        return Run(self, self.do("create_model", body)["model_id"], 0)


@dataclass
class Run:
    """seq_id: number of its latest operation."""

    client: Client
    model_id: str
    seq_id: int

    def do(self, verb: str, **fields: Any) -> Any:
        self.seq_id += 1
        result = self.client.do(verb, {"model_id": self.model_id, "seq_id": self.seq_id} | fields)
        assert "error" not in result, result
        return result

    def loss(self, verb: str) -> float:
        return self.do(verb, data=_DATA, loss_fn="cross_entropy")["metrics"]["loss:sum"]

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.loss("forward_backward")
            self.step()

    def step(self) -> None:
        self.do("optim_step", adam_params=_ADAM)


def before_upgrade(url: str) -> dict[str, Any]:
    """Trains a run, saves it, and leaves it with steps since then and with gradients that no step has taken yet.

    Returns what a server must still know of it: its ids, its checkpoints, the losses that it had, and the one that it
    has after its next step, from a second run that does the same and more.
    """
    client = Client(url)
    session_id = client.post("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"]
    run, twin = (client.create_run(session_id, number) for number in (0, 1))
    run.train(NUM_STEPS)
    saved = run.do("save_weights", path="three")["path"]
    sampler = run.do("save_weights_for_sampler", path="three")["path"]
    saved_loss = run.loss("forward")
    run.train(STEPS_SINCE)
    last_loss = run.loss("forward_backward")
    twin.train(NUM_STEPS + STEPS_SINCE)
    assert math.isclose(twin.loss("forward_backward"), last_loss, rel_tol=1e-5)
    twin.step()
    return {
        "session_id": session_id,
        "model_id": run.model_id,
        "seq_id": run.seq_id,
        "saved": saved,
        "sampler": sampler,
        "saved_loss": saved_loss,
        "last_loss": last_loss,
        "next_loss": twin.loss("forward"),
    }
