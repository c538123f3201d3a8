"""A config.json is read as transformers reads it, including the defaults of what it leaves out."""

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import try_to_load_from_cache
from trainhouse.schemas.adapters.model_files import model_directory
from trainhouse.workers.models.stored.text_parts import text_config_of
from trainhouse.workers.protocol.worker_config import ServedModel
from trainhouse.workers.shapes.layouts.parameters import num_parameters
from trainhouse.workers.shapes.model_shape import (
    ModelShape,
    Rope,
    describe_model,
    longest_context,
    read_model,
    refusal_of,
)
from trainhouse.workers.shapes.other_models import TEXT_PARTS
from trainhouse.workers.shapes.parts import Dense, GatedDelta, LatentAttention, Mamba, RoutedExperts, SoftmaxAttention
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ..lineup import LINEUP
from ..models.tiny_types import OWN

CONFIGS = Path(__file__).parents[1] / "configs"

# No value equals a default.
WHOLE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 777,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 50,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
}
NEEDED = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
CHANGED = [
    {},
    {"max_window_layers": 6},
    {"layer_types": ["full_attention"] * 6},
    {"layer_types": [*["full_attention"] * 5, "sliding_attention"]},
    {"sliding_window": None},
    {"mlp_only_layers": None},
    {"num_experts": 0},
    {"layer_types": [*["linear_attention"] * 2, *["full_attention"] * 4]},
    {"first_k_dense_replace": 2},
    {"q_lora_rank": None},
    {"n_routed_experts": 8, "n_shared_experts": 2},
]
OMITTED = [("use_sliding_window", "sliding_window"), *((key,) for key in WHOLE if key not in NEEDED)]


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    shape = describe_model("m", config)
    assert isinstance(shape, ModelShape)
    return shape


@pytest.mark.parametrize("omitted", OMITTED, ids="-".join)
@pytest.mark.parametrize("model_type", OWN)
def test_omitted_values_default_as_in_transformers(model_type: str, omitted: tuple[str, ...]) -> None:
    compare(model_type, {key: value for key, value in WHOLE.items() if key not in omitted})


@pytest.mark.parametrize("changed", CHANGED, ids=str)
@pytest.mark.parametrize("model_type", OWN)
@pytest.mark.filterwarnings("ignore")
def test_given_values_are_read_as_in_transformers(model_type: str, changed: dict[str, Any]) -> None:
    compare(model_type, WHOLE | changed)


HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Names of numbers of experts, of those that a token uses, and of features.
NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts")
PER_TOKEN = ("moe_topk", "moe_k", "num_experts_per_tok")
FEATURES = ("moe_intermediate_size", "intermediate_size")
# Families whose heads make up the hidden size.
SQUARE = ("helium", "olmoe", "stablelm")
INDEXED = ("deepseek_v32", "glm_moe_dsa")
LATENT = ("deepseek_v3", "glm4_moe_lite", "mistral4", "sarvam_mla", *INDEXED)
# What families with Mamba-2 need in addition.
OF_MAMBA: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"mamba_n_heads": 24},
    "falcon_h1": {"mamba_n_heads": 24, "mamba_d_ssm": 192, "attention_bias": False, "mlp_bias": False},
    "bamba": {"mamba_n_heads": 24, "attn_layer_indices": [1, 4]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 40,
        "mlp_bias": False,
    },
}


