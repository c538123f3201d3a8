"""Falcon-H1, whose layers have Mamba-2 and softmax attention side by side, with factors of both:
https://arxiv.org/abs/2507.22448."""

from collections.abc import Sequence

from ..parts import Layer, Norms
from .config_reader import ConfigReader
from .family import Family, any_set, attention, dense, mamba

_NORMS = Norms(before_mlp="pre_ff_layernorm")


def _layers(config: ConfigReader) -> Sequence[Layer]:
    expanded = config.number("mamba_expand") * config.hidden
    of_gate, of_output = config.fractions("mlp_multipliers", 2)
    inputs = config.fraction("attention_in_multiplier", 1.0)
    softmax = attention(config, score_scale=inputs**2 * config.fraction("key_multiplier", 1.0))
    linear = mamba(
        config,
        config.number("mamba_d_ssm", expanded),
        has_norm=config.is_set("mamba_rms_norm"),
        gates_first=not config.is_set("mamba_norm_before_gate"),
        scales=_scales(config),
    )
    of_mixers = config.fraction("ssm_out_multiplier", 1.0), inputs * config.fraction("attention_out_multiplier", 1.0)
    feed_forward = dense(config, name="feed_forward", gate_scale=of_gate)
    layer = Layer(config.hidden, linear, feed_forward, _NORMS, softmax, scales=(*of_mixers, of_output))
    return [layer] * config.num_layers


def _scales(config: ConfigReader) -> tuple[float, ...]:
    inputs = config.fraction("ssm_in_multiplier", 1.0)
    return tuple(inputs * each for each in config.fractions("ssm_multipliers", 5))


# Multipliers of inputs are applied to outputs, which would multiply biases, too. No release has any.
_BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


FALCON_H1 = Family(
    "FalconH1",
    "falcon_h1",
    _layers,
    unsupported=any_set(*_BIASES),
    refused_by_peft="out_proj",
    logit_scale_key="lm_head_multiplier",
    last_norm="final_layernorm",
    embedding_scale_key="embedding_multiplier",
)
