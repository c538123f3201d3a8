"""The fused decoder against transformers' own forward on the same weights: values, gradients, isolation."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainhouse.workers.lora import Adapter, Segment
from trainhouse.workers.models.fused_decoder import fused_trunk
from trainhouse.workers.models.layers import latent_attention
from trainhouse.workers.ops.attention import ATTENTION, Packing, pack_lengths
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model
from trainhouse.workers.shapes.other_models import logit_scale_of
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from ...tiny import (
    DEFAULT_ROPE,
    FAMILY_KINDS,
    KINDS,
    LLAMA3_ROPE,
    LONG_ROPE,
    MORE_KINDS,
    PLAIN_KINDS,
    TINY_SHAPE,
    tiny_config,
)
from ..adapted import LENGTHS, Adapted, Dtype, relative_error, sequences

SHAPE: dict[str, Any] = TINY_SHAPE | {"head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
ROPE_BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    **{kind: lambda kind=kind: tiny_config(kind) for kind in (*KINDS, *MORE_KINDS, *FAMILY_KINDS, *PLAIN_KINDS)},
    "llama": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "llama with scaled rotation": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "mistral with a window": lambda: MistralConfig(**SHAPE, sliding_window=3),
    "qwen2 with windows": lambda: Qwen2Config(
        **{name: value for name, value in SHAPE.items() if name != "head_dim"},
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=1,
    ),
    "qwen3 with yarn": lambda: tiny_config("qwen3", rope_parameters=YARN),
    "afmoe without a scaled embedding": lambda: tiny_config("afmoe", mup_enabled=False),
    "phi3 with partial rotation": lambda: tiny_config("phi3", partial_rotary_factor=0.75, head_dim=16),
    "phi3 with rotations for long contexts": lambda: tiny_config("phi3", rope_parameters=LONG_ROPE),
    "phimoe with plain rotations": lambda: tiny_config("phimoe", rope_parameters=DEFAULT_ROPE, sliding_window=None),
    "gemma3 with scaled rotation": lambda: tiny_config("gemma3", rope_parameters=ROPE_BY_KIND),
    "mamba without a norm": lambda: tiny_config("falcon_h1", mamba_rms_norm=False),
    "mamba with the norm before the gate": lambda: tiny_config(
        "falcon_h1", mamba_norm_before_gate=True, mamba_n_groups=1
    ),
    "mamba without a bias": lambda: tiny_config("granite4", mamba_conv_bias=False, position_embedding_type="rope"),
    "mamba with biases": lambda: tiny_config("granite4", mamba_proj_bias=True, attention_bias=True),
    "mamba with a lower limit of time": lambda: tiny_config("nemotron_h", time_step_min=0.9, mlp_bias=True),
    "nemotron without biases": lambda: tiny_config("nemotron", attention_bias=False, mlp_bias=False),
    "stablelm with plain attention": lambda: tiny_config("stablelm", use_qkv_bias=False, qk_layernorm=False),
    "stablelm with parts in turn": lambda: tiny_config("stablelm", use_parallel_residual=False),
}

DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma3")


def random_model(config: PreTrainedConfig, directory: Path, dtype: Dtype = "float32") -> Adapted:
    """Returns a model whose norms and biases are random, too."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "sinks")):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.add_(0.1 * torch.randn_like(buffer))
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return Adapted(directory, dtype)


def packed(lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor, Packing]:
    """Returns the tokens, positions and packing of sequences."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return torch.cat(sequences(lengths)), positions, Packing(pack_lengths(lengths))


def transformers_forward(bench: Adapted, tokens: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    trunk: Any = bench.base.trunk
    output = trunk(input_ids=tokens[None], position_ids=positions[None], use_cache=False, packing=packing)
    return output.last_hidden_state[0] * logit_scale_of(bench.base.config)


def fused_forward(bench: Adapted, tokens: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    assert fused_trunk(bench.base.trunk, bench.base.shape) is not None
    return bench.base.hidden_states(tokens, positions, packing)


def run(
    forward: Callable[..., Tensor], bench: Adapted, adapter: Adapter, lengths: list[int] = LENGTHS
) -> tuple[Tensor, Tensor]:
    """Returns the hidden states, and the gradient that backward leaves in the adapter's scratch."""
    adapter.gradients.begin_operation()
    tokens, positions, packing = packed(lengths)
    with bench.lora.applied([Segment(0, len(tokens), adapter)]):
        hidden = forward(bench, tokens, positions, packing)
        hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5)).to(hidden.dtype))
    return hidden.detach().float(), adapter.gradients.scratch.clone()


