"""EXAONE 4 (https://arxiv.org/abs/2507.11407) and K-EXAONE (https://arxiv.org/abs/2601.01739).

Only layers with a window rotate. EXAONE 4 has norms after each part; K-EXAONE has them before, and the experts of
DeepSeek-V3.
"""

from collections.abc import Sequence

from ..parts import Dense, Layer, Norms, RoutedExperts, SoftmaxAttention
from .config_reader import ConfigReader
from .deepseek import feed_forwards
from .family import Family, attention, dense, kinds_by_step

_NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _layers(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config)
    return [Layer(config.hidden, mixer, of_all, _NORMS) for mixer in _mixers(config)]


def _sparse_layers(config: ConfigReader) -> Sequence[Layer]:
    features = config.number("moe_intermediate_size")
    shared = features * config.number("num_shared_experts")
    experts = RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=features,
        shared=Dense(hidden=config.hidden, features=shared, name="mlp.shared_experts"),
        module="SparseMoEBlock",
    )
    parts = zip(_mixers(config), feed_forwards(config, experts), strict=True)
    return [Layer(config.hidden, *each) for each in parts]


def _mixers(config: ConfigReader) -> Sequence[SoftmaxAttention]:
    """Returns the attention of each layer. In models without windows all layers rotate."""
    window, step = config.window, config.number("sliding_window_pattern", 1, at_least=0)
    kinds = config.names("layer_types") or kinds_by_step(config, step if window is not None else 1)
    whole = attention(config, norms_heads="each", rotation="" if window is None else None)
    local = attention(config, norms_heads="each", window=window)
    return [local if kind == "sliding_attention" else whole for kind in kinds]


EXAONE4 = Family("Exaone4", "exaone4", _layers)
EXAONE_MOE = Family("ExaoneMoe", "exaone_moe", _sparse_layers)
