"""Compares a model that cannot be compared with transformers itself, by a small random twin of its config."""

import logging
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..protocol.worker_config import ServedModel, WorkerConfig
from ..shapes.model_shape import ModelDescription, ModelShape
from .loading import class_of
from .model import BaseModel

_log = logging.getLogger(__name__)

# Layers of a twin: the first ones, up to one of each kind.
_MOST_LAYERS = 64

# The largest values that a twin has. Features of heads and states stay, so that rotations are those of the model.
# Short parts and growth of queries are reached by the sequences that are compared.
_SIZES: Mapping[str, int] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "attention_chunk_size": 4,
    "floor_scale": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 2,
    "mamba_num_heads": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
}
# Of the weights: wide enough that attention is not uniform.
_SPREAD = 0.1
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def needs_twin(shape: ModelDescription, dtype: torch.dtype, is_shared: bool) -> bool:
    """True if ranks share the model, and none can run it by transformers, or if rounding changes what indexers choose
    in so short sequences as are compared."""
    mixers = shape.mixers if isinstance(shape, ModelShape) else ()
    has_indexer = any(mixer.indexer is not None for mixer in mixers)
    return is_shared or (has_indexer and dtype != torch.float32)


def check_twin(source: str, config: PreTrainedConfig, shape: ModelDescription) -> None:
    """Loads a twin of the model on the CPU, so that its numbers are compared with transformers' own.

    If transformers makes no such small model of the config, this is logged.

    Raises:
        ValueError: the numbers differ.
    """
    assert isinstance(shape, ModelShape)  # as all models that need twins
    try:
        twin = _random_model(twin_of(config, shape))
    except Exception as error:  # of sizes that this type does not allow
        _log.warning("%s is not compared with transformers: no small model of its config: %s", source, error)
        return
    with tempfile.TemporaryDirectory() as directory:
        twin.save_pretrained(directory)
        try:
            BaseModel(WorkerConfig(ServedModel(shape.name, directory), device="cpu", dtype="float32"))
        except ValueError as error:
            message = str(error).removeprefix(f"{directory}: ")
            raise ValueError(f"{source}: a small random model of its config: {message}") from None


@torch.random.fork_rng(devices=[])
def _random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model in which also norms and biases are random."""
    torch.manual_seed(0)
    model = class_of(config).from_config(config)
    for each in model.parameters():
        if each.ndim <= 1:
            each.data += 0.1 * torch.randn_like(each)
    return model


def twin_of(config: PreTrainedConfig, shape: ModelShape) -> PreTrainedConfig:
    """Returns the config with all settings of a model's config, and small sizes."""
    given: dict[str, Any] = config.to_dict()
    num_layers = _num_layers(shape)
    small = {name: min(given[name], size) for name, size in _SIZES.items() if isinstance(given.get(name), int)}
    of_layers = {
        name: each[:num_layers]
        for name, each in given.items()
        if isinstance(each, list) and len(each) == shape.num_layers
    }
    changed = given | small | of_layers | _heads(given, shape) | dict.fromkeys(_TOKENS, 0)
    changed |= {"num_hidden_layers": num_layers, "initializer_range": _SPREAD}
    if own := given.get("per_layer_config"):
        changed |= {"per_layer_config": {number: each for number, each in own.items() if int(number) < num_layers}}
    if shared := given.get("num_kv_shared_layers"):
        changed |= {"num_kv_shared_layers": shared * num_layers // shape.num_layers}
    del changed["model_type"]
    return AutoConfig.for_model(shape.model_type, **changed)


def _num_layers(shape: ModelShape) -> int:
    """Returns how many of the first layers have all different ones among them."""
    last = max(shape.layers.index(layer) for layer in set(shape.layers))
    return min(last + 1, _MOST_LAYERS)


def _heads(given: Mapping[str, Any], shape: ModelShape) -> dict[str, int]:
    """Returns the numbers of heads, and sizes that some types derive from each other."""
    num_queries = _SIZES["num_attention_heads"]
    has_own_keys = given.get("num_key_value_heads") in (None, given.get("num_attention_heads"))
    found = {
        "num_attention_heads": num_queries,
        "num_key_value_heads": num_queries if has_own_keys else num_queries // 2,
    }
    if shape.mixers == shape.attentions and (head_dim := shape.head_features) is not None:
        found |= {"head_dim": head_dim, "hidden_size": num_queries * head_dim}
    if given.get("mamba_d_ssm") and given.get("mamba_d_head"):
        found |= {"mamba_d_ssm": _SIZES["mamba_n_heads"] * given["mamba_d_head"]}
    elif given.get("mamba_d_head"):
        found |= {"mamba_n_heads": given["mamba_expand"] * _SIZES["hidden_size"] // given["mamba_d_head"]}
    return found