def run_alone(bench: Adapted, adapter: Adapter, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Returns the same of transformers' modules with their own attention, which run each sequence by itself."""
    adapter.gradients.begin_operation()
    bench.base.model.set_attn_implementation("eager")
    found = []
    for tokens in sequences(lengths):
        with bench.lora.applied([Segment(0, len(tokens), adapter)]):
            trunk: Any = bench.base.trunk
            found.append(trunk(input_ids=tokens[None], use_cache=False).last_hidden_state[0])
    found = [each * logit_scale_of(bench.base.config) for each in found]
    bench.base.model.set_attn_implementation(ATTENTION)
    hidden = torch.cat(found)
    hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5)).to(hidden.dtype))
    return hidden.detach().float(), adapter.gradients.scratch.clone()


@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_run_as_each_alone_in_transformers(name: str, tmp_path: Path) -> None:
    bench = random_model(CONFIGS[name](), tmp_path)
    adapter = bench.create("a", train_mlp=not bench.base.experts)
    found, wanted = run(fused_forward, bench, adapter), run_alone(bench, adapter)
    # Gemma 4 does not divide scores by the root of the heads' size, so that their rounding weighs more.
    tolerance = 2e-5 if name.startswith("gemma4") else 8e-6
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < tolerance
        assert relative_error(one * (1 + 2.5 * tolerance), other) > tolerance
    shape = bench.base.shape
    assert isinstance(shape, ModelShape)
    if len(shape.attentions) < len(shape.mixers):
        # Transformers' modules carry the states of other mixers from one sequence of a row into the next.
        leaking = run(transformers_forward, bench, adapter)
        assert relative_error(leaking[0], wanted[0]) > 1e-2


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_tokens_that_an_indexer_leaves_out_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    lengths, layers = [37, 60, 3, 8, 20], {"num_hidden_layers": 3}
    layers |= {"indexer_types": ["full", "shared", "full"]} if kind == "glm_moe_dsa" else {}
    bench = random_model(tiny_config(kind, index_topk=8, **layers), tmp_path / "few")
    adapter = bench.create("a", train_mlp=False)
    found, wanted = run(fused_forward, bench, adapter, lengths), run_alone(bench, adapter, lengths)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < 5e-6
        assert relative_error(one * (1 + 1e-5), other) > 5e-6
    # The control: the same weights, with attention to all tokens.
    bench = random_model(tiny_config(kind, index_topk=64, **layers), tmp_path / "all")
    plain = run(fused_forward, bench, bench.create("a", train_mlp=False), lengths)
    assert all(relative_error(one, other) > 0.05 for one, other in zip(plain, wanted, strict=True))


def test_the_check_at_load_finds_a_wrong_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("deepseek_v32", index_topk=256)
    random_model(config, tmp_path)
    right = latent_attention.choose
    monkeypatch.setattr(latent_attention, "choose", lambda queries, key, *rest: right(queries, -key, *rest))
    with pytest.raises(ValueError, match=r"sequences that share a pass are 0\.\d+ of their spread"):
        random_model(config, tmp_path)


def test_bfloat16_errors_are_no_larger_than_those_of_transformers(tmp_path: Path) -> None:
    """Compares averages, because the rounding of a single model is chance."""
    ratios = [ratio for name in DENSE for ratio in error_ratios(name, tmp_path / name)]
    assert sum(ratios) / len(ratios) < 1.05
    assert max(ratios) < 1.5


def test_float32_router_keeps_the_dtype_of_the_base(tmp_path: Path) -> None:
    random_model(CONFIGS["mixtral"](), tmp_path)
    bench, (tokens, positions, packing) = Adapted(tmp_path, "bfloat16"), packed()
    with bench.lora.applied([Segment(0, len(tokens), bench.create("a", train_mlp=False))]):
        found = fused_forward(bench, tokens, positions, packing)
        wanted = transformers_forward(bench, tokens, positions, packing)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert relative_error(found.float(), wanted.float()) < 0.05


