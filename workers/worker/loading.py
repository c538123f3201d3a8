"""Loads a rank's base model, and sizes what shares the device with it."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging as transformers_logging

from ..batch.micro_batch import MicroBatch
from ..batch.validated import ModelLimits
from ..lora import Adapter, LoraLayers
from ..models.model import BaseModel
from ..models.model_cache import with_local_model
from ..models.packing_checks import check_ranks
from ..models.twin import check_twin, needs_twin
from ..ops.linear import product_rate
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
from ..registry.model_registry import KINDS, ModelKind, ModelRegistry
from ..resources.allocator import tune_allocator
from ..resources.machine import DeviceSpeed, gigabytes, keep_rate
from ..resources.memory import available_bytes
from ..shapes.model_shape import ModelShape, read_model
from ..state.residency import Residency

logger = logging.getLogger(__name__)

# Memory that a loaded model leaves free on a GPU is split in three: KV cache, adapters, passes.
_MEMORY_SHARES = 3
_USUAL_RANK = 32


@dataclass(frozen=True, eq=False)
class LoadedRank:
    """A rank's base model, and what its size decides."""

    base: BaseModel
    limits: ModelLimits
    models: ModelRegistry
    """A registry without models."""
    speed: DeviceSpeed
    config: WorkerConfig
    """The config, with sizes that fit the device."""
    exclusive_tokens: int
    """Most tokens of a micro-batch of a model that replaces the base's weights."""


def prepared(config: WorkerConfig) -> WorkerConfig:
    """Prepares this process, and returns the config with a model that is on this machine."""
    tune_allocator()
    # cuDNN plans attention for each new shape, about 30 ms each, and prompts and caches keep having new shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    return with_local_model(config)


def load_rank(config: WorkerConfig, mesh: Mesh) -> LoadedRank:
    """Loads the base model. All ranks call this together. Raises ValueError if the model cannot be served."""
    base = load_base(config, mesh)
    limits, lora = limits_of(base, config), LoraLayers(base, config.max_lora_rank)
    rate = product_rate(base.device, base.dtype, torch.get_num_threads())
    tokens = default_micro_batch_tokens(config, base, mesh, rate)
    config = sized_for_device(replace(config, micro_batch_tokens=tokens["lora"]), base, lora, mesh)
    others = plugin_rows("workers.drafts.rows", "KINDS").items()
    kinds: dict[Any, ModelKind] = {training: make(base, mesh, config) for training, make in others}
    names = (*KINDS, *(kind.name for kind in kinds.values()))
    slots = dict.fromkeys(names, config.full_slots) | {Adapter.kind: config.adapter_slots}
    residency = Residency(base.device, slots, config.host_adapter_bytes, config.page_directory)
    models = ModelRegistry(base, lora, residency, config.max_full_models, config.optimizer_states, kinds)
    if base.device.type == "cuda" and base.dtype != torch.float32:
        keep_rate(torch.cuda.get_device_name(base.device), rate)
    speed = DeviceSpeed(sum(mesh.all_gather_object(rate)))
    return LoadedRank(base, limits, models, speed, config, tokens["full"])


def check_loaded(base: BaseModel, mesh: Mesh, hidden_states: Callable[[MicroBatch], Tensor]) -> None:
    """Checks the loaded model against transformers' where the two could differ. Raises ValueError if they do."""
    if mesh.has_forward_collectives:
        check_ranks(base.source, base.model, hidden_states)
    if mesh.rank == 0 and needs_twin(base.shape, base.dtype, mesh.has_forward_collectives):
        check_twin(base.source, base.config, base.shape)


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
    longest, wanted = base.loaded.num_positions, config.max_context_length
    if wanted is not None:
        base.shape.check_context(wanted)
    length = wanted or longest
    if length is None:
        raise ValueError(f"the config of {config.model.name} gives no maximum context length: set --max-context-length")
    return ModelLimits(base.vocab_size, length)
