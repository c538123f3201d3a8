"""`get_info` counts the weights that a model trains: as many as its checkpoint holds, and as planned.

tests/workers/planner/test_estimate.py compares the same plan with the counts that tinker-cookbook publishes.
"""

from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tinker import types
from trainhouse.schemas.models import Role
from trainhouse.workers.planner.trainable_memory import adapter_size
from trainhouse.workers.protocol.parallel_spec import SINGLE
from trainhouse.workers.protocol.worker_config import ServedModel
from trainhouse.workers.shapes.layouts.parameters import num_parameters
from trainhouse.workers.shapes.model_shape import ModelShape, read_model

from ...workers.checkpoint.test_adapted_types import tiny
from ..real import MODEL, Server, running_server, server_config, started_dispatch

pytestmark = pytest.mark.anyio

# With it no matrix of the tiny models has gaps after it in the planned vectors.
RANK = 16


def in_file(state: Path) -> dict[str, int]:
    """Returns the number of weights by tensor in the only checkpoint."""
    (file,) = state.rglob("weights/*/adapter_model.safetensors")
    with safe_open(file, "np") as tensors:
        return {name: prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


async def created(server: Server, number: int, **fields: Any) -> str:
    session_id = await server.create_session()
    body = {"session_id": session_id, "model_seq_id": number, "base_model": MODEL} | fields
    return (await server.result((await server.post("create_model", body))["request_id"]))["model_id"]


async def count(server: Server, model_id: str) -> int:
    info = await server.post("get_info", {"model_id": model_id})
    assert types.GetInfoResponse.model_validate(info).model_id == model_id
    return info["num_parameters"]


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "deepseek_v3"])
async def test_an_adapter_trains_what_its_checkpoint_holds(model_type: str, tmp_path: Path) -> None:
    model, state = tiny(model_type, tmp_path / "model"), tmp_path / "state"
    shape = read_model(ServedModel("m", str(model)))
    assert isinstance(shape, ModelShape)
    config = server_config(model, state)
    async with started_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        run = await server.create_run(rank=RANK)
        found = await count(server, run.model_id)
        await run.do("save_weights", path="a")
        tensors = in_file(state)
        assert found == sum(tensors.values()) == adapter_size(shape, SINGLE, RANK) + RANK * (shape.vocab + shape.hidden)
        # Controls: one tensor less, no head, matrices for each expert.
        assert found != sum(tensors.values()) - min(tensors.values())
        lora = {"rank": RANK, "seed": 1}
        headless = await created(server, 0, lora_config=lora | {"train_unembed": False})
        assert await count(server, headless) == adapter_size(shape, SINGLE, RANK)
        assert await count(server, await created(server, 0, lora_config=lora | {"expert_factors": "each"})) > found


async def test_other_models_count_all_that_they_train(tmp_path: Path) -> None:
    model = tiny("qwen3", tmp_path / "model")
    shape = read_model(ServedModel("m", str(model)))
    assert isinstance(shape, ModelShape)
    config = server_config(model, tmp_path / "state", max_full_models=1)
    async with started_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        assert await count(server, await created(server, 0, training="full")) == num_parameters(shape)
        counts: dict[Role, int] = {}
        for role in ("policy", "critic", "reference"):
            lora = {"rank": RANK, "train_unembed": False}
            counts[role] = await count(server, await created(server, 0, lora_config=lora, model_role=role))
        of_trunk = adapter_size(shape, SINGLE, RANK)
        assert counts == {"policy": of_trunk, "critic": of_trunk + shape.hidden + 1, "reference": 0}
