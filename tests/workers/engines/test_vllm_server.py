"""The options of the vLLM that we start follow from the model."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest
from trainhouse.schemas.adapters.vllm_form import VllmForm, form_of
from trainhouse.tests.tiny import tiny_config
from trainhouse.workers.engines.vllm.engine import VllmEngine
from trainhouse.workers.engines.vllm.server import VllmProcess, VllmServer
from trainhouse.workers.protocol.worker_config import ServedModel, VllmConfig, WorkerConfig
from trainhouse.workers.scheduler.rank_group import RankGroup
from trainhouse.workers.shapes.model_shape import read_architecture
from transformers import AutoModelForCausalLM

from ..containers import tiny_container

pytestmark = pytest.mark.anyio

Dtype = Literal["auto", "bfloat16"]
Make = Callable[..., VllmProcess]


@pytest.fixture
def process(tmp_path: Path) -> Make:
    def make(
        kind: str, rank: int = 8, device: str = "cuda:0", dtype: Dtype = "auto", **settings: object
    ) -> VllmProcess:
        config = tiny_config(kind, **settings)
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.save_pretrained(tmp_path)
        model = WorkerConfig(ServedModel("tiny", str(tmp_path)), device=device, max_lora_rank=rank)
        form = form_of(read_architecture(model.model))
        return VllmProcess(model, VllmConfig(python="/no/python", dtype=dtype), form, tmp_path)

    return make


@pytest.mark.parametrize(
    ("kind", "rank", "wanted"),
    [
        ("qwen3", 8, "8"),
        ("qwen3_moe", 8, "8"),
        ("falcon_h1", 8, "16"),
        ("gpt_oss", 20, "64"),
        ("granite4_moe", 8, "16"),
        ("qwen3_5", 8, "32"),
        ("qwen3_5", 256, "512"),
    ],
)
def test_vllm_has_room_for_pairs_that_adapt_several_parts(kind: str, rank: int, wanted: str, process: Make) -> None:
    command = process(kind, rank)._command(80)
    assert command[command.index("--max-lora-rank") + 1] == wanted
    assert ("--enable-mixed-moe-lora-format" in command) == (kind == "granite4_moe")


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("kind", ["llama4", "qwen3"])
def test_vllm_reads_from_the_command_whether_queries_of_llama_4_grow(kind: str, tuned: bool, process: Make) -> None:
    settings = {"attn_temperature_tuning": tuned} if kind == "llama4" else {}
    command = process(kind, **settings)._command(80)
    assert ("--override-generation-config" in command) == (kind == "llama4")
    if kind == "llama4":
        assert json.loads(command[command.index("--override-generation-config") + 1]) == settings


@pytest.mark.parametrize("kind", ["qwen3_5", "llama4"])
def test_vllm_loads_only_the_text_part_of_models_with_images(kind: str, process: Make, tmp_path: Path) -> None:
    assert "--language-model-only" not in process(kind)._command(80)
    tiny_container(kind, tmp_path / "whole")
    model = WorkerConfig(ServedModel("tiny", str(tmp_path / "whole")), device="cuda:0")
    server = VllmProcess(model, VllmConfig(python="/no/python"), VllmForm(), tmp_path)
    assert "--language-model-only" in server._command(80)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3_moe", "has no kernels for experts with adapters: give it a GPU"),
        ("qwen3_5", "runs the gated delta rule in bfloat16 alone: add --vllm-dtype bfloat16"),
    ],
)
async def test_models_that_vllm_does_not_run_on_cpus_are_refused_at_start(
    kind: str, reason: str, process: Make
) -> None:
    with pytest.raises(ValueError, match=f"vLLM of tiny does not start: on CPUs vLLM {reason}.*, or use --sampler nat"):
        await process(kind, device="cpu").start(lambda _: None)


@pytest.mark.parametrize("architecture", ["StableLmForCausalLM", "KimiK25ForConditionalGeneration"])
async def test_models_without_adapters_in_vllm_are_refused_at_start(architecture: str, tmp_path: Path) -> None:
    training, server = cast(RankGroup, SimpleNamespace(name="tiny")), VllmServer("http://127.0.0.1:9", None)

    async def save_run(run_id: str, directory: Path) -> None:
        pytest.fail("there is no run")

    engine = VllmEngine(training, save_run, server, form_of(architecture), 0, tmp_path, VllmConfig())
    with pytest.raises(ValueError, match="is not used: vLLM takes no adapters of this model: use --sampler native"):
        await engine.start(lambda _: None)
    await engine.close()


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3_5", "bfloat16"), ("falcon_h1", "auto")])
async def test_others_are_started(kind: str, dtype: Dtype, process: Make) -> None:
    server = process(kind, device="cpu", dtype=dtype)
    with pytest.raises(ValueError, match="/no/python does not run"):
        await server.start(lambda _: None)
    await server.close()