def compare(model_type: str, given: dict[str, Any]) -> None:
    kinds = set(given.get("layer_types", ()))
    if kinds & {"sliding_attention" if model_type in (*HYBRIDS, *OF_MAMBA) else "linear_attention"}:
        pytest.skip("layers of another family")
    if model_type in OF_MAMBA:
        if kinds and model_type != "granitemoehybrid":
            pytest.skip("layers of another family")
        given = given | OF_MAMBA[model_type]
    may_be_dense = model_type in ("mixtral", "qwen3_moe", "qwen3_next")
    if has_experts(model_type) and not may_be_dense and not given.get("num_experts", 1):
        pytest.skip("a sparse model without experts")
    if model_type == "dots1" and not {"n_shared_experts", "n_routed_experts", "num_experts_per_tok"} <= given.keys():
        pytest.skip("transformers has no defaults for these")
    if model_type == "llama4_text":
        if "sliding_attention" in kinds:
            pytest.skip("layers of another family")
        given = given | {"num_experts_per_tok": 1}
    if model_type == "iquestcoder":  # it refuses windows
        if "sliding_attention" in kinds:
            pytest.skip("layers of another family")
        given = given | {"use_sliding_window": False}
    if model_type in SQUARE:
        given = given | {"head_dim": given["hidden_size"] // given["num_attention_heads"]}
    if model_type == "internlm3" and not {"attention_bias", "mlp_bias"} <= given.keys():
        pytest.skip("transformers refuses one of the biases without the other")
    if model_type == "laguna" and given.get("sliding_window", 0) is None:
        pytest.skip("transformers needs a number")
    if model_type in ("exaone4", "exaone_moe") and given.get("sliding_window", 0) is None and not kinds:
        pytest.skip("transformers divides by zero")
    if model_type in INDEXED and given.get("q_lora_rank", 0) is None:
        pytest.skip("transformers needs the latent queries")
    if model_type == "sarvam_moe" and "n_routed_experts" in given:  # another name of the same
        given = {key: value for key, value in given.items() if key != "num_experts"}
    if model_type in LATENT:  # other names of theirs for the features that rotate, and for experts
        given = {key: value for key, value in given.items() if key not in ("head_dim", "num_experts")}
        given = given | {"num_key_value_heads": given["num_attention_heads"]}
    if model_type in ("gemma4_text", "ministral", "cwm", "kolibri1") and given.get("sliding_window", 0) is None:
        pytest.skip("transformers needs a window")
    theirs = AutoConfig.for_model(model_type, **given)
    ours = shape_of({"model_type": model_type, **given})
    (compare_gemma4 if model_type == "gemma4_text" else compare_mixers)(ours, theirs)
    assert (ours.hidden, ours.vocab) == (theirs.hidden_size, theirs.vocab_size)
    dense = {layer.feed_forward.features for layer in ours.layers if isinstance(layer.feed_forward, Dense)}
    whole = getattr(theirs, "intermediate_size_mlp", theirs.intermediate_size)
    assert dense <= {getattr(theirs, "shared_intermediate_size", whole)}
    assert (ours.num_layers, ours.tied_embeddings, ours.max_positions) == (
        theirs.num_hidden_layers,
        theirs.tie_word_embeddings,
        theirs.max_position_embeddings,
    )
    assert windows_of(ours) == expected_windows(model_type, theirs)
    compare_experts(model_type, ours, theirs)


def compare_mixers(ours: ModelShape, theirs: Any) -> None:
    # Not every config has these attributes.
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    kv_heads = theirs.num_key_value_heads or theirs.num_attention_heads
    rope = getattr(theirs, "rope_parameters", None) or {}
    for mixer in ours.mixers:
        if isinstance(mixer, SoftmaxAttention):
            assert (mixer.heads, mixer.kv_heads, mixer.head_dim) == (theirs.num_attention_heads, kv_heads, head_dim)
            has_rotations = theirs.model_type not in ("granitemoehybrid", "nemotron_h")
            rotated = rope.get(mixer.rotation or "", rope).get("partial_rotary_factor", 1.0)
            assert mixer.rotary_dim == int(head_dim * rotated)
            assert has_rotations or mixer.rotation is None
        elif isinstance(mixer, LatentAttention):
            assert (mixer.heads, mixer.query_rank) == (theirs.num_attention_heads, theirs.q_lora_rank)
            assert (mixer.kv_rank, mixer.value_dim) == (theirs.kv_lora_rank, theirs.v_head_dim)
            assert (mixer.plain_dim, mixer.rotary_dim) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
        elif isinstance(mixer, GatedDelta):
            assert (mixer.key_heads, mixer.value_heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
            assert (mixer.key_dim, mixer.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
            assert mixer.kernel == theirs.linear_conv_kernel_dim
        else:
            compare_mamba(mixer, theirs)
    recurrent = GatedDelta | Mamba
    kinds = [isinstance(layer.mixer, recurrent) and layer.second_mixer is None for layer in ours.layers]
    assert kinds == [kind == "linear_attention" for kind in getattr(theirs, "layer_types", None) or [""] * len(kinds)]


@pytest.mark.parametrize("shares_values", [False, True])
def test_gemma4_is_read_from_configs_of_releases_and_of_transformers(shares_values: bool) -> None:
    given = {"model_type": "gemma4_text", **WHOLE, "attention_k_eq_v": shares_values, "num_global_key_value_heads": 6}
    given |= {"global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    given |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2}
    theirs = AutoConfig.for_model(**given)
    ours, again = shape_of(given), shape_of(theirs.to_dict())
    compare_gemma4(ours, theirs)
    assert ours.layers == again.layers and ours.other_weights == again.other_weights
    assert ours.attending_layers == [0, 1, 2, 3, 1, 1]  # the last layer always sees all tokens
    assert [getattr(layer.feed_forward, "features", 0) for layer in ours.layers] == [160] * 4 + [320] * 2
    assert shape_of(given | {"global_head_dim": 64}).layers != ours.layers
    of_one_size = given | {"global_head_dim": WHOLE["head_dim"], "attention_k_eq_v": False}
    theirs = AutoConfig.for_model(**of_one_size)
    assert shape_of(of_one_size).layers == shape_of(theirs.to_dict()).layers != ours.layers


def test_experts_of_gemma4_are_those_of_its_release() -> None:
    shape = shape_of(LINEUP["gemma-4-26B-A4B"])
    experts = shape.experts
    assert experts is not None and (experts.num, experts.per_token, experts.features) == (128, 8, 704)
    assert experts.shared is not None and experts.shared.features == 2112
    assert round(num_parameters(shape) / 1e8) == 252  # as published


@pytest.mark.parametrize(("name", "gibibytes"), [("Granite-4.0-H-Small", 59.99), ("Granite-4.0-H-Tiny", 12.93)])
def test_granite_models_are_as_large_as_their_files(name: str, gibibytes: float) -> None:
    shape, wanted = shape_of(LINEUP[name]), pytest.approx(gibibytes, rel=1e-3)
    assert 2 * num_parameters(shape) / 2**30 == wanted
    assert 2 * num_parameters(replace(shape, layers=shape.layers[1:])) / 2**30 != wanted


def compare_gemma4(ours: ModelShape, theirs: Any) -> None:
    for number, layer in enumerate(ours.layers):
        mixer, of_layer = layer.mixer, theirs.per_layer_config[number]
        assert isinstance(mixer, SoftmaxAttention)
        assert (mixer.heads, mixer.head_dim) == (theirs.num_attention_heads, of_layer.head_dim)
        assert (mixer.kv_heads, mixer.rotary_dim) == (of_layer.num_key_value_heads, of_layer.head_dim)
        assert mixer.rotation == theirs.layer_types[number]
    assert {layer.token_input for layer in ours.layers} == {theirs.hidden_size_per_layer_input}


def compare_mamba(mixer: Any, theirs: Any) -> None:
    if theirs.model_type == "nemotron_h":
        heads, groups, states = theirs.mamba_num_heads, theirs.n_groups, theirs.ssm_state_size
        head_dim, kernel = theirs.mamba_head_dim, theirs.conv_kernel
    else:
        heads, groups, states = theirs.mamba_n_heads, theirs.mamba_n_groups, theirs.mamba_d_state
        head_dim, kernel = theirs.mamba_d_head, theirs.mamba_d_conv
    assert (mixer.heads, mixer.groups, mixer.state_dim) == (heads, groups, states)
    assert (mixer.head_dim, mixer.kernel) == (head_dim, kernel)


def compare_experts(model_type: str, ours: ModelShape, theirs: Any) -> None:
    sparse = [i for i, layer in enumerate(ours.layers) if isinstance(layer.feed_forward, RoutedExperts)]
    experts = ours.experts
    if model_type == "mixtral" and theirs.num_experts:
        assert sparse == list(range(6)) and experts is not None
        assert (experts.num, experts.per_token) == (theirs.num_local_experts, theirs.num_experts_per_tok)
        assert experts.features == theirs.intermediate_size
    elif model_type in ("qwen3_moe", "qwen3_next") and theirs.num_experts:
        layers = (i for i in range(6) if i not in theirs.mlp_only_layers and (i + 1) % theirs.decoder_sparse_step == 0)
        assert sparse == list(layers) and experts is not None
        assert (experts.num, experts.per_token) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert experts.features == theirs.moe_intermediate_size
    elif model_type == "qwen3_5_moe_text" and theirs.num_experts:
        assert sparse == list(range(6)) and experts is not None and experts.num == theirs.num_experts
        assert experts.shared is not None and experts.shared.features == theirs.shared_expert_intermediate_size
    elif model_type == "gpt_oss":
        assert sparse == list(range(6)) and experts is not None
        assert (experts.num, experts.per_token) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    elif model_type in LATENT:
        num_dense = 1 if model_type == "glm4_moe_lite" else theirs.first_k_dense_replace
        assert sparse == list(range(num_dense, 6)) and experts is not None
        assert (experts.num, experts.per_token) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
    elif model_type == "nemotron_h":
        assert sparse == [3, 5] and experts is not None and experts.shared is not None
        assert (experts.num, experts.per_token) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
        assert (experts.features, experts.latent) == (theirs.moe_intermediate_size, theirs.moe_latent_size)
        assert experts.shared.features == theirs.moe_shared_expert_intermediate_size
    elif model_type == "llama4_text":
        assert sparse == theirs.moe_layers and experts is not None
        assert (experts.num, experts.features) == (theirs.num_local_experts, theirs.intermediate_size)
        of_kinds = {"chunked_attention": theirs.attention_chunk_size, "full_attention": None}
        mixers: list[Any] = [layer.mixer for layer in ours.layers]
        assert [mixer.part_size for mixer in mixers] == [of_kinds[kind] for kind in theirs.layer_types]
        assert [mixer.rotation is not None for mixer in mixers] == list(map(bool, theirs.no_rope_layers))
    elif model_type == "phimoe":
        assert sparse == list(range(6)) and experts is not None
        # Its router chooses two in any case.
        assert (experts.num, experts.per_token, experts.features) == (theirs.num_local_experts, 2, 160)
    elif has_experts(model_type) and getattr(theirs, "num_experts", 1):
        assert sparse and experts is not None
        assert (experts.num, experts.per_token) == (first_of(theirs, *NUM_EXPERTS), first_of(theirs, *PER_TOKEN))
        assert experts.features == first_of(theirs, *FEATURES)
    else:
        assert experts is None and not sparse


def test_earlier_names_of_nemotron_are_read_as_in_transformers() -> None:
    earlier = {"hybrid_override_pattern": "M*E-M", "mamba_n_groups": 4, "mamba_d_conv": 5, "mamba_conv_bias": False}
    for given in (earlier, {}):
        theirs: Any = AutoConfig.for_model("nemotron_h", **given)
        ours = shape_of({"model_type": "nemotron_h", **given})
        assert ours.layers == shape_of(theirs.to_dict()).layers and len(ours.layers) == theirs.num_hidden_layers
        (mamba,) = (mixer for mixer in ours.mixers if isinstance(mixer, Mamba))
        wanted = theirs.n_groups, theirs.conv_kernel, theirs.use_conv_bias
        assert (mamba.groups, mamba.kernel, mamba.conv_bias) == wanted


def has_experts(model_type: str) -> bool:
    fields = fields_of(CONFIG_MAPPING[model_type])
    return not fields.isdisjoint(NUM_EXPERTS) and not fields.isdisjoint(PER_TOKEN)


def fields_of(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def first_of(config: Any, *names: str) -> Any:
    """Returns the value of the first name that the type of the config has."""
    known = fields_of(type(config))
    return next(getattr(config, name) for name in names if name in known)


def windows_of(shape: ModelShape) -> list[int | None]:
    return [layer.mixer.window if isinstance(layer.mixer, SoftmaxAttention) else None for layer in shape.layers]


def expected_windows(model_type: str, theirs: Any) -> list[int | None]:
    fields, kinds = fields_of(type(theirs)), getattr(theirs, "layer_types", None)
    if "sliding_window" not in fields or model_type == "nemotron_h":  # transformers ignores that of Nemotron-H
        return [None] * theirs.num_hidden_layers
    window = theirs.sliding_window
    if "layer_types" not in fields:
        return [window] * theirs.num_hidden_layers
    if kinds is None:
        return [None] * theirs.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds or ()]


@pytest.mark.parametrize(
    ("name", "billions", "positions"),
    [
        ("Qwen3-30B-A3B", 30_532_122_624, 40960),
        ("Qwen3-30B-A3B-YaRN", 30_532_122_624, 131072),
        ("Llama-3.1-8B", 8_030_261_248, 131072),
        ("Llama-3.1-70B", 70_553_706_496, 131072),
    ],
)
def test_public_models_have_their_known_parameter_counts(name: str, billions: int, positions: int) -> None:
    shape = read_model(ServedModel(name, str(CONFIGS / f"{name}.json")))
    assert isinstance(shape, ModelShape)
    assert num_parameters(shape) == billions
    assert shape.max_positions == positions


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDING = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("llama", {"rope_type": "default"}),
    "linear": ("llama", {"rope_type": "linear", "factor": 2.0}),
    "dynamic": ("llama", {"type": "dynamic", "factor": 2}),
    "yarn": ("qwen3", {"type": "yarn", "factor": 2.0}),
    "llama3": ("llama", LLAMA3),
    "longrope": ("llama", LONGROPE),
    "proportional": ("llama", {"rope_type": "proportional"}),
    "su of Phi-3": ("phi3", LONGROPE | {"rope_type": "su", "original_max_position_embeddings": 16}),
    "su of Llama": ("llama", LONGROPE | {"rope_type": "su"}),
    "yarn of Phi-3": ("phi3", {"rope_type": "yarn", "factor": 2.0}),
    "deepseek_yarn of Llama": ("llama", {"type": "deepseek_yarn", "factor": 2.0}),
    "mrope of Llama": ("llama", {"type": "mrope", "mrope_section": [2, 3, 3]}),
    "ntk": ("qwen3", {"type": "ntk", "factor": 2.0}),
    "our own name": ("llama", {"rope_type": "ntk_alpha", "factor": 2.0, "alpha": 2.0}),
    "null": ("llama", {"rope_type": None}),
    **{f"{kind} without a factor": ("llama", {"type": kind}) for kind in ("linear", "dynamic", "yarn", "longrope")},
    **{f"{kind} by a text": ("qwen3", {"type": kind, "factor": "2"}) for kind in ("linear", "dynamic", "yarn")},
    **{f"{kind} by null": ("qwen3", {"type": kind, "factor": None}) for kind in ("linear", "dynamic", "yarn")},
    **{f"llama3 without {key}": ("llama", {name: LLAMA3[name] for name in LLAMA3 if name != key}) for key in LLAMA3},
    "linear of some layers": ("gemma3_text", {"full_attention": {"rope_type": "linear", "factor": 2.0}} | SLIDING),
    "ntk of some layers": ("gemma3_text", {"full_attention": {"rope_type": "ntk", "factor": 2.0}} | SLIDING),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rotations_are_refused_that_transformers_does_not_compute(name: str) -> None:
    model_type, scaling = SCALINGS[name]
    config = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config |= {"num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
    config |= {"rope_scaling": scaling}
    if model_type == "gemma3_text":
        config["rope_parameters"] = config.pop("rope_scaling")
        config |= {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    config |= {"head_dim": 16} if model_type != "phi3" else {"original_max_position_embeddings": 16}
    try:
        settings = AutoConfig.for_model(model_type, **copy.deepcopy(config))
        AutoModelForCausalLM.from_config(settings)
        is_computed = True
    except Exception:
        is_computed = False
    refusal = refusal_of({"model_type": model_type, **config})
    assert (refusal is None) == is_computed, refusal
    assert refusal is None or "RoPE scaling" in refusal


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 1000),
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"type": "linear", "factor": 2.5}, 2500),
        ({"rope_type": "linear", "factor": 0.5}, 1000),
        ({"rope_type": "linear", "factor": float("inf")}, 1000),
        ({"rope_type": "dynamic", "factor": 4.0}, 4000),
        ({"rope_type": "proportional"}, 1000),
        ({"rope_type": "proportional", "factor": 2.0}, 2000),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 800}, 3200),
        ({"rope_type": "yarn", "factor": 2.0}, 2000),
        (LLAMA3 | {"original_max_position_embeddings": 500}, 1000),
        (LONGROPE | {"original_max_position_embeddings": 250}, 1000),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_longest_context_follows_rope_scaling(key: str, rope: dict[str, Any] | None, longest: int) -> None:
    shape = shape_of({"model_type": "llama", **WHOLE, "max_position_embeddings": 1000, key: rope})
    assert shape.max_positions == longest
    assert shape.rope.kind in str(shape.rope) or shape.rope == Rope()


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        # Gemma 3 gives its whole context, which its factor has already extended.
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 1000),
        # The rotations of this type do not grow with the sequence.
        ({"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 2.0}}, 1000),
        ({"model_type": "persimmon", "rope_scaling": {"type": "linear", "factor": 2.0}}, 2000),
        # Its modules would rotate all sequences of a batch as the longest.
        ({"model_type": "persimmon", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1000),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            4000,
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 4.0}}},
            1000,
        ),
    ],
)
def test_longest_context_of_some_types(config: dict[str, Any], longest: int) -> None:
    assert describe_model("m", WHOLE | config | {"max_position_embeddings": 1000}).max_positions == longest


