"""Full fine-tuning under layouts gives the same as on one rank."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.models import FullConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.pools.base import WorkerError
from trainhouse.workers.protocol.calls import Failure, OptimizerStep, RunSpec
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from transformers import AutoModelForCausalLM

from ...drawn import assert_same_sample
from ...tiny import tiny_model
from .case import Case
from .faults import snapshot_without_memory
from .rank_bytes import RunBytes
from .training import ADAM, Layout, close, error, greedy, largest_error, layout, some_data, supervised

CASES = [
    Case("fsdp=2"),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            *(Case(spec) for spec in ("tp=2", "replicas=2", "sp=2", "fsdp=2,tp=2", "fsdp=2,sp=2", "sp=2,tp=2")),
            *(Case(spec, "qwen3_moe") for spec in ("ep=2", "fsdp=2,ep=2", "ep=2,tp=2", "fsdp=2")),
            *(Case("ep=2,tp=2", kind) for kind in ("granite4_moe", "nemotron_h_latent")),
            *(Case("fsdp=2,sp=2", kind) for kind in ("granite4_moe", "nemotron_h_latent", "falcon_h1_one_group")),
            *(Case("tp=2", kind, tp_activations="whole") for kind in ("granite4_moe", "nemotron_h_latent")),
            *(Case("tp=2", kind) for kind in ("llama", "qwen3_tied", "qwen2", "phi3", "olmo2", "mixtral", "cohere")),
            *(Case("fsdp=2", kind) for kind in ("qwen3_tied", "phi3", "gemma3", "cohere", "qwen3_5", "deepseek_v3")),
            *(Case("tp=2", kind) for kind in ("qwen3_5", "deepseek_v3", "granite4_biases", "granite4_one_group")),
            *(Case(spec, "phimoe") for spec in ("tp=2", "fsdp=2,ep=2")),
            *(Case("tp=2", "stablelm", tp_activations=each) for each in ("sharded", "whole")),
            Case("fsdp=2,sp=2", "starcoder2"),
            Case("ep=2", "deepseek_v3"),
            *(Case(spec, kind) for kind in ("gemma4", "gemma4_moe") for spec in ("tp=2", "fsdp=2", "sp=2")),
            *(Case("tp=2", kind, tp_activations="whole") for kind in ("gemma4", "gemma4_moe")),
            Case("fsdp=2,tp=2", "gemma4"),
            *(Case(spec, "gemma4_moe") for spec in ("ep=2", "ep=2,tp=2")),
            Case("tp=2", tp_activations="whole"),
            Case("tp=2", "qwen3_tied", tp_activations="whole"),
            *(Case("fsdp=2,tp=2", kind, tp_activations="whole") for kind in ("qwen3", "qwen3_tied")),
            Case("fsdp=2", zero_stage="2"),
            Case("fsdp=2,tp=2", replicated=("self_attn",)),
            Case("replicas=2,fsdp=2"),
        )
    ),
]


class Trained:
    """Three steps with two accumulations each: losses and norms, every gradient, the saved files and samples."""

    def __init__(self, where: Layout) -> None:
        where.call("create_run", RunSpec("full", FullConfig(seed=1)))
        self.losses: list[float] = []
        self.gradients: list[dict[str, np.ndarray]] = []
        for step in range(3):
            for seed, lengths in ((step, (9, 30, 4)), (step + 7, (11,))):
                self.losses.append(loss_of(where, seed, *lengths))
            self.gradients.append(tensors(where.snapshot("full"), "window"))
            self.losses.append(norm_of_step(where))
        self.directory = where.saved("full")
        self.weights = [tensors(self.directory, stem) for stem in ("model", "optimizer")]
        where.call("copy_adapter", "full", "sampler")
        jobs = [greedy(f"job-{length}", "sampler", length) for length in (5, 17)]
        answers = where.sample(*jobs, greedy("base", None, 9))
        assert all(isinstance(answer, SampleResponse) for answer in answers.values()), answers
        self.samples = [answers[name] for name in sorted(answers)]


def loss_of(where: Layout, seed: int, *lengths: int) -> float:
    (output,) = where.run_pass(supervised("full", seed, *lengths))
    assert isinstance(output, ForwardBackwardOutput), output
    return output.metrics["loss:sum"]


def norm_of_step(where: Layout) -> float:
    (metrics,) = where.call("apply_steps", (OptimizerStep("full", ADAM),))
    assert isinstance(metrics, dict), metrics
    return metrics["unclipped_grad_l2:mean"]


def tensors(directory: Path, stem: str) -> dict[str, np.ndarray]:
    paths = [*directory.glob(f"{stem}.safetensors"), *directory.glob(f"{stem}-*.safetensors")]
    return {name: each for path in paths for name, each in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_full_model_trains_as_on_one_rank(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model = case.model(tiny_models, tmp_path)
    with layout(model, SINGLE, tmp_path) as alone, layout(model, case.parallel, tmp_path, **case.options) as many:
        theirs, ours = Trained(alone), Trained(many)
        assert close(ours.losses, theirs.losses) and not close(ours.losses, [1.001 * loss for loss in theirs.losses])
        assert largest_error(ours.gradients, theirs.gradients) <= 1e-4
        assert largest_error(ours.gradients, ours.gradients[::-1]) > 1e-4
        assert largest_error(ours.weights, theirs.weights) <= 1e-3
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert_same_sample(one.sequences[0], other.sequences[0])
        # Each resumes from the other's checkpoint, and transformers loads it.
        for directory in (ours.directory, theirs.directory):
            for where in (alone, many):
                where.call("load_run", "full", str(directory), True)
            assert close([loss_of(alone, 3, 21, 6)], [loss_of(many, 3, 21, 6)])
            # Weights multiplied by 1 + 6e-8 change this norm of gemma4 by 1e-4.
            assert close([norm_of_step(alone)], [norm_of_step(many)], 3e-4)
            assert close([loss_of(alone, 4, 21, 6)], [loss_of(many, 4, 21, 6)])
        loaded = AutoModelForCausalLM.from_pretrained(ours.directory)
        wanted = AutoModelForCausalLM.from_pretrained(theirs.directory)
        for name, weights in loaded.named_parameters():
            assert error(weights.detach().numpy(), wanted.get_parameter(name).detach().numpy()) <= 1e-3, name


EXPORTED = [
    Case("fsdp=2"),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            *(Case(spec) for spec in ("tp=2", "fsdp=2,tp=2", "sp=2", "replicas=2", "replicas=2,fsdp=2")),
            *(Case(spec, "qwen3_moe") for spec in ("ep=2", "fsdp=2,ep=2", "ep=2,tp=2")),
            *(Case("tp=2", kind) for kind in ("qwen3_tied", "phi3")),
        )
    ),
]


@pytest.mark.parametrize("case", EXPORTED, ids=str)
def test_exports_are_assembled_only_on_the_first_rank(case: Case, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Exports a run, and reads its checkpoint; the control is the run before its step."""
    model, exported = case.model(tiny_models, tmp_path), []
    with layout(model, SINGLE, tmp_path) as alone, layout(model, case.parallel, tmp_path) as many:
        many.probe(RunBytes)
        for where in (alone, many):
            where.call("create_run", RunSpec("full", FullConfig(seed=1)))
        for _ in range(2):
            wanted = alone.call("export_adapter", "full").weights
            before = many.probe(RunBytes.alive)
            found, *others = many.answers("export_adapter", "full")
            allocated = [peak - alive for peak, alive in zip(many.probe(RunBytes.peak), before, strict=True)]
            assert others == [None] * len(others) and error(found.weights, wanted) <= 1e-4
            assert max(allocated[1:]) < 0.01 * wanted.nbytes
            has_all = many.spec.fsdp == many.spec.ep == many.spec.tp == 1
            assert has_all or allocated[0] >= wanted.nbytes
            exported.append(found.weights)
            for where in (alone, many):
                loss_of(where, 1, 9, 30)
                norm_of_step(where)
        assert error(exported[1], exported[0]) > 1e-3
        directory = many.saved("full")
        read, *others = many.answers("read_adapter", str(directory))
        assert others == [None] * len(others)
        assert np.array_equal(read.weights, many.call("export_adapter", "full").weights)
        many.call("import_adapter", "full", replace(read, weights=exported[0]))
        assert np.array_equal(many.call("export_adapter", "full").weights, exported[0])


