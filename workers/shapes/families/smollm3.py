"""SmolLM3, which is Llama without rotations in some layers: https://huggingface.co/blog/smollm3."""

from collections.abc import Sequence

from ..parts import Layer, SoftmaxAttention
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _layers(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config, has_bias=config.is_set("mlp_bias"))
    step = config.number("no_rope_layer_interval")
    by_step = [bool(number % step) for number in range(1, config.num_layers + 1)]
    rotates = [bool(each) for each in config.numbers("no_rope_layers")] or by_step
    kinds = config.names("layer_types") or ["full_attention" if each else "sliding_attention" for each in rotates]
    mixers = [_attention(config, *each) for each in zip(rotates, kinds, strict=True)]
    return [Layer(config.hidden, mixer, of_all) for mixer in mixers]


def _attention(config: ConfigReader, rotates: bool, kind: str) -> SoftmaxAttention:
    window = config.window if kind == "sliding_attention" else None
    rotation = "" if rotates else None
    return attention(config, bias_key="attention_bias", rotation=rotation, window=window)


SMOLLM3 = Family("SmolLM3", "smollm3", _layers)
