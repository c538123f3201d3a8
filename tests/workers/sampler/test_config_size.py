"""The bytes of a cache as planned, also of models that take images and of layers with several head sizes."""

from pathlib import Path

import pytest
import torch
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.kv_cache import CachedRow, NewSequences, SlotTensors
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler.cache.cache import KVCache, size_of_config
from trainhouse.workers.shapes.cache_size import CacheSize
from transformers import AutoConfig

from ...tiny import FAMILY_KINDS, KINDS, tiny_model
from ..adapted import Adapted

TEXT = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("kind", [*KINDS, *FAMILY_KINDS, "gemma4", "gemma4_moe"])
def test_a_pass_allocates_the_bytes_that_are_planned(kind: str, tmp_path: Path) -> None:
    base = Adapted(tiny_model(kind, tmp_path)).base
    tensors, tokens = SlotTensors(capacity=8), torch.arange(3, 8)
    tensors.resize(2)
    packing = Packing(pack_lengths([5]))
    row = CachedRow((), (), packing, 0, [NewSequences(0, 1, 5, tensors, torch.tensor([1]), 0)])
    with torch.no_grad():
        base.hidden_states(tokens, tokens - 3, row)
    size = KVCache.of(base, WorkerConfig(ServedModel("tiny", str(tmp_path)))).size
    assert tensors.num_bytes() == 2 * size.bytes_of(8) > 0
    assert 0 < size.values_per_token * base.dtype.itemsize <= size.bytes_per_token


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_a_model_with_images_has_the_size_of_its_text_part(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, text_config=TEXT)
    assert size_of_config(config, 2) == CacheSize(6 * 2 * 2 * 16 * 2, 0, 2 * 2 * 16)


def test_layers_of_several_head_sizes_are_added_up() -> None:
    config = AutoConfig.for_model("gemma4", text_config={**TEXT, "global_head_dim": 32})
    assert size_of_config(config, 2).bytes_per_token == (5 * 16 + 32) * 2 * 2 * 2
    assert size_of_config(config, 2, num_ranks=2).bytes_per_token == (5 * 16 + 32) * 2 * 2


def test_states_count_once_for_each_sequence() -> None:
    size = CacheSize(bytes_per_token=10, bytes_per_sequence=100, values_per_token=1)
    assert [size.bytes_of(num) for num in (0, 5)] == [100, 150]
    assert [size.longest_within(num) for num in (99, 109, 110, 149)] == [0, 0, 1, 4]
    assert CacheSize(0, 100, 0).longest_within(100) > 1 << 40 and not CacheSize(0, 100, 0).longest_within(99)
