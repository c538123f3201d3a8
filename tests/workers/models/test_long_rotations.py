"""A model with longrope or dynamic RoPE scaling rotates sequences of all lengths by the same frequencies."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.models import loading
from trainhouse.workers.models import model as model_module
from trainhouse.workers.protocol.calls import OperationPart, RunSpec, SampleJob, SamplingSlice
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker
from transformers import AutoModelForCausalLM

from ...tiny import tiny_model

# Different for each pair of features, so that none is used for another.
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + number / 8 for number in range(8)],
    "long_factor": [4.0 + number for number in range(8)],
    "factor": 4.0,
    "attention_factor": 1.3,
}
ORIGINAL = 16
PROMPT = np.random.default_rng(5).integers(3, 512, 12).astype(np.int32)


def models(kind: str, directory: Path) -> tuple[Path, Path]:
    """Returns a model, and one for which transformers takes the long factors for all sequences of at least 5 tokens."""
    served, long = directory / "served", directory / "long"
    given = {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": ORIGINAL}
    tiny_model(kind, served, **given)
    shutil.copytree(served, long)
    settings = json.loads((long / "config.json").read_text())
    settings["original_max_position_embeddings"] = settings["rope_parameters"]["original_max_position_embeddings"] = 4
    (long / "config.json").write_text(json.dumps(settings))
    return served, long


@pytest.mark.parametrize("kind", ["phi3", "llama"])
@pytest.mark.parametrize(("longest", "max_tokens"), [(None, 12), (ORIGINAL, 4)])
def test_training_and_samples_use_one_set_of_frequencies(
    kind: str, longest: int | None, max_tokens: int, tmp_path: Path
) -> None:
    """Samples begin before the original length, and end behind it if the context does."""
    served, long = models(kind, tmp_path)
    worker = Worker(WorkerConfig(ServedModel("m", str(served)), device="cpu", threads=1, max_context_length=longest))
    assert worker.info().max_context_length == (longest or 1024)
    worker.create_run(RunSpec("run", LoraConfig(rank=4, seed=11)))
    tokens, sampled = sample(worker, max_tokens)
    whole = np.concatenate([PROMPT, tokens])
    like, other = (served, long) if longest == ORIGINAL else (long, served)
    for length in (8, len(whole) - 1):
        ours = train(worker, whole[: length + 1])
        np.testing.assert_allclose(ours, by_transformers(like, whole[: length + 1]), atol=1e-4)
        others = by_transformers(other, whole[: length + 1])
        # Beyond the original length transformers takes the long factors of itself.
        assert bool(abs(ours - others).max() > 1e-2) is (length <= ORIGINAL)
    np.testing.assert_allclose(sampled, ours[-len(tokens) :], atol=1e-4)


DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
# That of dynamic scaling for 64 tokens of a model of 16, with heads of 16.
LONG_THETA = 10000.0 * (4.0 * 64 / 16 - 3.0) ** (16 / 14)


@pytest.mark.parametrize("activation", ["silu", "gelu"])  # with gelu transformers' own modules run
@pytest.mark.parametrize(("longest", "max_tokens"), [(None, 40), (32, 20), (ORIGINAL, 4)])
def test_dynamic_scaling_extends_the_context_and_rotates_all_lengths_alike(
    activation: str, longest: int | None, max_tokens: int, tmp_path: Path
) -> None:
    """vLLM does so; transformers rotates the tokens of all sequences of a batch as its longest needs."""
    served, long = tmp_path / "served", tmp_path / "long"
    given = {"rope_parameters": dict(DYNAMIC), "max_position_embeddings": ORIGINAL, "hidden_act": activation}
    tiny_model("qwen3", served, **given)
    shutil.copytree(served, long)
    settings = json.loads((long / "config.json").read_text())
    settings |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": LONG_THETA},
        "rope_theta": LONG_THETA,
        "max_position_embeddings": 64,
    }
    (long / "config.json").write_text(json.dumps(settings))
    worker = Worker(WorkerConfig(ServedModel("m", str(served)), device="cpu", threads=1, max_context_length=longest))
    assert worker.info().max_context_length == (longest or 64)
    worker.create_run(RunSpec("run", LoraConfig(rank=4, seed=11)))
    tokens, sampled = sample(worker, max_tokens)
    whole = np.concatenate([PROMPT, tokens])
    like, other = (served, long) if longest == ORIGINAL else (long, served)
    for length in (8, len(whole) - 1, 8):  # the last again, after a long one
        ours = train(worker, whole[: length + 1])
        np.testing.assert_allclose(ours, by_transformers(like, whole[: length + 1]), atol=1e-4)
        if length < ORIGINAL:
            assert abs(ours - by_transformers(other, whole[: length + 1])).max() > 1e-3
    np.testing.assert_allclose(train(worker, whole)[-len(tokens) :], sampled, atol=1e-4)


def test_the_check_at_load_compares_the_same_frequencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has sequences of 5 to 11 tokens; transformers alone would take the short factors for them."""
    served, _ = models("phi3", tmp_path)
    config = WorkerConfig(ServedModel("m", str(served)), device="cpu")
    model_module.BaseModel(config)

    def of_layers_alone(trunk: Any, longest: int | None) -> None:
        trunk.rotary_emb.inv_freq = trunk.rotary_emb.inv_freq / 4

    monkeypatch.setattr(loading, "rotate_alike", of_layers_alone)
    with pytest.raises(ValueError, match="of their spread away from those by transformers"):
        model_module.BaseModel(config)


def test_the_context_of_phi_moe_ends_at_the_original_length(tmp_path: Path) -> None:
    """transformers never takes its factors for longer sequences."""
    directory = tiny_model("phimoe", tmp_path)
    settings = json.loads((directory / "config.json").read_text())
    settings["rope_parameters"]["original_max_position_embeddings"] = 64
    (directory / "config.json").write_text(json.dumps(settings))
    assert (
        model_module.BaseModel(WorkerConfig(ServedModel("m", str(directory)), device="cpu")).loaded.num_positions == 64
    )


def sample(worker: Worker, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the likeliest tokens and their log-probabilities."""
    params = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0)
    result = worker.sample_slice(SamplingSlice((SampleJob("job", None, PROMPT, params, (), ()),), (), 10.0))
    while not result.finished:
        result = worker.sample_slice(SamplingSlice((), (), 10.0))
    (answer,) = result.finished.values()
    (sequence,) = answer.sequences  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(sequence.tokens), np.asarray(sequence.logprobs)


def train(worker: Worker, row: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities of the tokens of a row after the first one."""
    datum = Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)})
    (output,) = worker.run_pass((OperationPart(0, ForwardBackwardRequest("run", 1, (datum,), "cross_entropy")),))
    assert isinstance(output, ForwardBackwardOutput), output
    return output.loss_fn_outputs[0]["logprobs"]


@torch.no_grad()
def by_transformers(directory: Path, row: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.from_numpy(row.astype(np.int64))
    logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None]).squeeze(1).numpy()