@pytest.mark.parametrize("padding", [3, 300])
def test_padding_row_is_not_trained_on_any_rank(padding: int, tmp_path: Path) -> None:
    """Each rank has half of the 512 rows, and the data use tokens of both halves."""
    model, gradients = tiny_model("qwen3", tmp_path / "model", pad_token_id=padding), []
    datum = some_data(1, 64)[0]
    datum.tokens[:4] = 3, 300, 3, 300
    for spec in (SINGLE, ParallelSpec.parse("fsdp=2")):
        with layout(model, spec, tmp_path) as where:
            where.call("create_run", RunSpec("full", FullConfig()))
            where.run_pass(ForwardBackwardRequest("full", 1, (datum,), "cross_entropy"))
            gradients.append(tensors(where.snapshot("full"), "window"))
    assert largest_error(gradients[1:], gradients[:1]) <= 1e-4
    row_gradients = np.abs(gradients[1]["model.embed_tokens.weight"]).max(1)
    assert row_gradients[padding] == 0 and row_gradients[303 - padding] > 0


def test_deleting_a_model_while_it_samples_blocks_no_rank(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Only one rank had the job."""
    with layout(tiny_models["qwen3"], ParallelSpec.parse("fsdp=2"), tmp_path) as where:
        where.call("create_run", RunSpec("full", FullConfig()))
        where.call("copy_adapter", "full", "sampler")
        result = where.run_slice((greedy("job", "sampler", 5),), 0.0)
        assert result.num_active == 1
        for method, model_id in (("drop_adapter", "sampler"), ("drop_run", "full")):
            where.call(method, model_id)
        gone = where.run_slice().finished["job"]
        assert isinstance(gone, Failure) and "is gone" in gone.message
        (answer,) = where.sample(greedy("base", None, 5)).values()
        assert isinstance(answer, SampleResponse)


def test_failed_snapshot_does_not_change_the_gradients(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    spec, norms = ParallelSpec.parse("replicas=2"), []
    with layout(tiny_models["qwen3"], spec, tmp_path) as where:
        for fails in (False, True):
            where.call("create_run", RunSpec("full", FullConfig()))
            loss_of(where, 1, 9, 30, 4)
            if fails:
                with pytest.raises(WorkerError, match="no memory"):
                    where.probe(snapshot_without_memory, "full", str(tmp_path / "nowhere"))
            norms.append(norm_of_step(where))
            where.call("drop_run", "full")
    assert close(norms[:1], norms[1:])
