"""All types of causal language models in transformers: each is refused with a reason, or its packed log-probabilities,
in training and in samples, equal those of transformers' own forward over each sequence alone.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.batch.micro_batch import MicroBatch
from trainhouse.workers.models import loading
from trainhouse.workers.models import model as model_module
from trainhouse.workers.models import packing_checks as plain
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.ops import attention
from trainhouse.workers.ops.attention import pack_lengths
from trainhouse.workers.protocol.calls import OperationPart, OptimizerStep, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.model_shape import describe_model, refusal_of
from trainhouse.workers.shapes.other_models import BY_TRANSFORMERS, TEXT_PARTS
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..adapted import quieten_peft
from ..jobs import answers, job
from .tiny_types import SERVED, default_config, tiny_config_of

REFUSED = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(SERVED) - set(TEXT_PARTS))
# In every run of the tests; each has a feature that no other type has.
CORE = ("afmoe", "exaone_moe", "gpt2", "granitemoehybrid", "nemotron_h", "phimoe", "qwen2_moe")

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = (9, 30, 17)
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "model_type", [each if each in CORE else pytest.param(each, marks=pytest.mark.full) for each in SERVED]
)
def test_served_type_matches_transformers(model_type: str, tmp_path: Path) -> None:
    saved(AutoModelForCausalLM.from_config(tiny_config_of(model_type), dtype=torch.float32), tmp_path)
    assert_matches_transformers(tmp_path)
    base_of(tmp_path, "bfloat16")


def test_text_part_of_an_image_model_matches_transformers(tmp_path: Path) -> None:
    """Covers today's files and those of the releases."""
    today, released = tmp_path / "today", tmp_path / "released"
    model = image_model()
    saved(model, today)
    assert_matches_transformers(today)
    names = {name: released_name(name) for name in model.state_dict()}
    assert {name for name in names.values() if name.startswith("language_model.model.layers.0.")}
    released.mkdir()
    save_renamed(today, released, names)
    assert_matches_transformers(released, reference=today)


def test_adapter_of_a_text_part_fits_the_whole_model(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    adapter.mkdir()
    saved(image_model(), base)
    worker = Worker(WorkerConfig(ServedModel("m", str(base)), device="cpu"))
    data = some_data(128)
    worker.create_run(RunSpec("a", LoraConfig(rank=4, seed=1)))
    for _ in range(2):
        worker.run_pass((OperationPart(0, ForwardBackwardRequest("a", 1, data, "cross_entropy")),))
        worker.apply_steps((OptimizerStep("a", AdamParams(learning_rate=3e-2)),))
    worker.save_run("a", str(adapter), False)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    bare = distance(worker, whole, data, samples=False)
    with warnings.catch_warnings():
        quieten_peft()
        warnings.filterwarnings("ignore", message="Found missing adapter keys.*vision_tower")
        tuned = PeftModel.from_pretrained(whole, adapter).eval()
    assert distance(worker, tuned, data, samples=False) < TOLERANCE < bare


def assert_matches_transformers(directory: Path, reference: Path | None = None) -> None:
    worker = Worker(WorkerConfig(ServedModel("m", str(directory)), device="cpu"))
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        reference or directory, dtype=torch.float32, attn_implementation="eager"
    )
    data = some_data(len(theirs.get_input_embeddings().weight))
    assert distance(worker, theirs.eval(), data) < TOLERANCE
    with torch.no_grad():
        theirs.get_input_embeddings().weight.mul_(1.01)
    # Control: the tolerance detects this.
    assert distance(worker, theirs, data) > TOLERANCE


