"""Drafts of each algorithm when created: defaults, refused configurations, initial weights and rotary embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import DraftConfig
from trainhouse.workers.drafts.algorithms.draft_shape import DraftShape
from trainhouse.workers.drafts.algorithms.modules import DraftModules, rotated
from trainhouse.workers.parallel.mesh import ALONE
from transformers import LlamaConfig, Qwen3_5MoeTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from ...tiny import LLAMA3_ROPE, TINY_SHAPE, tiny_config
from ..adapted import Adapted
from .case import ALGORITHMS, algorithm

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}


def target(**fields: Any) -> LlamaConfig:
    return LlamaConfig(**(TINY_SHAPE | fields))


def resolved(requested: DraftConfig, **fields: Any) -> DraftConfig:
    config = target(**fields)
    return algorithm(requested.algorithm).with_defaults(requested, config, config.vocab_size)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("eagle3", {"capture_layers": (1, 3, 4), "target_repr": "hidden_state"}),
        ("dflash", {"capture_layers": (4,), "block_size": 16, "mask_token_id": 7}),
    ],
)
def test_defaults_are_filled_in_once(name: Any, fields: dict[str, Any]) -> None:
    found = resolved(DraftConfig(algorithm=name), num_hidden_layers=8, pad_token_id=7)
    assert found == DraftConfig(algorithm=name, num_layers=1, draft_vocab_size=512, intermediate_size=128, **fields)
    assert resolved(found, num_hidden_layers=8, pad_token_id=7) == found


def test_the_size_of_the_mlp_is_needed_if_the_target_names_none() -> None:
    sparse = Qwen3_5MoeTextConfig(num_hidden_layers=2)
    for name in ALGORITHMS:
        fill = algorithm(name).with_defaults
        with pytest.raises(OperationError, match="has no intermediate_size: give the draft's"):
            fill(DraftConfig(algorithm=name), sparse, 512)
        filled = fill(DraftConfig(algorithm=name, intermediate_size=48), sparse, 512)
        assert filled.intermediate_size == 48


@pytest.mark.parametrize(
    "fields",
    [{"target_repr": "logits"}, {"target_repr": "pruned_logits"}, {"target_repr": "pruned_logits", "target_top_k": 4}],
)
def test_explicit_settings_are_kept(fields: dict[str, Any]) -> None:
    sizes = {"num_layers": 1, "capture_layers": (0, 5), "draft_vocab_size": 9, "intermediate_size": 7, "seed": 3}
    requested = DraftConfig(algorithm="eagle3", **sizes, **fields)
    assert resolved(requested, num_hidden_layers=8) == requested


@pytest.mark.parametrize(
    ("name", "num_layers", "num_target_layers", "captured"),
    [
        ("eagle3", 1, 1, (0,)),
        ("eagle3", 1, 2, (0, 1)),
        ("eagle3", 1, 4, (0, 1)),
        ("eagle3", 1, 8, (1, 3, 4)),
        ("eagle3", 1, 32, (1, 15, 28)),
        ("eagle3", 1, 36, (1, 17, 32)),
        ("dflash", 5, 36, (1, 9, 17, 25, 33)),
        ("dflash", 1, 36, (18,)),
        ("dflash", 3, 4, (1,)),
        ("dflash", 2, 5, (1, 2)),
        ("dflash", 3, 2, (1,)),
        ("dflash", 2, 1, (0,)),
        ("dflash", 1, 1, (0,)),
    ],
)
def test_default_capture_layers_spread_over_the_target(
    name: Any, num_layers: int, num_target_layers: int, captured: tuple[int, ...]
) -> None:
    requested = DraftConfig(algorithm=name, num_layers=num_layers)
    assert resolved(requested, num_hidden_layers=num_target_layers).capture_layers == captured


@pytest.mark.parametrize(
    ("padding", "ends", "mask"),
    [(None, 2, 511), (-1, 2, 511), (512, 2, 511), (4, 3, 4), (4, 4, 511), (4, [3, 4], 511)],
)
def test_mask_is_the_padding_token_or_the_last(padding: int | None, ends: int | list[int], mask: int) -> None:
    """The padding token must exist and end no text."""
    config = target()
    config.pad_token_id, config.eos_token_id = padding, ends
    found = algorithm("dflash").with_defaults(DraftConfig(algorithm="dflash"), config, 512)
    assert found.mask_token_id == mask


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("eagle3", {"num_layers": 2}, "num_layers is 2: an eagle3 draft has 1 layer"),
        ("eagle3", {"block_size": 8}, "block_size is a setting of dflash, not of eagle3: leave it out"),
        ("eagle3", {"mask_token_id": 0}, "mask_token_id is a setting of dflash, not of eagle3: leave it out"),
        ("eagle3", {"capture_layers": (1, 8)}, "capture_layers has 8: the target has layers 0 to 7, counted from 0"),
        ("eagle3", {"draft_vocab_size": 513}, "draft_vocab_size 513 exceeds the target's vocabulary of 512: lower it"),
        (
            "eagle3",
            {"target_repr": "pruned_logits"},
            "target_repr 'pruned_logits' prunes to the draft's vocabulary, which has all 512 tokens of the target: set"
            " draft_vocab_size or target_top_k, or choose 'logits'",
        ),
        (
            "eagle3",
            {"target_repr": "pruned_logits", "target_top_k": 512},
            "target_top_k is 512, and the target has 512 tokens: lower it, or choose target_repr 'logits'",
        ),
        *(
            ("eagle3", fields, "target_top_k is 5: it is only for target_repr 'pruned_logits': leave it out")
            for fields in ({"target_top_k": 5}, {"target_repr": "logits", "target_top_k": 5})
        ),
        (
            "dflash",
            {"target_repr": "hidden_state"},
            "target_repr is 'hidden_state': a dflash draft learns the text's tokens and does not read its target's"
            " distribution: leave it out",
        ),
        (
            "dflash",
            {"target_top_k": 5},
            "target_top_k is 5: a dflash draft learns the text's tokens and does not read its target's distribution:"
            " leave it out",
        ),
        ("dflash", {"capture_layers": (1, 9)}, "capture_layers has 9: the target has layers 0 to 7, counted from 0"),
        (
            "dflash",
            {"draft_vocab_size": 11},
            "draft_vocab_size is 11: a dflash draft predicts all 512 tokens with the target's output head: leave"
            " draft_vocab_size out",
        ),
        (
            "dflash",
            {"mask_token_id": 512},
            "mask_token_id is 512: the target has tokens 0 to 511: choose one that no text has",
        ),
    ],
)
def test_impossible_configs_are_refused(name: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OperationError) as refusal:
        resolved(DraftConfig(algorithm=name, **fields), num_hidden_layers=8)
    assert str(refusal.value) == message


@pytest.mark.parametrize("name", ALGORITHMS)
def test_initial_weights_depend_on_the_seed(name: Any, tiny_models: dict[str, Path]) -> None:
    """Only an EAGLE-3 draft has an output head: it copies the target's."""
    base = Adapted(tiny_models["llama"]).base
    size = 100 if name == "eagle3" else None
    config = algorithm(name).with_defaults(DraftConfig(algorithm=name, draft_vocab_size=size), base.config, 512)
    parameters = algorithm(name).parameters(DraftShape.of(config, base.config, 512))
    vocabulary = torch.arange(3, 303, 3)

    def new(seed: int) -> dict[str, Tensor]:
        tensors = {each.key: torch.zeros(each.shape) for each in parameters}
        algorithm(name).initialize(tensors, base, vocabulary, torch.Generator().manual_seed(seed))
        return tensors

    first, again, other = new(1), new(1), new(2)
    assert ("lm_head.weight" in first) == (name == "eagle3")
    for key, weight in first.items():
        assert torch.equal(weight, again[key])
        if key == "lm_head.weight":
            assert torch.equal(weight, base.unembedding[vocabulary])
        elif weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            assert not torch.equal(weight, other[key])
            assert float(weight.square().sum(1).mean()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE, YARN], ids=["default", "llama3", "yarn"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_heads_use_the_targets_rotary_embedding(name: Any, rope: dict[str, object] | None) -> None:
    config = target(**({"rope_parameters": rope} if rope else {}))
    shape = DraftShape.of(algorithm(name).with_defaults(DraftConfig(algorithm=name), config, 512), config, 512)
    modules, positions = DraftModules(shape, {}, ALONE), torch.tensor([0, 1, 7, 800])
    heads = torch.randn(len(positions), 3, shape.head_dim)
    found = rotated(heads, *modules.cos_sin(positions, heads.dtype))
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    wanted = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)[0]
    torch.testing.assert_close(found, wanted[0].transpose(0, 1), rtol=0, atol=1e-6)
    later = rotated(heads, *modules.cos_sin(positions + 1, heads.dtype))
    assert not torch.allclose(later, found, rtol=0, atol=1e-2)


@pytest.mark.parametrize("is_long", [False, True])
def test_heads_are_rotated_fully_if_the_target_rotates_partially(is_long: bool) -> None:
    default = {"rope_type": "default", "rope_theta": 10000.0}
    factors = {"short_factor": [1.5] * 6, "long_factor": [2.0] * 6, "factor": 4.0}
    longrope = {**default, "rope_type": "longrope", "original_max_position_embeddings": 256, **factors}
    config = tiny_config("phi3", rope_parameters=(longrope if is_long else default) | {"partial_rotary_factor": 0.75})
    found = algorithm("eagle3").with_defaults(DraftConfig(algorithm="eagle3"), config, 512)
    shape = DraftShape.of(found, config, 512)
    frequencies, scale = shape.rotation(torch.device("cpu"))
    assert (len(frequencies), scale) == (shape.head_dim // 2, 1.0)
    assert not getattr(shape.config, "partial_rotary_factor", None)
    assert shape.config.rope_parameters == default
