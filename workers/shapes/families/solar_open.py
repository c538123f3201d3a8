"""Solar Open, with the experts of DeepSeek-V3 in each layer: https://huggingface.co/upstage/Solar-Open-100B."""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .deepseek import ALIASES, experts_of
from .family import Family, attention


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, qkv_bias=config.is_set("attention_bias"))
    return [Layer(config.hidden, mixer, experts_of(config))] * config.num_layers


SOLAR_OPEN = Family("SolarOpen", "solar_open", _layers, aliases=ALIASES)
