"""Kolibri 1, with windows in most layers, which alone rotate, norms around each part, and experts with sigmoids as
weights: https://huggingface.co/Aleph-Alpha/Kolibri-1.
"""

from collections.abc import Sequence

from ..parts import Dense, Layer, Norms, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention, kinds_by_step

_NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _layers(config: ConfigReader) -> Sequence[Layer]:
    shared = config.number("shared_expert_intermediate_size")
    experts = RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_local_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=config.number("moe_intermediate_size"),
        shared=Dense(hidden=config.hidden, features=shared, name="mlp.shared_experts"),
    )
    whole = attention(config, norms_heads="each", rotation=None)
    local = attention(config, norms_heads="each", window=config.window)
    kinds = config.names("layer_types") or kinds_by_step(config, 5)
    mixers = [local if kind == "sliding_attention" else whole for kind in kinds]
    return [Layer(config.hidden, mixer, experts, _NORMS) for mixer in mixers]


KOLIBRI1 = Family("Kolibri1", "kolibri1", _layers, aliases={"num_experts": "num_local_experts"})
