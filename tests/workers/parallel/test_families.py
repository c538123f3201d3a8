"""A matrix over model families: each trains, exports and samples as transformers and PEFT do, or is refused.

The reference is PEFT on transformers' own model, in one process, with a rank's exported adapter, by autograd.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from trainhouse.schemas.models import ExpertFactors, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import ForwardBackwardOutput
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.shapes.layouts.checks import check_layout
from trainhouse.workers.shapes.model_shape import read_model

from ...drawn import TIE
from ...tiny import PLAIN_KINDS, declared, tiny_model
from ..adapted import peft_parameters
from ..peft_reference import PeftReference
from .training import ADAM, Layout, greedy, layout, supervised

DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_tied", "phi3", "olmo2", "gemma2", "gemma3")
HYBRID = ("qwen3_5", "qwen3_next", "qwen3_5_moe")
LATENT = ("deepseek_v3", "glm4_moe_lite", "mistral4", "deepseek_v32", "glm_moe_dsa")
SPARSE_NEMOTRON = ("nemotron_h_moe", "nemotron_h_latent")
MAMBA = ("granite4", "granite4_moe", "bamba", "falcon_h1", *SPARSE_NEMOTRON)
SPARSE = ("qwen3_moe", "qwen3_moe_mixed", "mixtral")
PLAIN_SPARSE = tuple(kind for kind in PLAIN_KINDS if declared(kind).experts is not None)
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
MATRIX += [(kind, "ep=2", "shared") for kind in ("granite4_moe", *SPARSE_NEMOTRON)]
MATRIX += [(kind, "single", "each") for kind in SPARSE_NEMOTRON]
MATRIX += [("gpt_oss", spec, "shared") for spec in ("single", "tp=2", "sp=2", "fsdp=2", "ep=2")]
MORE = [case for case in MATRIX if case not in CORE]

TOLERANCE = 1e-4
LENGTHS = (9, 30, 17, 4)


@pytest.mark.parametrize(
    ("kind", "spec", "factors"), [*CORE, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_a_family_trains_and_samples_as_transformers_does(
    kind: str, spec: str, factors: ExpertFactors, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    with layout(tiny_models[kind], ParallelSpec.parse(spec), tmp_path) as where:
        exported = trained(where, factors)
        request = supervised("a", 7, *LENGTHS)
        (output,) = where.run_pass(request)
        assert isinstance(output, ForwardBackwardOutput), output
        gradients = load_file(where.snapshot("a") / "window.safetensors")
        where.call("load_adapter", "s", str(exported))
        jobs = [greedy(f"{length}", "s", length) for length in (3, 23)]
        samples = where.sample(*jobs)

    reference = PeftReference(tiny_models[kind], exported)
    loss, logprobs = reference.loss_of(request.data)
    loss.backward()
    wanted = reference.gradients(gradients)
    assert close(output.metrics["loss:sum"], loss.item())
    assert all(
        np.abs(each["logprobs"] - row_logprobs).max() < TOLERANCE
        for each, row_logprobs in zip(output.loss_fn_outputs, logprobs, strict=True)
    )
    assert gradients.keys() == wanted.keys()
    assert not [name for name, our_gradient in gradients.items() if not close(our_gradient, wanted[name])]
    for job in jobs:
        assert_sampled(reference, job.prompt, samples[job.job_id])

    # These bounds detect a change of a thousandth in a loss, gradient or adapter.
    assert not close(1.001 * output.metrics["loss:sum"], loss.item())
    assert not [name for name, our_gradient in gradients.items() if close(1.001 * our_gradient, wanted[name])]
    with torch.no_grad():
        for parameter in peft_parameters(reference.model).values():
            parameter.mul_(1.003)
    assert np.abs(output.loss_fn_outputs[1]["logprobs"] - reference.loss_of(request.data)[1][1]).max() > TOLERANCE


def trained(where: Layout, expert_factors: ExpertFactors = "each") -> Path:
    """Takes two steps, so that neither factor is zero."""
    lora = LoraConfig(rank=4, seed=11, expert_factors=expert_factors)
    where.call("create_run", RunSpec("a", lora))
    for seed in (1, 2):
        (output,) = where.run_pass(supervised("a", seed, 12, 25))
        assert isinstance(output, ForwardBackwardOutput), output
        where.call("apply_steps", (OptimizerStep("a", ADAM.model_copy(update={"learning_rate": 3e-2})),))
    return where.saved("a")


@torch.no_grad()
def assert_sampled(reference: PeftReference, prompt: np.ndarray, found: Any) -> None:
    """Asserts that each token is the likeliest of a forward pass over all before it, with its log-probability."""
    assert isinstance(found, SampleResponse), found
    (sequence,) = found.sequences
    whole = np.concatenate([prompt, sequence.tokens])
    rows = reference.log_softmax(whole[:-1]).numpy()
    of_sample = rows[len(prompt) - 1 :]
    own = of_sample[np.arange(len(sequence.tokens)), sequence.tokens]
    assert (of_sample.max(-1) - own).max() < TIE
    assert np.abs(own - sequence.logprobs).max() < TOLERANCE
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
