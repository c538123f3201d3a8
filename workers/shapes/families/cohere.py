"""Command R (https://huggingface.co/CohereLabs/c4ai-command-r-v01) and Command R7B and A, which are Cohere 2.

Attention and the feed-forward part of a layer run in parallel, behind a layer norm. Command R+ has norms of each head
with weights of its own; in Cohere 2 only layers with a window rotate.
"""

from collections.abc import Sequence

from ..parts import Layer, Norms, SoftmaxAttention
from .config_reader import ConfigReader
from .family import Family, Setting, attention, dense, kinds_by_step

_NORMS = Norms(before_mlp=None)


def _layers(config: ConfigReader) -> Sequence[Layer]:
    norms = "apart" if config.is_set("use_qk_norm") else None
    return [_layer(config, _attention(config, norms_heads=norms))] * config.num_layers


def _layers_of_cohere2(config: ConfigReader) -> Sequence[Layer]:
    kinds = config.names("layer_types") or kinds_by_step(config, config.number("sliding_window_pattern"))
    windows = [config.window if kind == "sliding_attention" else None for kind in kinds]
    mixers = [_attention(config, window=window, rotation=None if window is None else "") for window in windows]
    return [_layer(config, mixer) for mixer in mixers]


def _attention(config: ConfigReader, **settings: Setting) -> SoftmaxAttention:
    return attention(config, bias_key="attention_bias", is_interleaved=True, **settings)


def _layer(config: ConfigReader, mixer: SoftmaxAttention) -> Layer:
    return Layer(config.hidden, mixer, dense(config), _NORMS, is_parallel=True)


COHERE = Family("Cohere", "cohere", _layers, norm="LayerNorm", centers_norms=True, logit_scale_key="logit_scale")
COHERE2 = Family(
    "Cohere2",
    "cohere2",
    _layers_of_cohere2,
    defaults={"sliding_window_pattern": 4},
    norm="LayerNorm",
    centers_norms=True,
    logit_scale_key="logit_scale",
)