def distance(worker: Worker, theirs: nn.Module, data: tuple[Datum, ...], samples: bool = True) -> float:
    """Returns the largest difference of log-probabilities.

    They are those of the data's targets, in one pass, and of samples of the base model.
    """
    if "a" not in worker._models:
        worker.create_run(RunSpec("a", LoraConfig(rank=4, seed=1)))
    (output,) = worker.run_pass((OperationPart(0, ForwardBackwardRequest("a", 1, data, "cross_entropy")),))
    assert isinstance(output, ForwardBackwardOutput), output
    jobs = [job(f"{len(each.tokens)}", each.tokens, temperature=0.0, max_tokens=8) for each in data if samples]
    sampled = answers(worker.sample_slice, *jobs)
    found = [
        logprobs(theirs, each.tokens, each.loss_fn_inputs["target_tokens"]) - of_ours["logprobs"]
        for each, of_ours in zip(data, output.loss_fn_outputs, strict=True)
    ]
    for each in jobs:
        answer = sampled[each.job_id]
        assert isinstance(answer, SampleResponse), answer
        (sequence,) = answer.sequences
        whole = np.concatenate([each.prompt, sequence.tokens])
        of_theirs = logprobs(theirs, whole[:-1], whole[1:])[len(each.prompt) - 1 :]
        found.append(of_theirs - np.asarray(sequence.logprobs))
    return max(float(np.abs(each).max()) for each in found)


@torch.no_grad()
def logprobs(model: Any, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Runs transformers' model on this sequence alone."""
    logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    chosen = torch.from_numpy(targets.astype(np.int64))[:, None]
    return logits.float().log_softmax(-1).gather(1, chosen)[:, 0].numpy()


def some_data(vocab_size: int) -> tuple[Datum, ...]:
    random = np.random.default_rng(1)
    rows = [random.integers(3, vocab_size, length + 1) for length in LENGTHS]
    ones = {length: np.ones(length, np.float32) for length in LENGTHS}
    return tuple(
        Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": ones[len(row) - 1]}) for row in rows
    )


def saved(model: Any, directory: Path) -> None:
    """Saves the model with random biases and norms, so that errors in their use are detected.

    The padding's embedding, which transformers makes zero, is random too: an indexer finds all tokens alike for a zero.
    """
    generator = torch.Generator().manual_seed(3)
    buffers = [buffer for name, buffer in model.named_buffers() if "bias" in name or "scalar" in name]
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        if embedding.padding_idx is not None:
            embedding.weight[embedding.padding_idx] = embedding.weight[3].flip(0)
        for each in (*model.parameters(), *buffers):
            if each.ndim <= 1 and each.is_floating_point():
                each.add_(0.1 * torch.randn(each.shape, generator=generator))
    model.save_pretrained(directory)


def image_model() -> Any:
    text = tiny_config_of("gemma3_text").to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=5)
    return Gemma3ForConditionalGeneration(config).float()


def released_name(name: str) -> str:
    """Returns the parameter's name in the files of Gemma 3's releases."""
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.", 1)


