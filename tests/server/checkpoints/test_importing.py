"""Imported adapters: listed, trained and sampled like other checkpoints of their tenant, or refused without a trace."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from trainhouse.schemas.adapters.adapter_header import check_header
from trainhouse.schemas.errors import RequestError

from ..real import ALICE, BOB, MODEL, Server, batch, sample, sample_body

pytestmark = pytest.mark.anyio

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}


def weights(width: int = 64) -> bytes:
    generator = torch.Generator().manual_seed(0)
    path = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {
        path.format(layer, side): shape for layer in (0, 1) for side, shape in (("A", (4, width)), ("B", (64, 4)))
    }
    return save({name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()})


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def with_header(entries: Mapping[str, Any]) -> bytes:
    """Returns a safetensors file without numbers."""
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


async def upload(
    server: Server, config: Mapping[str, Any] = CONFIG, content: bytes | None = None, key: str = ALICE, **query: Any
) -> httpx.Response:
    encoded = json.dumps(config).encode()
    headers = {"Content-Type": "application/octet-stream"} | query.pop("headers", {})
    params = {"config_bytes": len(encoded), "base_model": MODEL} | query
    body = encoded + (weights() if content is None else content)
    return await server.clients[key].post("import_weights", content=body, params=params, headers=headers)


async def imported(server: Server) -> str:
    """Imports an adapter; returns its path."""
    return (await upload(server)).json()["tinker_path"]


@pytest.mark.slow
async def test_an_imported_adapter_is_listed_with_its_configuration(server: Server) -> None:
    answer = (await upload(server, name="mine")).json()
    path = answer["tinker_path"]
    assert path.endswith("/weights/mine") and answer["base_model"] == MODEL
    assert (answer["lora"]["rank"], answer["lora"]["alpha"]) == (4, 6.0)
    adapted = {name: answer["lora"][f"train_{name}"] for name in ("attn", "mlp", "unembed")}
    assert adapted == {"attn": True, "mlp": False, "unembed": False}
    assert (await server.post("weights_info", {"tinker_path": path}))["lora_rank"] == 4
    assert path in (await server.clients[ALICE].get("checkpoints")).text


async def test_a_run_of_an_imported_adapter_has_its_alpha_and_learns(server: Server) -> None:
    session_id, path = await server.create_session(), await imported(server)
    new = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": False}
    created = await server.result((await server.post("load_weights", new))["request_id"])
    model = {"model_id": created["model_id"]}
    assert (await server.post("get_info", model))["lora_alpha"] == 6.0
    data = [{"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8]}}]
    losses = []
    for seq_id in (1, 3, 5):
        forward = model | {"seq_id": seq_id, "loss_fn": "cross_entropy", "data": data}
        done = await server.result((await server.post("forward_backward", forward))["request_id"])
        losses.append(done["metrics"]["loss:sum"])
        step = model | {"seq_id": seq_id + 1, "adam_params": {"learning_rate": 1e-2}}
        assert "error" not in await server.result((await server.post("optim_step", step))["request_id"])
    assert losses[2] < losses[1] < losses[0]


async def test_an_imported_adapter_is_not_loaded_into_a_run_that_it_does_not_fit(server: Server) -> None:
    path = await imported(server)
    bare = await server.create_run(train_mlp=False, train_unembed=False)
    assert "alpha" in (await bare.do("load_weights", path=path, optimizer=False))["error"], "its alpha is 32"
    assert "has no optimizer state" in (await bare.do("load_weights", path=path, optimizer=True))["error"]
    assert (await bare.forward_backward(batch(1))).metrics["loss:sum"] > 0, "the run continues"


async def test_an_imported_adapter_can_be_sampled(server: Server) -> None:
    session_id, path = await server.create_session(), await imported(server)
    create = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    sampler_id = (await server.post("create_sampling_session", create))["sampling_session_id"]
    assert len((await sample(server, sample_body(sampler_id))).sequences[0].tokens) == 4


async def test_an_import_is_private_and_idempotent_by_key(server: Server) -> None:
    key = {"X-Idempotency-Key": "once"}
    paths = [(await upload(server, headers=key)).json()["tinker_path"] for _ in range(2)]
    assert paths[0] == paths[1] != (await upload(server)).json()["tinker_path"]
    for other in ({"name": "other"}, {"ttl_seconds": 3600}):
        refused = await upload(server, headers=key, **other)
        assert refused.status_code == 400 and f"was used to make {paths[0]}" in refused.json()["detail"]
    await server.post("weights_info", {"tinker_path": paths[0]}, BOB, status=404)
    assert (await upload(server, key=BOB, headers=key)).json()["tinker_path"] != paths[0]


async def test_the_base_model_defaults_to_that_of_the_adapter(server: Server) -> None:
    named = CONFIG | {"base_model_name_or_path": MODEL}
    assert (await upload(server, named, base_model=MODEL)).json()["base_model"] == MODEL
    encoded = json.dumps(named).encode()
    content = {"content": encoded + weights(), "params": {"config_bytes": len(encoded)}}
    assert (await server.clients[ALICE].post("import_weights", **content)).json()["base_model"] == MODEL
    encoded = json.dumps(CONFIG).encode()
    content = {"content": encoded + weights(), "params": {"config_bytes": len(encoded)}}
    refused = await server.clients[ALICE].post("import_weights", **content)
    assert refused.status_code == 400 and f"set base_model to one of {MODEL}" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"config": CONFIG | {"use_dora": True}}, "adapter_config.json has use_dora True: train without DoRA"),
        ({"config": CONFIG | {"r": 5}}, "has shape [4, 64], and this base model needs [5, 64] at rank 5"),
        ({"config": CONFIG | {"r": 17}}, "rank 17 exceeds max_lora_rank 16"),
        ({"content": weights(65)}, "has shape [4, 65], and this base model needs [4, 64] at rank 4"),
        ({"content": b"\x80\x04pickle"}, "adapter_model.safetensors cannot be read"),
        ({"content": b"\xff" * 64}, "its header has 18446744073709551615 bytes"),
        ({"content": with_header({"a" * 1000: EMPTY})}, "has 1000 characters, and at most 512"),
        ({"content": with_header({"a": EMPTY | {"shape": [1] * 9}})}, "a has no shape of at most 8 dimensions"),
        ({"content": (1 << 16).to_bytes(8, "little") + b"[" * (1 << 16)}, "its header is not JSON: recursion limit"),
        ({"content": with_header({"\ud800": 1})}, "its header is not JSON: unexpected end of hex escape"),
        ({"content": b""}, "the body ends with adapter_config.json"),
        ({"config_bytes": 9}, "the first 9 bytes of the body (config_bytes) are not valid JSON"),
        ({"base_model": "other"}, "base model other is not served here"),
        ({"name": "../up"}, "checkpoint name '../up' is not allowed"),
    ],
)
async def test_invalid_adapters_are_refused_and_leave_nothing(
    server: Server, given: dict[str, Any], reason: str
) -> None:
    before = checkpoint_files(server)
    refused = await upload(server, **given)
    assert refused.status_code == 400 and reason in refused.json()["detail"], refused.text
    assert checkpoint_files(server) == before


def test_a_million_tensors_are_refused() -> None:
    """Larger than the bodies that the server of these tests takes."""
    with pytest.raises(RequestError, match="it has 131073 tensors, and at most 131072 are read"):
        check_header(json.dumps({f"t{i}": EMPTY for i in range((1 << 17) + 1)}).encode())
    check_header(json.dumps({f"t{i}": EMPTY for i in range(1 << 17)}).encode())


def test_the_process_that_reads_a_header_imports_no_server() -> None:
    """The imports of a web server would take it a second of CPU."""
    code = f"import sys; from {check_header.__module__} import check_header; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"fastapi", "sqlalchemy", "httpx"}.intersection(loaded.split())


def checkpoint_files(server: Server) -> set[Path]:
    return set(Path(server.services.config.store.state_dir, "checkpoints").rglob("*"))


async def test_a_body_beyond_the_limit_is_refused(server: Server) -> None:
    assert (await upload(server, content=bytes(300_000))).status_code == 413