def test_image_models_use_the_context_of_their_text_config() -> None:
    text = WHOLE | {"model_type": "gemma3_text", "max_position_embeddings": 500}
    assert describe_model("m", {"model_type": "gemma3", "text_config": text}).max_positions == 500


def test_unknown_context_length_is_none() -> None:
    assert longest_context(None, Rope()) is None
    assert longest_context(None, Rope("yarn", 4.0, 100)) == 400


def test_hub_cache_is_found_like_the_hub_client_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    directory = tmp_path / "models--some--model" / "snapshots" / "abc"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **WHOLE}))
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    found = try_to_load_from_cache("some/model", "config.json", cache_dir=tmp_path)
    assert isinstance(found, str) and model_directory("some/model") == Path(found).parent
    assert read_model(ServedModel("m", "some/model")).model_type == "llama"
    assert model_directory("some/other") is None and model_directory("/some/model") is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layer_types": ["full_attention"] * 5 + ["fancy_attention"]}, "layer_types with 'fancy_attention'"),
        ({"layer_types": ["full_attention"] * 5}, "5 layer_types and num_hidden_layers 6"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000: expected at most 4096"),
        ({"vocab_size": 1 << 40}, "vocab_size 1099511627776: expected at most"),
    ],
)
@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma3_text", "qwen3"])
def test_impossible_layers_are_refused(model_type: str, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shape_of({"model_type": model_type} | WHOLE | changed)


# Those that the config.json of a release names.
RELEASED_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava-1.5-7b-hf": (
        "llava",
        {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
    ),
    "llava-v1.6-mistral-7b-hf": (
        "llava_next",
        {
            "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
            "architectures": ["MistralForCausalLM"],
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "vocab_size": 32064,
        },
    ),
}


