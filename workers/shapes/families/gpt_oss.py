"""gpt-oss: attention sinks, windows in every other layer, experts with biases and clamped gates.

https://arxiv.org/abs/2508.10925.
"""

from collections.abc import Sequence

from ..parts import Layer, RoutedExperts, SoftmaxAttention, Weight
from .config_reader import ConfigReader
from .family import Family, attention


def _layers(config: ConfigReader) -> Sequence[Layer]:
    by_turns = ["full_attention" if number % 2 else "sliding_attention" for number in range(config.num_layers)]
    num = config.number("num_local_experts")
    experts = RoutedExperts(
        hidden=config.hidden,
        num=num,
        per_token=config.number("num_experts_per_tok"),
        features=config.number("intermediate_size"),
        are_stacked=True,
        has_bias=True,
        is_transposed=True,
        alternates=True,
        router="router",
        router_biases=(Weight("mlp.router.bias", (num,)),),
        module="MLP",
    )
    mixers = {kind: _attention(config, kind) for kind in ("full_attention", "sliding_attention")}
    return [Layer(config.hidden, mixers[kind], experts) for kind in config.names("layer_types") or by_turns]


def _attention(config: ConfigReader, kind: str) -> SoftmaxAttention:
    window = config.window if kind == "sliding_attention" else None
    return attention(config, window=window, bias_key="attention_bias", has_sinks=True)


GPT_OSS = Family("GptOss", "gpt_oss", _layers, aliases={"num_experts": "num_local_experts"})
