"""Tests which modules `create_model` and `get_info` report as adapted, and what is refused, with the real worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tinker import types
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker

from ...workers.checkpoint.test_adapted_types import tiny
from ..real import MODEL, Server, running_server, server_config, started_dispatch

pytestmark = pytest.mark.anyio

ATTENTION = {f"self_attn.{kind}_proj": 2 for kind in "qkvo"}
HEAD = {"lm_head": 1}


def linears(path: str, count: int) -> dict[str, int]:
    return {f"{path}.{kind}_proj": count for kind in ("gate", "up", "down")}


# Adapted modules of the feed-forward layers of the tiny model, and the other modules that have matrices.
MLP: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "starcoder2": ({"mlp.c_fc": 2, "mlp.c_proj": 2}, {}),
    "olmoe": (linears("mlp.experts", 2), {"mlp.gate": 2}),
    "phimoe": (linears("mlp.experts", 2), {"mlp.router": 2}),
    "minimax_m2": (linears("mlp.experts", 2), {"mlp.gate": 2}),
    "qwen2_moe": (
        linears("mlp.experts", 2) | linears("mlp.shared_expert", 2),
        {"mlp.gate": 2, "mlp.shared_expert_gate": 2},
    ),
    "hunyuan_v1_moe": (linears("mlp.experts", 2) | linears("mlp.shared_mlp", 2), {"mlp.gate.wg": 2}),
    "glm4_moe": (
        linears("mlp", 1) | linears("mlp.experts", 1) | linears("mlp.shared_experts", 1),
        {"mlp.gate": 1},
    ),
    "dots1": (
        linears("mlp", 1) | linears("mlp.experts", 1) | linears("mlp.shared_experts", 1),
        {"mlp.gate": 1},
    ),
    "ernie4_5_moe": (
        linears("mlp", 1) | linears("mlp.experts", 1) | linears("mlp.shared_experts", 1),
        {"mlp.gate": 1, "mlp.gate.moe_statics": 1},
    ),
    # Experts in another memory layout are not adapted, and are reported so.
    "aria_text": (linears("mlp.shared_experts", 2), {"mlp.experts": 2, "mlp.router": 2}),
}
CORE = ("aria_text", "qwen2_moe", "starcoder2")


@asynccontextmanager
async def serving(model_type: str, tmp_path: Path) -> AsyncIterator[Server]:
    config = server_config(tiny(model_type, tmp_path / "model"), tmp_path / "state")
    async with started_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        yield server


async def create_model(server: Server, **lora: Any) -> Any:
    session_id = await server.create_session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4} | lora}
    return await server.result((await server.post("create_model", body))["request_id"])


@pytest.mark.parametrize(
    "model_type", [each if each in CORE else pytest.param(each, marks=pytest.mark.full) for each in MLP]
)
async def test_adapted_modules_are_reported(model_type: str, tmp_path: Path) -> None:
    of_mlp, others = MLP[model_type]
    async with serving(model_type, tmp_path) as server:
        whole, attention = await create_model(server), await create_model(server, train_mlp=False)
        assert (whole["adapted"], whole["not_adapted"]) == (ATTENTION | of_mlp | HEAD, others)
        assert (attention["adapted"], attention["not_adapted"]) == (ATTENTION | HEAD, of_mlp | others)
        info = await server.post("get_info", {"model_id": whole["model_id"]})
        assert (info["adapted"], info["not_adapted"]) == (whole["adapted"], whole["not_adapted"])
        assert info.get("expert_factors") == ("shared" if "mlp.experts.up_proj" in of_mlp else None)
        assert ("warning" in whole, "warning" in info, "warning" in attention) == (
            *["mlp.experts" in others] * 2,
            False,
        )
        assert types.CreateModelResponse.model_validate(whole).model_id == whole["model_id"]
        assert types.GetInfoResponse.model_validate(info).lora_rank == 4


async def test_experts_that_stay_as_they_are_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving("aria_text", tmp_path) as server:
        model = await create_model(server)
        assert model["warning"].startswith("train_mlp leaves experts as they are (mlp.experts in 2 layers)")
        assert f"{model['model_id']} of {MODEL}: {model['warning']}" in caplog.text
        refused = await create_model(server, expert_factors="each")
        assert refused["category"] == "user"
        for word in ("expert_factors 'each'", "mlp.experts", "not supported in aria_text models", "leave"):
            assert word in refused["error"]
        assert "warning" not in await create_model(server, expert_factors="each", train_mlp=False)


async def test_a_run_that_would_adapt_nothing_is_refused(tmp_path: Path) -> None:
    async with serving("gpt2", tmp_path) as server:
        refused = await create_model(server)
        assert refused["category"] == "user"
        for word in ("train_attn=True and train_mlp=True would adapt nothing of gpt2 models", "c_attn", "c_fc", "full"):
            assert word in refused["error"]
        assert "train_mlp=True would" in (await create_model(server, train_attn=False))["error"]
        head = await create_model(server, train_attn=False, train_mlp=False)
        assert head["adapted"] == HEAD
        assert head["not_adapted"] == {"attn.c_attn": 2, "attn.c_proj": 2, "mlp.c_fc": 2, "mlp.c_proj": 2}


def test_a_run_of_an_earlier_version_can_be_rebuilt(tmp_path: Path) -> None:
    """Earlier versions accepted what is refused now."""
    worker = Worker(WorkerConfig(ServedModel("m", str(tiny("gpt2", tmp_path))), device="cpu"))
    assert worker.create_run(RunSpec("old", LoraConfig(rank=4, seed=1))).num_adapted == HEAD
    with pytest.raises(OperationError, match="would adapt nothing"):
        worker.create_run(RunSpec("new", LoraConfig(rank=4, seed=1), is_new=True))