def error_ratios(name: str, directory: Path) -> list[float]:
    """Returns our bfloat16 errors as multiples of transformers', for hidden states and gradients."""
    exact, bench = random_model(CONFIGS[name](), directory), Adapted(directory, "bfloat16")
    for parameter, rounded in zip(exact.base.trunk.parameters(), bench.base.trunk.parameters(), strict=True):
        parameter.data.copy_(rounded)
    exact_adapter, adapter = exact.create("a"), bench.create("a")
    exact_adapter.weights.copy_(exact_adapter.weights.bfloat16())
    wanted = run(transformers_forward, exact, exact_adapter)
    ours, theirs = (run(forward, bench, adapter) for forward in (fused_forward, transformers_forward))
    errors = [(relative_error(a, b), relative_error(c, b)) for a, b, c in zip(ours, wanted, theirs, strict=True)]
    # Control: half the digits of bfloat16 would fail.
    assert all(relative_error(a.to(torch.float8_e4m3fn).float(), b) > 0.02 for a, b in zip(ours, wanted, strict=True))
    return [one / other for one, other in errors]


@pytest.mark.parametrize("name", ["mistral with a window", "qwen3"])
def test_nonfinite_sequence_leaves_the_others_unchanged(name: str, tmp_path: Path) -> None:
    bench = random_model(CONFIGS[name](), tmp_path)
    adapters = [bench.create(str(i)) for i in range(len(LENGTHS))]
    tokens, positions, packing = packed()
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    segments = [Segment(end - n, end, adapter) for n, end, adapter in zip(LENGTHS, ends, adapters, strict=True)]

    def states_and_gradients() -> list[Tensor]:
        for adapter in adapters:
            adapter.gradients.begin_operation()
        with bench.lora.applied(segments):
            hidden = bench.base.hidden_states(tokens, positions, packing)
            hidden.backward(torch.ones_like(hidden))
        return [*hidden.detach().split(LENGTHS), *(adapter.gradients.scratch.clone() for adapter in adapters)]

    before = states_and_gradients()
    adapters[1].weights.fill_(math.nan)
    after = states_and_gradients()
    for i in (0, 2, 3, 5):
        assert torch.equal(before[i], after[i])
    assert after[1].isnan().any() and after[4].isnan().any()


def test_merged_projections_match_and_share_their_weights(tmp_path: Path) -> None:
    bench = random_model(CONFIGS["qwen2"](), tmp_path)
    adapter = bench.create("a")
    attention: Any = bench.base.trunk.get_submodule("layers.0.self_attn")
    storages = {attention.get_submodule(f"{kind}_proj").weight.untyped_storage().data_ptr() for kind in "qkv"}
    assert len(storages) == 1
    tokens, positions, packing = packed()
    with bench.lora.applied([Segment(0, len(tokens), adapter)]):
        apart = bench.base.hidden_states(tokens, positions, packing)
        with torch.no_grad():
            merged = bench.base.hidden_states(tokens, positions, packing)
    assert relative_error(merged, apart) < 1e-6


def test_without_adapters_no_graph_is_kept(tmp_path: Path) -> None:
    bench = random_model(CONFIGS["llama"](), tmp_path)
    tokens, positions, packing = packed()
    hidden = bench.base.hidden_states(tokens, positions, packing)
    assert not hidden.requires_grad
    with bench.lora.applied([Segment(0, len(tokens), bench.create("a", train_attn=False))]):
        assert bench.base.hidden_states(tokens, positions, packing).requires_grad


@pytest.mark.parametrize(
    "alter",
    [
        lambda trunk: trunk.layers[1].mlp.register_forward_hook(lambda *_: None),
        lambda trunk: setattr(trunk.layers[0], "input_layernorm", nn.LayerNorm(64)),
        lambda trunk: setattr(trunk.layers[0].mlp, "forward", lambda x: x),
        lambda trunk: setattr(trunk.layers[0].mlp.config, "hidden_act", "gelu"),
        lambda trunk: setattr(trunk.rotary_emb, "rope_type", "axial"),
    ],
)
def test_altered_model_is_not_fused(alter: Callable[[Any], object]) -> None:
    trunk: Any = AutoModelForCausalLM.from_config(tiny_config("qwen3")).base_model
    assert fused_trunk(trunk, describe_model("m", trunk.config.to_dict())) is not None
    alter(trunk)
    assert fused_trunk(trunk, describe_model("m", trunk.config.to_dict())) is None


def test_other_families_run_unfused(tmp_path: Path) -> None:
    bench = random_model(tiny_config("cohere_compass"), tmp_path)
    assert fused_trunk(bench.base.trunk, bench.base.shape) is None
    adapter = bench.create("a")
    tokens, positions, packing = packed()
    with torch.no_grad(), bench.lora.applied([Segment(0, len(tokens), adapter)]):
        found = bench.base.hidden_states(tokens, positions, packing)
        assert torch.equal(found, transformers_forward(bench, tokens, positions, packing))
