"""OLMo 2 and 3 (https://arxiv.org/abs/2501.00656), with norms after each part, OLMoE (https://arxiv.org/abs/2409.02060),
and FlexOlmo (https://arxiv.org/abs/2507.07024), which is OLMo 2 with experts. All have norms of queries and keys over
all heads together, whose means ranks along tp exchange.
"""

from collections.abc import Sequence

from ..parts import Layer, Norms, RoutedExperts, SoftmaxAttention
from .config_reader import ConfigReader
from .family import Family, attention, dense, heads_unlike_hidden, kinds_by_step

_NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _layers_of_olmo2(config: ConfigReader) -> Sequence[Layer]:
    return [Layer(config.hidden, _attention(config), dense(config), _NORMS)] * config.num_layers


def _layers_of_olmo3(config: ConfigReader) -> Sequence[Layer]:
    of_all, windows = dense(config), {"sliding_attention": config.window}
    kinds = config.names("layer_types") or kinds_by_step(config, 4)
    mixers = [_attention(config, rotation=kind, window=windows.get(kind)) for kind in kinds]
    return [Layer(config.hidden, mixer, of_all, _NORMS) for mixer in mixers]


def _layers_of_olmoe(config: ConfigReader) -> Sequence[Layer]:
    return [Layer(config.hidden, _attention(config), _experts(config))] * config.num_layers


def _layers_of_flex_olmo(config: ConfigReader) -> Sequence[Layer]:
    return [Layer(config.hidden, _attention(config), _experts(config), _NORMS)] * config.num_layers


def _experts(config: ConfigReader) -> RoutedExperts:
    return RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=config.number("intermediate_size"),
    )


def _attention(config: ConfigReader, **settings: str | int | None) -> SoftmaxAttention:
    return attention(config, bias_key="attention_bias", norms_heads="together", **settings)


OLMO2 = Family("Olmo2", "olmo2", _layers_of_olmo2)
OLMO3 = Family("Olmo3", "olmo3", _layers_of_olmo3)
FLEX_OLMO = Family("FlexOlmo", "flex_olmo", _layers_of_flex_olmo, aliases={"num_local_experts": "num_experts"})
OLMOE = Family(
    "Olmoe",
    "olmoe",
    _layers_of_olmoe,
    aliases={"num_local_experts": "num_experts"},
    unsupported=heads_unlike_hidden,
    unknown_settings=("clip_qkv",),
)
