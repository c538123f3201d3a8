"""Nemotron-H and Nemotron 3, whose layers have one part each: Mamba-2, softmax attention without rotations, squared
ReLU, or experts with squared ReLU, which may map latent vectors.

https://arxiv.org/abs/2504.03624, https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..parts import Dense, Layer, Mamba, Norms, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention, dense

_ACTIVATION = "relu2"

# The letters of `hybrid_override_pattern`, and names of earlier versions of transformers.
_KINDS: Mapping[str, str] = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "linear_attention",
    "attention": "full_attention",
}


def _layers(config: ConfigReader) -> Sequence[Layer]:
    before, after = Norms("norm", before_mlp=None), Norms(None, before_mlp="norm")
    mlp = dense(config, name="mixer", activation=_ACTIVATION, has_gate=False, has_bias=config.is_set("mlp_bias"))
    by_kind = {
        "linear_attention": Layer(config.hidden, _mamba(config), None, before),
        "full_attention": Layer(config.hidden, attention(config, rotation=None, name="mixer"), None, before),
        "mlp": Layer(config.hidden, None, mlp, after),
        "moe": Layer(config.hidden, None, _experts(config, mlp), after),
    }
    return [by_kind[kind] for kind in _kinds(config)]


def _kinds(config: ConfigReader) -> Sequence[str]:
    """Returns the kind of each layer as transformers names it now."""
    named = config.names("layers_block_type") or [*str(config.get("hybrid_override_pattern") or "ME*-")]
    return [_KINDS.get(kind, kind) for kind in named]


def _unsupported(config: ConfigReader) -> str | None:
    if others := sorted(set(_kinds(config)).difference(_KINDS.values())):
        return f"{others[0]} layers"
    has_both = config.get("moe_latent_size") is not None and config.is_set("mlp_bias")
    return "mlp_bias and moe_latent_size" if has_both else None


def _experts(config: ConfigReader, mlp: Dense) -> RoutedExperts:
    latent = config.number("moe_latent_size") if config.get("moe_latent_size") is not None else None
    features = config.number("moe_shared_expert_intermediate_size")
    return RoutedExperts(
        hidden=config.hidden,
        num=config.number("n_routed_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=config.number("moe_intermediate_size"),
        latent=latent,
        linears=("up_proj", "down_proj"),
        shared=replace(mlp, features=features, name="mixer.shared_experts"),
        name="mixer",
        module="MoE",
    )


def _mamba(config: ConfigReader) -> Mamba:
    return Mamba(
        hidden=config.hidden,
        heads=config.number("mamba_num_heads"),
        groups=config.number("n_groups"),
        head_dim=config.number("mamba_head_dim"),
        state_dim=config.number("ssm_state_size"),
        kernel=config.number("conv_kernel"),
        conv_bias=config.is_set("use_conv_bias") and config.get("mamba_conv_bias") is not False,
        bias=config.is_set("use_bias"),
        name="mixer",
        module="Mamba2Mixer",
    )


NEMOTRON_H = Family(
    "NemotronH",
    "nemotron_h",
    _layers,
    aliases={
        "layer_types": "layers_block_type",
        "mamba_d_conv": "conv_kernel",
        "mamba_n_groups": "n_groups",
        "num_local_experts": "n_routed_experts",
    },
    unsupported=_unsupported,
    layer="Block",
    last_norm="norm_f",
    embedding_name="embeddings",
    activation=_ACTIVATION,
    activation_key="mlp_hidden_act",
    refused_by_peft="out_proj",
)
