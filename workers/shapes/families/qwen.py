"""Qwen2 (https://arxiv.org/abs/2407.10671), with biases of queries, keys and values and windows in some layers, and
Qwen3 (https://arxiv.org/abs/2505.09388), with norms of each head; both dense and sparse. Qwen2-MoE has a gated part for
all tokens, too."""

from collections.abc import Sequence

from ..parts import Dense, Layer, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _windows(config: ConfigReader) -> list[int | None]:
    """Returns the window of each layer: those that `layer_types` names have one, or those from some layer on."""
    kinds, first = config.names("layer_types"), config.number("max_window_layers", at_least=0)
    has_window = [kind == "sliding_attention" for kind in kinds] if kinds else []
    has_window = has_window or [number >= first for number in range(config.num_layers)]
    return [config.window if each else None for each in has_window]


def _layers_of_qwen2(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config)
    return [Layer(config.hidden, attention(config, qkv_bias=True, window=each), of_all) for each in _windows(config)]


def _layers_of_qwen2_moe(config: ConfigReader) -> Sequence[Layer]:
    first, shared = config.number("max_window_layers", at_least=0), config.number("shared_expert_intermediate_size")
    has_window = [kind == "sliding_attention" for kind in config.names("layer_types") or ()]
    has_window = has_window or [number % 2 == 0 and number < first for number in range(config.num_layers)]
    windows, has_bias = [config.window if each else None for each in has_window], config.is_set("qkv_bias")
    of_shared, of_dense = Dense(hidden=config.hidden, features=shared, name="mlp.shared_expert"), dense(config)
    num = config.number("num_experts", at_least=0)
    experts = _experts(config, num, of_shared, gates_shared=True)
    parts = [experts if is_sparse else of_dense for is_sparse in _are_sparse(config, num)]
    mixers = [attention(config, qkv_bias=has_bias, window=each) for each in windows]
    return [Layer(config.hidden, *each) for each in zip(mixers, parts, strict=True)]


def _layers_of_qwen3(config: ConfigReader) -> Sequence[Layer]:
    of_all = dense(config)
    mixers = [
        attention(config, bias_key="attention_bias", norms_heads="each", window=each) for each in _windows(config)
    ]
    return [Layer(config.hidden, mixer, of_all) for mixer in mixers]


def _layers_of_qwen3_moe(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, bias_key="attention_bias", norms_heads="each", window=config.window)
    num = config.number("num_local_experts", at_least=0)
    of_layers = _are_sparse(config, num)
    sparse = Layer(config.hidden, mixer, _experts(config, num)) if any(of_layers) else None
    plain = Layer(config.hidden, mixer, dense(config))
    return [sparse if is_sparse and sparse else plain for is_sparse in of_layers]


def _are_sparse(config: ConfigReader, num: int) -> Sequence[bool]:
    """Returns for each layer whether it has `num` experts."""
    of_dense, step = config.numbers("mlp_only_layers"), config.number("decoder_sparse_step")
    return [num > 0 and i not in of_dense and (i + 1) % step == 0 for i in range(config.num_layers)]


def _experts(config: ConfigReader, num: int, shared: Dense | None = None, gates_shared: bool = False) -> RoutedExperts:
    return RoutedExperts(
        hidden=config.hidden,
        num=num,
        per_token=config.number("num_experts_per_tok"),
        features=config.number("moe_intermediate_size"),
        shared=shared,
        gates_shared=gates_shared,
    )


QWEN2 = Family("Qwen2", "qwen2", _layers_of_qwen2)
QWEN2_MOE = Family("Qwen2Moe", "qwen2_moe", _layers_of_qwen2_moe)
QWEN3 = Family("Qwen3", "qwen3", _layers_of_qwen3)
QWEN3_MOE = Family(
    "Qwen3Moe",
    "qwen3_moe",
    _layers_of_qwen3_moe,
    defaults={"max_window_layers": 28, "layer_types": None},
    aliases={"num_experts": "num_local_experts"},
)