# Patterns of parameters' names, with the names in releases; names of a config's fields, with those in releases.
RELEASED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "exaone": (
        {
            r"model\.embed_tokens": "transformer.wte",
            r"model\.layers": "transformer.h",
            r"model\.norm": "transformer.ln_f",
            r"self_attn\.o_proj": "self_attn.out_proj",
            r"self_attn": "attn.attention",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "gate_proj": "c_fc_0",
            "up_proj": "c_fc_1",
            "down_proj": "c_proj",
        },
        {
            "num_hidden_layers": "num_layers",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
    "sarvam_moe": (
        {
            r"model\.embed_tokens": "model.word_embeddings",
            r"self_attn\.o_proj": "attention.dense",
            r"self_attn\.q_norm": "attention.query_layernorm",
            r"self_attn\.k_norm": "attention.key_layernorm",
            "self_attn": "attention",
            "e_score_correction_bias": "expert_bias",
        },
        {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"},
    ),
    "sarvam_mla": ({}, {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}),
}


@pytest.mark.parametrize("model_type", [each for each in RELEASED if each in SERVED])
def test_release_with_names_of_its_own_matches_transformers(model_type: str, tmp_path: Path) -> None:
    today, released = tmp_path / "today", tmp_path / "released"
    of_weights, of_fields = RELEASED[model_type]
    saved(AutoModelForCausalLM.from_config(tiny_config_of(model_type), dtype=torch.float32), today)
    released.mkdir()
    weights = {renamed(name, of_weights): each for name, each in load_file(today / "model.safetensors").items()}
    for query in [name for name in weights if name.endswith("attention.q_proj.weight")]:
        heads = [weights.pop(query.replace("q_proj", each)) for each in ("q_proj", "k_proj", "v_proj")]
        if model_type == "sarvam_moe":
            weights[query.replace("q_proj", "query_key_value")] = torch.cat(heads)
        else:
            weights |= {query.replace("q_proj", f"{each}_proj"): part for each, part in zip("qkv", heads, strict=True)}
    save_file(weights, released / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((today / "config.json").read_text())
    (released / "config.json").write_text(json.dumps({of_fields.get(key, key): each for key, each in config.items()}))
    assert not set(of_fields) & set(json.loads((released / "config.json").read_text()))
    assert_matches_transformers(released, reference=today)


def renamed(name: str, patterns: Mapping[str, str]) -> str:
    for pattern, other in patterns.items():
        name = re.sub(pattern, other, name)
    return name


def test_rope_scaling_of_sarvam_is_yarn() -> None:
    scaling = {"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 4096}
    shape = describe_model("m", {"model_type": "sarvam_mla", "max_position_embeddings": 4096, "rope_scaling": scaling})
    assert (shape.rope.kind, shape.max_positions, shape.refusal) == ("yarn", 163840, None)


# Refusals by config


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_types_are_refused_in_a_sentence_whatever_their_config_says(model_type: str) -> None:
    (refusal,) = {refusal_of(config) for config in configs_of(model_type)}
    assert refusal is not None and refusal.startswith(f"{model_type} models are not supported: "), refusal
    assert len(refusal) < 200


@pytest.mark.parametrize("model_type", SERVED)
def test_served_type_accepts_minimal_and_full_config(model_type: str) -> None:
    for config in configs_of(model_type):
        assert refusal_of(config) is None


def test_documentation_lists_the_served_types() -> None:
    section = (ROOT / "docs" / "models.md").read_text().partition("## Types on one rank or replicas")[2]
    assert set(re.findall(r"`([a-z0-9_-]+)`[,.]", section.partition("## Refused")[0])) == BY_TRANSFORMERS


def configs_of(model_type: str) -> list[Mapping[str, object]]:
    """Returns the smallest possible config.json, and the full one of transformers."""
    config = default_config(model_type)
    return [{"model_type": config["model_type"]}, config]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mistral3", "text_config": {}, "vision_config": {}}, None),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "falcon"}, "vision_config": {}},
            "falcon models are not supported: it was not verified",
        ),
        ({"model_type": "olmo", "layer_types": ["linear_attention"]}, "models with linear_attention layers are not"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}, None),
        (
            {"model_type": "gemma4_text", "use_bidirectional_attention": "all"},
            "with use_bidirectional_attention are not",
        ),
        ({"model_type": "falcon"}, "falcon models are not supported"),
        ({"model_type": "granite", "logits_scaling": 8.0}, None),
        ({"model_type": "granite", "logits_scaling": 1.0, "final_logit_softcapping": None}, None),
        ({"model_type": "llama", "logits_scaling": 1.0, "logit_scale": 1}, None),
        ({"model_type": "llama", "logits_scaling": 8.0}, "models with logits_scaling are not supported"),
        ({"model_type": "cohere2", "logit_scale": 0.25}, None),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, None),
        ({"model_type": "cohere2", "final_logit_softcapping": 30.0}, "models with final_logit_softcapping are not"),
    ],
)
def test_settings_without_effect_are_not_refused(config: dict[str, Any], words: str | None) -> None:
    refusal = refusal_of(config)
    assert refusal is None if words is None else words in (refusal or "")


# Checks at load


