"""The sizes of a draft's weights, and the parts of them that ranks along tp have. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

# The dimension that ranks along tp divide, by module name; all other modules are whole on each rank.
DIVIDED_DIMS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0) | {"o_proj": 1, "down_proj": 1}

Shapes = Mapping[str, tuple[int, ...]]


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
