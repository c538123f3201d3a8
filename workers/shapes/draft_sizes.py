"""The sizes of a draft's weights, of the parts that ranks along tp have, and of captured features. Imports no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# The dimension that ranks along tp divide, by module name; all other modules are whole on each rank.
DIVIDED_DIMS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0) | {"o_proj": 1, "down_proj": 1}

Shapes = Mapping[str, tuple[int, ...]]

CAPTURED = "captured"
_HASH_DIGITS = 16


@dataclass(frozen=True)
class DraftSizes:
    """The sizes of a draft's modules.

    hidden: the target's, since the draft reads its embeddings and features. captured: the number of captured layers.
    vocabulary: the number of tokens that the draft can propose, out of target_vocabulary.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    captured: int
    vocabulary: int
    target_vocabulary: int

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim


def eagle3_shapes(sizes: DraftSizes) -> Shapes:
    """Returns the shapes of an eagle3 draft's weights, by module."""
    hidden, layer = sizes.hidden, "midlayer"
    return {
        "fc": (hidden, sizes.captured * hidden),
        f"{layer}.input_layernorm": (hidden,),
        f"{layer}.hidden_norm": (hidden,),
        f"{layer}.self_attn.q_proj": (sizes.queries, 2 * hidden),
        f"{layer}.self_attn.k_proj": (sizes.keys, 2 * hidden),
        f"{layer}.self_attn.v_proj": (sizes.keys, 2 * hidden),
        f"{layer}.self_attn.o_proj": (hidden, sizes.queries),
        f"{layer}.post_attention_layernorm": (hidden,),
        **_mlp_shapes(sizes, layer),
        "norm": (hidden,),
        "lm_head": (sizes.vocabulary, hidden),
    }


def dflash_shapes(sizes: DraftSizes) -> Shapes:
    """Returns the shapes of a dflash draft's weights, by module."""
    hidden = sizes.hidden
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, sizes.captured * hidden), "hidden_norm": (hidden,)}
    for layer in (f"layers.{number}" for number in range(sizes.layers)):
        shapes |= {
            f"{layer}.input_layernorm": (hidden,),
            f"{layer}.self_attn.q_proj": (sizes.queries, hidden),
            f"{layer}.self_attn.k_proj": (sizes.keys, hidden),
            f"{layer}.self_attn.v_proj": (sizes.keys, hidden),
            f"{layer}.self_attn.o_proj": (hidden, sizes.queries),
            f"{layer}.self_attn.q_norm": (sizes.head_dim,),
            f"{layer}.self_attn.k_norm": (sizes.head_dim,),
            f"{layer}.post_attention_layernorm": (hidden,),
            **_mlp_shapes(sizes, layer),
        }
    return shapes | {"norm": (hidden,)}


def own_shape(module: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Returns the shape of the part that a rank along tp has."""
    dim = DIVIDED_DIMS.get(module.split(".")[-1])
    return tuple(size // tp if number == dim else size for number, size in enumerate(shape))


def _mlp_shapes(sizes: DraftSizes, layer: str) -> Shapes:
    return {
        f"{layer}.mlp.gate_proj": (sizes.intermediate, sizes.hidden),
        f"{layer}.mlp.up_proj": (sizes.intermediate, sizes.hidden),
        f"{layer}.mlp.down_proj": (sizes.hidden, sizes.intermediate),
    }


@dataclass(frozen=True)
class FeatureColumn:
    """One tensor of captured features.

    width: numbers per token. dtype: None = the target's.
    """

    width: int
    dtype: Literal["int32", "float32"] | None = None


def target_columns(
    target_repr: str, hidden: int, vocab_size: int, draft_vocab_size: int, top_k: int | None
) -> dict[str, FeatureColumn]:
    """Returns what is stored of the target's output, by name.

    Args:
        target_repr: as in DraftConfig.
        hidden, vocab_size: of the target.
        top_k: with pruned_logits, how many logits of a token are stored; None = those of the draft's vocabulary.
    """
    one = {name: FeatureColumn(1, name) for name in ("int32", "float32")}
    if target_repr == "hidden_state":
        return {"hidden_state": FeatureColumn(hidden)}
    if target_repr == "logits":
        return {"logits": FeatureColumn(vocab_size)}
    if top_k is None:
        pruned = FeatureColumn(draft_vocab_size)
        return {"pruned_logits": pruned, "logsumexp": one["float32"], "top_token": one["int32"]}
    ids = FeatureColumn(top_k, "int32")
    return {"pruned_logits": FeatureColumn(top_k), "token_ids": ids, "rest_logsumexp": one["float32"]}


def feature_columns(num_layers: int, hidden: int, target: Mapping[str, FeatureColumn]) -> dict[str, FeatureColumn]:
    """Returns everything that is stored, given `target_columns`: also the outputs of the captured layers."""
    return {CAPTURED: FeatureColumn(num_layers * hidden), **target}


def token_bytes(columns: Mapping[str, FeatureColumn], number_bytes: int) -> int:
    """Returns the bytes of a token, where a number of the target has `number_bytes`."""
    return sum(each.width * (number_bytes if each.dtype is None else 4) for each in columns.values())


def vocabulary_hash(token_ids: bytes) -> str:
    """Returns the hash by which vocabularies of drafts are compared.

    Args:
        token_ids: ascending, as little-endian int64.
    """
    return hashlib.sha256(token_ids).hexdigest()[:_HASH_DIGITS]
