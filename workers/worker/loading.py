"""Loads a rank's base model, and sizes what shares the device with it."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from ..batch.validated import ModelLimits
from ..lora import LoraLayers
from ..models.model import BaseModel
from ..parallel.mesh import Mesh
from ..protocol.plugins import plugin_rows
from ..protocol.worker_config import (
    DEFAULT_KV_CACHE_BYTES,
    DEFAULT_MICRO_BATCH_TOKENS,
    DEFAULT_PREFILL_CHUNK_TOKENS,
    GPU_PREFILL_CHUNK_TOKENS,
    TRAININGS,
    Training,
    WorkerConfig,
)
from ..resources.machine import gigabytes
from ..resources.memory import available_bytes
from ..shapes.model_shape import ModelShape, read_model

logger = logging.getLogger(__name__)

# Memory that a loaded model leaves free on a GPU is split in three: KV cache, adapters, passes.
_MEMORY_SHARES = 3
_USUAL_RANK = 32


def load_base(config: WorkerConfig, mesh: Mesh) -> BaseModel:
    source = config.model.source
    if source.startswith(("/", ".")) and not Path(source).is_dir():
        raise ValueError(f"{source} is not a directory: give the model's directory or its hub id")
    try:
        _leave_logs_to_rank()
        return BaseModel(config, mesh)
    except (OSError, SafetensorError) as error:
        elsewhere = "" if Path(source).is_dir() else " (files that are on this machine: --base-model NAME=DIRECTORY)"
        raise ValueError(f"{source} is not readable: {' '.join(str(error).split())}{elsewhere}") from error


def _leave_logs_to_rank() -> None:
    """Keeps huggingface_hub from printing what the rank also logs, and transformers from logging what does not apply
    here, such as packages that its own layers would use."""
    logging.getLogger("huggingface_hub").handlers.clear()
    transformers_logging.set_verbosity_error()


def sized_for_device(config: WorkerConfig, base: BaseModel, lora: LoraLayers, mesh: Mesh) -> WorkerConfig:
    """Returns the config with a KV cache and adapter slots that fit the device, the same on all ranks.

    A GPU also gets longer chunks of prompts: it runs thousands of tokens in the time of one.
    """
    if base.device.type != "cuda":
        return replace(
            config,
            kv_cache_bytes=config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES,
            prefill_chunk_tokens=config.prefill_chunk_tokens or DEFAULT_PREFILL_CHUNK_TOKENS,
        )
    free, _ = torch.cuda.mem_get_info(base.device)
    share = min(mesh.all_gather_object(free)) // _MEMORY_SHARES
    slots = min(config.adapter_slots, share // max(lora.bytes_at_rank(_USUAL_RANK), 1))
    return replace(
        config,
        kv_cache_bytes=config.kv_cache_bytes or share,
        adapter_slots=max(slots, 1),
        prefill_chunk_tokens=config.prefill_chunk_tokens or min(GPU_PREFILL_CHUNK_TOKENS, config.micro_batch_tokens),
    )


def default_micro_batch_tokens(
    config: WorkerConfig, base: BaseModel, mesh: Mesh, rate: float
) -> Mapping[Training, int]:
    """Returns the configured size, or the planner's default for the rank with the least free memory and the slowest
    device, by what is trained; the same on all ranks.

    Args:
        rate: operations per second of large products on this rank's device.
    """
    shape, on_cpu = read_model(config.model), base.device.type == "cpu"
    found = mesh.all_gather_object((available_bytes(base.device), rate))
    free = [each for each, _ in found if each is not None]
    tokens_that_fit = plugin_rows("workers.planner.rows", "MICRO_BATCH_RULES").get("default")
    if config.micro_batch_tokens or not free or tokens_that_fit is None or not isinstance(shape, ModelShape):
        return dict.fromkeys(TRAININGS, config.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS)
    # Ranks on the CPU share one memory.
    share = min(free) // (config.parallel.num_ranks if on_cpu and config.is_local else 1)
    dtype = str(base.dtype).removeprefix("torch.")
    loaded = replace(config, parallel=base.spec, device=base.device.type, dtype=dtype)
    tokens: Mapping[Training, int] = tokens_that_fit(loaded, shape, share, min(each for _, each in found))
    if tokens["lora"] < DEFAULT_MICRO_BATCH_TOKENS and config.rank == 0:
        logger.warning(
            "%s: micro-batches have at most %d tokens instead of %d: no more fit into a third of the %s that a rank has"
            " free (--micro-batch-tokens, --activations recompute)",
            *(config.model.name, tokens["lora"], DEFAULT_MICRO_BATCH_TOKENS, gigabytes(share)),
        )
    return tokens


def limits_of(base: BaseModel, config: WorkerConfig) -> ModelLimits:
    longest, wanted = base.num_positions, config.max_context_length
    if wanted is not None:
        base.shape.check_context(wanted)
    length = wanted or longest
    if length is None:
        raise ValueError(f"the config of {config.model.name} gives no maximum context length: set --max-context-length")
    return ModelLimits(base.vocab_size, length)
