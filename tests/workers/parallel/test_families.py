"""A matrix over model families: each trains, exports and samples as transformers and PEFT do, or is refused.

The reference is PEFT on transformers' own model, in one process, with a rank's exported adapter, by autograd.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from torch import Tensor
from trainhouse.schemas.adapters.adapter_files import write_for_peft
from trainhouse.schemas.models import ExpertFactors, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import Datum, ForwardBackwardOutput
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.planner.checks import check_layout
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.model_shape import ModelShape, read_model
from trainhouse.workers.shapes.parts import RoutedExperts
from transformers import AutoModelForCausalLM

from ...tiny import PLAIN_KINDS, tiny_model
from ..adapted import peft_gradients, peft_parameters, quieten_peft, stacked_gradients
from .training import ADAM, Layout, greedy, layout, supervised

DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_tied", "phi3", "olmo2", "gemma2", "gemma3")
FUSED = {"in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"), "in_proj": ("gate_proj", "x_proj")}
HYBRID = ("qwen3_5", "qwen3_next", "qwen3_5_moe")
LATENT = ("deepseek_v3", "glm4_moe_lite", "mistral4", "deepseek_v32", "glm_moe_dsa")
# PEFT adapts no outputs of Mamba-2 in these.
WITHOUT_ATTENTION = ("nemotron_h_moe", "nemotron_h_latent")
MAMBA = ("granite4", "granite4_moe", "bamba", *WITHOUT_ATTENTION)
SPARSE = ("qwen3_moe", "qwen3_moe_mixed", "mixtral")
PLAIN_SPARSE = (
    *("ernie4_5_moe", "exaone_moe", "glm4_moe", "granitemoe", "granitemoeshared", "hunyuan_v1_moe"),
    *("afmoe", "flex_olmo", "gemma4_moe", "hy_v3", "kolibri1", "laguna", "mellum", "minimax_m2", "phimoe"),
    "qwen2_moe",
)
BY_TRANSFORMERS = ("cohere_compass",)
WITH_BIASES = ("nemotron", "phimoe", "stablelm", "starcoder2")
MORE_LAYOUTS = ("gemma2", "gemma4", "gemma4_large", "gemma4_moe", "cohere", "cohere2", *WITH_BIASES)
CORE: tuple[tuple[str, str, ExpertFactors], ...] = (
    ("phi3", "single", "each"),
    ("gemma3", "single", "each"),
    *(("gemma2", spec, "each") for spec in ("single", "tp=2", "sp=2")),
    ("qwen2_moe", "single", "each"),
    ("phimoe", "fsdp=2", "each"),
    ("stablelm", "tp=2", "each"),
    *(("qwen3_moe", spec, "shared") for spec in ("ep=2", "tp=2", "fsdp=2")),
    *(("qwen3_5", spec, "shared") for spec in ("single", "tp=2", "sp=2")),
    ("deepseek_v3", "tp=2", "shared"),
    ("glm_moe_dsa", "sp=2", "shared"),
    ("nemotron_h_latent", "ep=2", "shared"),
)
MATRIX = [(kind, spec, "each") for kind in (*DENSE, *SPARSE, *PLAIN_KINDS) for spec in ("single", "tp=2")]
MATRIX += [(kind, spec, "each") for kind in MORE_LAYOUTS for spec in ("sp=2", "fsdp=2")]
MATRIX += [(kind, "ep=2", "each") for kind in (*SPARSE, *PLAIN_SPARSE)]
MATRIX += [(kind, spec, "each") for kind in BY_TRANSFORMERS for spec in ("single", "replicas=2")]
MATRIX += [(kind, "single", "shared") for kind in (*SPARSE, *PLAIN_SPARSE)]
MATRIX += [(kind, spec, "shared") for kind in ("qwen3_moe_mixed", "mixtral") for spec in ("ep=2", "ep=2,tp=2")]
EVERYWHERE = (*HYBRID, *LATENT, "llama4")
MATRIX += [(kind, spec, "shared") for kind in EVERYWHERE for spec in ("single", "tp=2", "sp=2", "fsdp=2")]
MATRIX += [(kind, "ep=2", "shared") for kind in ("qwen3_next", "qwen3_5_moe", *LATENT, "llama4")]
MATRIX += [(kind, spec, "shared") for kind in ("afmoe", "laguna") for spec in ("sp=2", "fsdp=2")]
MATRIX += [("gemma4_moe", spec, "shared") for spec in ("tp=2", "sp=2", "ep=2", "ep=2,tp=2")]
MATRIX += [(kind, spec, "shared") for kind in MAMBA for spec in ("single", "tp=2", "sp=2")]
MATRIX += [(kind, "ep=2", "shared") for kind in ("granite4_moe", *WITHOUT_ATTENTION)]
MATRIX += [(kind, "single", "each") for kind in WITHOUT_ATTENTION]
MORE = [case for case in MATRIX if case not in CORE]

TOLERANCE = 1e-4
LENGTHS = (9, 30, 17, 4)
NUM_EXPERTS = 4


@pytest.mark.parametrize(
    ("kind", "spec", "factors"), [*CORE, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_a_family_trains_and_samples_as_transformers_does(
    kind: str, spec: str, factors: ExpertFactors, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    with layout(tiny_models[kind], ParallelSpec.parse(spec), tmp_path) as where:
        exported = trained(where, factors, kind not in WITHOUT_ATTENTION)
        request = supervised("a", 7, *LENGTHS)
        (output,) = where.run_pass(request)
        assert isinstance(output, ForwardBackwardOutput), output
        gradients = load_file(where.snapshot("a") / "window.safetensors")
        where.call("load_adapter", "s", str(exported))
        jobs = [greedy(f"{length}", "s", length) for length in (3, 23)]
        samples = where.sample(*jobs)

    write_for_peft(exported)
    tuned = in_peft(tiny_models[kind], exported)
    loss, logprobs = loss_of(tuned, request.data)
    loss.backward()
    shape = read_model(ServedModel("m", str(tiny_models[kind])))
    experts = shape.experts if isinstance(shape, ModelShape) else None
    linears = experts.linears if experts else RoutedExperts.linears
    wanted = peft_gradients(tuned, NUM_EXPERTS, linears, experts is not None and experts.is_misread)
    if factors == "shared":
        wanted = stacked_gradients(wanted, NUM_EXPERTS, linears)
    # Files of Laguna and Hunyuan 3 have the shared experts under another name than modules.
    in_files = "shared_mlp" if kind == "hy_v3" else "shared_expert"
    wanted = {
        name if name in gradients else name.replace("shared_experts", in_files): each for name, each in wanted.items()
    }
    wanted = gradients_of_parts(wanted, gradients)
    assert close(output.metrics["loss:sum"], loss.item())
    assert all(
        np.abs(each["logprobs"] - row_logprobs).max() < TOLERANCE
        for each, row_logprobs in zip(output.loss_fn_outputs, logprobs, strict=True)
    )
    assert gradients.keys() == wanted.keys()
    assert not [name for name, our_gradient in gradients.items() if not close(our_gradient, wanted[name])]
    for job in jobs:
        assert_sampled(tuned, job.prompt, samples[job.job_id])

    # These bounds detect a change of a thousandth in a loss, gradient or adapter.
    assert not close(1.001 * output.metrics["loss:sum"], loss.item())
    assert not [name for name, our_gradient in gradients.items() if close(1.001 * our_gradient, wanted[name])]
    with torch.no_grad():
        for parameter in peft_parameters(tuned).values():
            parameter.mul_(1.003)
    assert np.abs(output.loss_fn_outputs[1]["logprobs"] - loss_of(tuned, request.data)[1][1]).max() > TOLERANCE


def gradients_of_parts(wanted: Mapping[str, Any], ours: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Splits the gradients of a layer of which we adapt some ranges of rows apart, and PEFT all by one pair."""
    split = {}
    for name, gradient in wanted.items():
        path, _, side = name.partition(".lora_")
        layer, _, whole = path.rpartition(".")
        parts = [f"{layer}.{part}.lora_{side}" for part in FUSED.get(whole, ())]
        ranks = np.array_split(np.arange(gradient.shape[0 if side.startswith("A") else 1]), max(1, len(parts)))
        if side.startswith("A"):
            split |= {part: gradient[rank] for part, rank in zip(parts, ranks, strict=False)}
            split |= {} if parts else {name: gradient}
            continue
        stops = np.cumsum([len(ours[part]) for part in parts])
        rows = [slice(stop - len(ours[part]), stop) for part, stop in zip(parts, stops, strict=True)]
        split |= {part: gradient[row][:, rank] for part, row, rank in zip(parts, rows, ranks, strict=False)}
        split |= {} if parts else {name: gradient}
    return split


