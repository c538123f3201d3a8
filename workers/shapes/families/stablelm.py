"""StableLM 3B and StableLM 2, with layer norms, whose heads rotate by a quarter: https://arxiv.org/abs/2402.17834.

In StableLM 2 12B attention and the feed-forward part of a layer run in parallel, and each head has a norm of its own.
"""

from collections.abc import Sequence

from ..parts import Layer, Norms
from .config_reader import ConfigReader
from .family import Family, attention, dense, heads_unlike_hidden


def _layers(config: ConfigReader) -> Sequence[Layer]:
    norms_heads = "listed" if config.is_set("qk_layernorm") else None
    mixer = attention(
        config,
        qkv_bias=config.is_set("use_qkv_bias"),
        norms_heads=norms_heads,
        head_norms=("q_layernorm", "k_layernorm"),
        norm_module="LayerNormPerHead",
    )
    is_parallel = config.is_set("use_parallel_residual")
    norms = Norms(before_mlp=None if is_parallel else "post_attention_layernorm", has_bias=True)
    return [Layer(config.hidden, mixer, dense(config), norms, is_parallel=is_parallel)] * config.num_layers


STABLELM = Family(
    "StableLm",
    "stablelm",
    _layers,
    defaults={"partial_rotary_factor": 0.25},
    unsupported=heads_unlike_hidden,
    norm=None,
    centers_norms=True,
)