def assert_plans_what_ranks_load(config: dict[str, Any], *but: str) -> ModelShape:
    """Compares what is planned from a config.json with what ranks read of the config that transformers completes,
    which is that of the part for text alone."""
    planned = shape_of(config)
    loaded = shape_of(text_config_of(CONFIG_MAPPING[config["model_type"]].from_dict(config)).to_dict())
    names = [each.name for each in dataclasses.fields(planned) if each.name != "left_out"]
    assert [name for name in names if getattr(planned, name) != getattr(loaded, name)] == [*but]
    return planned


@pytest.mark.parametrize("release", RELEASED_TEXTS)
def test_sizes_that_the_text_part_of_a_release_leaves_out_are_those_of_its_type(release: str) -> None:
    model_type, text = RELEASED_TEXTS[release]
    shape = assert_plans_what_ranks_load({"model_type": model_type, "image_token_index": 32000, "text_config": text})
    assert (shape.hidden, shape.num_layers, shape.vocab, shape.heads[0]) == (4096, 32, 32064, 32)
    assert shape.max_positions == text["max_position_embeddings"]


@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_a_text_part_without_sizes_has_the_defaults_of_transformers(model_type: str) -> None:
    """gemma4's default RoPE scaling is only named."""
    but = ["rope"] if model_type in ("gemma4", "gemma4_unified") else []
    text = type(CONFIG_MAPPING[model_type]().get_text_config()).model_type
    assert_plans_what_ranks_load({"model_type": model_type, "text_config": {"model_type": text}}, *but)


@pytest.mark.parametrize("model_type", ["llava", "llava_next", "idefics2", "mistral3"])
@pytest.mark.parametrize("text", ["llama", "mistral", "qwen2", "qwen3"])
def test_defaults_of_a_text_part_are_those_of_the_type_that_it_names(model_type: str, text: str) -> None:
    assert_plans_what_ranks_load({"model_type": model_type, "text_config": {"model_type": text}})


def test_experts_of_a_text_part_may_have_the_other_name() -> None:
    text = {"model_type": "qwen3_vl_moe_text", "num_experts": 128}
    shape = assert_plans_what_ranks_load({"model_type": "qwen3_vl_moe", "text_config": text})
    assert shape.experts is not None and shape.experts.num == 128