def trained(where: Layout, expert_factors: ExpertFactors = "each", train_attn: bool = True) -> Path:
    """Takes two steps, so that neither factor is zero."""
    lora = LoraConfig(rank=4, seed=11, expert_factors=expert_factors, train_attn=train_attn)
    where.call("create_run", RunSpec("a", lora))
    for seed in (1, 2):
        (output,) = where.run_pass(supervised("a", seed, 12, 25))
        assert isinstance(output, ForwardBackwardOutput), output
        where.call("apply_steps", (OptimizerStep("a", ADAM.model_copy(update={"learning_rate": 3e-2})),))
    return where.saved("a")


def in_peft(model: Path, exported: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings():
        quieten_peft()
        return PeftModel.from_pretrained(base, exported, is_trainable=True).eval()


def loss_of(model: PeftModel, data: Sequence[Datum]) -> tuple[Tensor, list[np.ndarray]]:
    """Returns the weighted sum of negative log-probabilities of the targets, and the log-probabilities."""
    loss, logprobs = torch.zeros(()), []
    for datum in data:
        targets, weights = (torch.from_numpy(datum.loss_fn_inputs[name]) for name in ("target_tokens", "weights"))
        row_logprobs = log_softmax(model, datum.tokens).gather(1, targets.long()[:, None])[:, 0]
        loss = loss - (weights * row_logprobs).sum()
        logprobs.append(row_logprobs.detach().numpy())
    return loss, logprobs


def log_softmax(model: PeftModel, tokens: np.ndarray) -> Tensor:
    """Returns [tokens, vocab]."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model(input_ids=ids).logits[0].log_softmax(-1)


@torch.no_grad()
def assert_sampled(model: PeftModel, prompt: np.ndarray, found: Any) -> None:
    """Asserts that each token is the likeliest of a forward pass over all before it, with its log-probability."""
    assert isinstance(found, SampleResponse), found
    (sequence,) = found.sequences
    whole = np.concatenate([prompt, sequence.tokens])
    rows = log_softmax(model, whole[:-1]).numpy()
    of_sample = rows[len(prompt) - 1 :]
    assert np.array_equal(of_sample.argmax(-1), sequence.tokens)
    assert np.abs(of_sample.max(-1) - sequence.logprobs).max() < TOLERANCE
    of_prompt = rows[np.arange(len(prompt) - 1), prompt[1:]]
    assert np.abs(of_prompt - np.asarray(found.prompt_logprobs[1:], np.float32)).max() < TOLERANCE


def close(ours: Any, theirs: Any) -> bool:
    """Compares relative to the largest value of `theirs`."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return bool(np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max())


@pytest.mark.parametrize("kind", BY_TRANSFORMERS)
def test_families_without_our_layers_support_only_replicas(kind: str, tiny_models: Mapping[str, Path]) -> None:
    model = read_model(ServedModel("m", str(tiny_models[kind])))
    for spec in ("tp=2", "sp=2", "fsdp=2", "ep=2"):
        with pytest.raises(ValueError, match=f"{spec}: {model.model_type} models such as m support only replicas"):
            check_layout(ParallelSpec.parse(spec), model)


def test_unsupported_models_are_refused_before_loading(tmp_path: Path) -> None:
    served = ServedModel("m", str(tiny_model("llama", tmp_path, final_logit_softcapping=30.0)))
    reason = "models with final_logit_softcapping are not supported"
    for spec in ("single", "tp=2", "ep=2"):
        with pytest.raises(ValueError, match=reason):
            check_layout(ParallelSpec.parse(spec), read_model(served))
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ValueError, match=reason):
        BaseModel(WorkerConfig(served, device="cpu"))