def test_recurrent_layers_are_found_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent Gemma carries a state from one sequence into the next; the check of its config is off here."""
    saved(AutoModelForCausalLM.from_config(tiny_config_of("recurrent_gemma")), tmp_path)
    monkeypatch.setattr(loading, "refusal_of", lambda config: None)
    with pytest.raises(ValueError, match=r"layers\.0\.temporal_block is a RecurrentGemmaRecurrentBlock, which may"):
        base_of(tmp_path)
    # Without each check the next one finds it: the modules, the order of attention, the numbers.
    monkeypatch.setattr(model_module, "check_modules", lambda *_: None)
    with pytest.raises(ValueError, match=r"its layers \[0, 1\] attend in the order \[1\], not once each"):
        base_of(tmp_path)
    monkeypatch.setattr(plain.RecordingPacking, "check", lambda *_: None)
    with pytest.raises(ValueError, match=r"sequences that share a pass are 0\.\d+ of their spread away from those by"):
        base_of(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_moe", "cohere2", "cohere_compass"])
def test_leaks_between_packed_sequences_are_found(
    kind: str, dtype: Any, tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base_of(tiny_models[kind], dtype)
    monkeypatch.setattr(plain, "pack_lengths", lambda lengths: pack_lengths([sum(lengths)]))
    with pytest.raises(ValueError, match=r"sequences that share a pass are \d\.\d+ of their spread away"):
        base_of(tiny_models[kind], dtype)


def test_wrong_logit_scale_is_found(tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "logit_scale_of", lambda config: 1.0)
    with pytest.raises(ValueError, match=r"are 2\.3 of their spread away"):
        base_of(tiny_models["cohere2"])


def test_missing_logit_cap_is_found(tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base_of(tiny_models["gemma3_capped"])
    monkeypatch.setattr(model_module, "logit_cap_of", lambda config: None)
    with pytest.raises(ValueError, match=r"log-probabilities .* are 2\.3 of their spread away"):
        base_of(tiny_models["gemma3_capped"])


def test_context_must_fit_a_window_that_attention_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-MoE has its window only in transformers' mask, and with this activation runs by transformers' modules."""
    config = tiny_config_of("phimoe", sliding_window=100, hidden_act="gelu")
    saved(AutoModelForCausalLM.from_config(config), tmp_path)
    base_of(tmp_path)
    monkeypatch.setattr(attention, "window_in_mask", lambda module: None)
    with pytest.raises(ValueError, match=r"may be supported: serve with --max-context-length 100"):
        base_of(tmp_path)
    base_of(tmp_path, max_context_length=100)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("diffllama", r"its layers \[0, 1\] attend in the order \[0, 0, 1, 1\], not once each"),
        ("minimax_m3_vl_text", None),
        ("youtu", r"keys and values have several shapes \(heads, features\): \[\(4, 8\), \(4, 16\)\]"),
    ],
)
def test_models_that_the_kv_cache_cannot_hold_are_refused(
    model_type: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed passes of these models are right, though."""
    saved(AutoModelForCausalLM.from_config(tiny_config_of(model_type)), tmp_path)
    monkeypatch.setattr(loading, "refusal_of", lambda config: None)
    if words is None:
        base_of(tmp_path)
    else:
        with pytest.raises(ValueError, match=words):
            base_of(tmp_path)


def test_model_that_cannot_run_is_refused_with_the_error(
    tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "FrozenProduct", lambda *_: None)
    with pytest.raises(ValueError, match=r"llama models are not supported: a packed pass fails with TypeError: 'None"):
        base_of(tiny_models["llama"])


def test_out_of_memory_is_not_reported_as_an_unsupported_model(
    tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(model_module, "FrozenProduct", lambda *_: too_large)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        base_of(tiny_models["llama"])


def test_ranks_compare_single_passes_with_a_packed_one(tiny_models: Mapping[str, Path]) -> None:
    worker = Worker(WorkerConfig(ServedModel("m", str(tiny_models["llama"])), device="cpu"))
    compare: Callable[..., None] = plain.check_ranks
    compare("here", worker._base.model, worker._passes.scoring.bare_hidden_states)

    def leaking(micro_batch: MicroBatch) -> Tensor:
        hidden = worker._passes.scoring.bare_hidden_states(micro_batch)
        return hidden + 0.01 * hidden.cumsum(0)

    with pytest.raises(ValueError, match=r"hidden states of sequences that share a pass are 0\.\d+ of their spread"):
        compare("here", worker._base.model, leaking)


def base_of(directory: Path, dtype: Any = "float32", **options: Any) -> BaseModel:
    return BaseModel(WorkerConfig(ServedModel("m", str(directory)), device="cpu", dtype=dtype, **options))


def save_renamed(source: Path, target: Path, names: Mapping[str, str]) -> None:
    """Copies the model, with other names for its weights."""
    weights = load_file(source / "model.safetensors")
    save_file({names.get(name, name): each for name, each in weights.items()}, target / "model.safetensors")
    shutil.copy(source / "config.json", target)
