"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783), InternLM3, IQuest-Coder and EXAONE 3
(https://arxiv.org/abs/2408.03541), which are of the same shape, and CWM (https://arxiv.org/abs/2510.02387), with
windows in most layers.
"""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .family import Family, any_set, attention, dense


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, bias_key="attention_bias")
    return [Layer(config.hidden, mixer, dense(config, has_bias=config.is_set("mlp_bias")))] * config.num_layers


def _layers_of_cwm(config: ConfigReader) -> Sequence[Layer]:
    by_turns = ["sliding_attention" if number % 4 else "full_attention" for number in range(config.num_layers)]
    kinds, mlp = config.names("layer_types") or by_turns, dense(config, has_bias=config.is_set("mlp_bias"))
    windows = [config.window if kind == "sliding_attention" else None for kind in kinds]
    return [Layer(config.hidden, attention(config, window=each), mlp) for each in windows]


LLAMA = Family("Llama", "llama", _layers)
INTERNLM3 = Family("Llama", "llama", _layers, aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"})
IQUESTCODER = Family(
    "Llama",
    "llama",
    _layers,
    defaults={"use_sliding_window": False},
    unsupported=any_set("use_sliding_window", "clip_qkv"),
)
CWM = Family("Cwm", "cwm", _layers_of_cwm)
# Has the modules of Llama. Releases have names of its own for fields and weights.
EXAONE = Family(
    "Llama", "llama", _layers, aliases={"num_layers": "num_hidden_layers", "activation_function": "hidden_act"}
)
