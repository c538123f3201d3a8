"""The sizes of a draft's modules, which follow from its configuration and its target."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....schemas.errors import OperationError
from ....schemas.models import DraftConfig
from ...shapes.draft_sizes import DraftSizes
from ...shapes.other_models import logit_scale_of


@dataclass(frozen=True)
class DraftShape(DraftSizes):
    """The sizes of a draft's modules, and what their computation needs in addition.

    config: in the format of transformers, for rotations and export.
    block_size, mask_token: set for dflash only. logit_scale: the factor by which the target multiplies its logits.
    """

    eps: float
    config: LlamaConfig
    block_size: int | None = None
    mask_token: int | None = None
    logit_scale: float = 1.0
    _rotations: dict[torch.device, tuple[Tensor, float]] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(draft: DraftConfig, target: PreTrainedConfig, vocab_size: int) -> "DraftShape":
        """Returns the sizes of a draft. `draft` must be resolved, without open fields."""
        assert draft.num_layers is not None and draft.capture_layers is not None and draft.draft_vocab_size is not None
        config: Any = _config(draft, target.get_text_config(), vocab_size)
        return DraftShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            layers=draft.num_layers,
            captured=len(draft.capture_layers),
            vocabulary=draft.draft_vocab_size,
            target_vocabulary=vocab_size,
            eps=config.rms_norm_eps,
            config=config,
            block_size=draft.block_size,
            mask_token=draft.mask_token_id,
            logit_scale=logit_scale_of(target),
        )

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    def rotation(self, device: torch.device) -> tuple[Tensor, float]:
        """Returns the inverse frequencies, float32 [head_dim / 2], and the scale of cosines and sines."""
        if device not in self._rotations:
            rotary = LlamaRotaryEmbedding(self.config)
            self._rotations[device] = rotary.inv_freq.to(device), float(rotary.attention_scaling)
        return self._rotations[device]


def with_defaults(draft: DraftConfig, target: PreTrainedConfig, vocab_size: int, default_layers: int) -> DraftConfig:
    """Fills in the fields that all algorithms have.

    Raises OperationError if the target lacks a layer, has fewer tokens than requested, or names no size of an MLP.
    """
    text = target.get_text_config()
    num_layers = int(text.num_hidden_layers)
    for layer in draft.capture_layers or ():
        if layer >= num_layers:
            raise OperationError(
                f"capture_layers has {layer}: the target has layers 0 to {num_layers - 1}, counted from 0"
            )
    if draft.draft_vocab_size is not None and draft.draft_vocab_size > vocab_size:
        raise OperationError(
            f"draft_vocab_size {draft.draft_vocab_size} exceeds the target's vocabulary of {vocab_size}: lower it"
        )
    intermediate = draft.intermediate_size or getattr(text, "intermediate_size", None)
    if intermediate is None:
        raise OperationError("the target's config.json has no intermediate_size: give the draft's")
    return draft.model_copy(
        update={
            "num_layers": draft.num_layers or default_layers,
            "draft_vocab_size": draft.draft_vocab_size or vocab_size,
            "intermediate_size": int(intermediate),
        }
    )


def _config(draft: DraftConfig, target: PreTrainedConfig, vocab_size: int) -> LlamaConfig:
    given: Any = target
    layer: Any = given.per_layer_config[0]  # layers may have heads of several sizes
    rope = getattr(given, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    heads = given.num_attention_heads
    assert draft.intermediate_size is not None and draft.num_layers is not None
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=draft.intermediate_size,
        num_hidden_layers=draft.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(layer, "num_key_value_heads", None) or heads,
        head_dim=getattr(layer, "head_dim", None) or given.hidden_size // heads,
        rms_norm_eps=getattr(given, "rms_norm_eps", None) or 1e-6,
        max_position_embeddings=given.max_position_embeddings,
        rope_parameters=_rope(rope.get("full_attention", rope)),
        tie_word_embeddings=False,
        bos_token_id=getattr(given, "bos_token_id", None),
        eos_token_id=getattr(given, "eos_token_id", None),
    )


def _rope(of_target: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the draft's RoPE parameters.

    Drafts rotate whole heads, so partial rotation is dropped, and so are longrope's factors for the frequencies of a
    part of a head.
    """
    if of_target.get("rope_type") in ("longrope", "proportional"):
        return {"rope_type": "default", "rope_theta": of_target["rope_theta"]}
    return {name: value for name, value in of_target.items() if name != "partial_rotary_factor"}
