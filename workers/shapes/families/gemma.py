"""Gemma (https://arxiv.org/abs/2403.08295), with norms whose weights grow by 1, GELU and a scaled embedding, Gemma 2
(https://arxiv.org/abs/2408.00118), with norms around each part, windows in every other layer and caps on scores and
logits, and Gemma 3 (https://arxiv.org/abs/2503.19786), whose layers with a window have rotations of their own.
"""

from collections.abc import Sequence

from ..parts import Layer, Norms, SoftmaxAttention
from .config_reader import ConfigReader
from .family import Family, attention, dense, kinds_by_step

_NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_ACTIVATION = "gelu_pytorch_tanh"


def _layers_of_gemma(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, bias_key="attention_bias")
    return [Layer(config.hidden, mixer, dense(config, activation=_ACTIVATION))] * config.num_layers


def _layers_of_gemma2(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config, activation=_ACTIVATION)
    cap = config.limit("attn_logit_softcapping")
    windows = {"sliding_attention": config.window, "full_attention": None}
    kinds = config.names("layer_types") or kinds_by_step(config, 2)
    mixers = [attention(config, window=windows[kind], bias_key="attention_bias", score_cap=cap) for kind in kinds]
    return [Layer(config.hidden, mixer, of_all, _NORMS) for mixer in mixers]


def _layers_of_gemma3(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config, activation=_ACTIVATION)
    return [Layer(config.hidden, _mixer(config, kind), of_all, _NORMS) for kind in _kinds(config)]


def _mixer(config: ConfigReader, kind: str) -> SoftmaxAttention:
    window = config.window if kind == "sliding_attention" else None
    return attention(config, rotation=kind, window=window, bias_key="attention_bias", norms_heads="each")


def _kinds(config: ConfigReader) -> Sequence[str]:
    """Returns the kind of each layer. Without `layer_types` only every n-th layer has no window."""
    return config.names("layer_types") or kinds_by_step(config, config.number("sliding_window_pattern"))


GEMMA = Family(
    "Gemma",
    "gemma",
    _layers_of_gemma,
    embedding="TextScaledWordEmbedding",
    norm_weight_plus_one=True,
    activation=_ACTIVATION,
    activation_aliases=("gelu",),
)
GEMMA2 = Family(
    "Gemma2",
    "gemma2",
    _layers_of_gemma2,
    embedding="TextScaledWordEmbedding",
    norm_weight_plus_one=True,
    settings=("attn_logit_softcapping",),
    activation=_ACTIVATION,
    activation_key="hidden_activation",
    logit_cap_key="final_logit_softcapping",
)
GEMMA3 = Family(
    "Gemma3",
    "gemma3",
    _layers_of_gemma3,
    defaults={"sliding_window_pattern": 6},
    trunk="TextModel",
    embedding="TextScaledWordEmbedding",
    norm_weight_plus_one=True,
    activation=_ACTIVATION,
    activation_key="hidden_activation",
    logit_cap_key="final_logit_softcapping",
)
