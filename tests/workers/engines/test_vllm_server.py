"""The options of the vLLM that we start follow from the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from trainhouse.schemas.vllm_form import form_of
from trainhouse.tests.tiny import tiny_config
from trainhouse.workers.engines.vllm.server import VllmProcess
from trainhouse.workers.protocol.worker_config import ServedModel, VllmConfig, WorkerConfig
from trainhouse.workers.shapes.model_shape import read_architecture
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.anyio

Dtype = Literal["auto", "bfloat16"]
Make = Callable[..., VllmProcess]


@pytest.fixture
def process(tmp_path: Path) -> Make:
    def make(
        kind: str, rank: int = 8, device: str = "cuda:0", dtype: Literal["auto", "bfloat16"] = "auto"
    ) -> VllmProcess:
        config = tiny_config(kind)
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


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3_5", "bfloat16"), ("falcon_h1", "auto")])
async def test_others_are_started(kind: str, dtype: Dtype, process: Make) -> None:
    server = process(kind, device="cpu", dtype=dtype)
    with pytest.raises(ValueError, match="/no/python does not run"):
        await server.start(lambda _: None)
    await server.close()
