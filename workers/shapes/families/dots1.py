"""dots.llm1, with the attention of Qwen3 and the experts of DeepSeek-V3: https://arxiv.org/abs/2506.05767."""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .deepseek import ALIASES, experts_of, feed_forwards
from .family import Family, attention


def _layers(config: ConfigReader) -> Sequence[Layer]:
    kinds, first = config.names("layer_types"), config.number("max_window_layers", at_least=0)
    has_window = [kind == "sliding_attention" for kind in kinds or ()]
    has_window = has_window or [number >= first for number in range(config.num_layers)]
    windows = [config.window if each else None for each in has_window]
    mixers = [attention(config, bias_key="attention_bias", norms_heads="each", window=each) for each in windows]
    parts = zip(mixers, feed_forwards(config, experts_of(config)), strict=True)
    return [Layer(config.hidden, *each) for each in parts]


DOTS1 = Family("Dots1", "dots1", _layers, aliases=ALIASES)
