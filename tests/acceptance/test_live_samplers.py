"""Samplers that share the weights of a full run have its current weights again after a kill -9."""

from pathlib import Path

import numpy as np
import pytest
import trainhouse
from trainhouse import AdamParams, SamplingClient, SamplingParams, ServiceClient, TrainingClient

from ..drawn import assert_same_sample
from ..live import DEPLOYMENTS
from .crashing import Crashing
from .training_script import MODEL, batch

INFLIGHT = {"full_sampling": "inflight", "snapshot_steps": 3}
PROMPT = [5, 6, 7, 8, 9, 10]

STRUCK = [("local", "worker"), ("local", "server"), ("local", "both"), ("fsdp=2", "rank"), ("ray", "both")]


def train(training: TrainingClient, num_steps: int, seed: int) -> None:
    for step in range(num_steps):
        passed = training.forward_backward(list(batch(trainhouse, seed + step)), "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-3)).result(120)
        passed.result(120)


def scored(sampler: SamplingClient) -> np.ndarray:
    return np.array(sampler.compute_logprobs(PROMPT).result(240)[1:], np.float64)


@pytest.mark.full
@pytest.mark.parametrize(("deployment", "struck"), STRUCK)
def test_live_sampler_has_the_current_weights_after_a_crash(
    deployment: str, struck: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with (
        Crashing(tiny_models["qwen3"], tmp_path, INFLIGHT | DEPLOYMENTS[deployment]).running() as crashing,
        ServiceClient(crashing.url, "tml-live") as service,
    ):
        training = service.create_full_training_client(MODEL)
        train(training, 2, seed=0)
        sampler = training.save_weights_and_get_sampling_client()
        saved = scored(sampler)
        # Only some of these are in a snapshot.
        train(training, 3, seed=10)
        live = scored(sampler)
        assert not np.allclose(live, saved, atol=1e-2), "training has moved the weights"
        crashing.strike(struck)
        # The sampler alone causes the run to be rebuilt.
        np.testing.assert_allclose(scored(sampler), live, atol=1e-4)
        train(training, 1, seed=20)
        moved = scored(sampler)
        assert not np.allclose(moved, live, atol=1e-2), "the sampler does not share the weights"
        crashing.strike("worker")
        drawn = sampler.sample(PROMPT, 2, SamplingParams(max_tokens=8, seed=5)).result(240)
        crashing.strike("worker")
        again = sampler.sample(PROMPT, 2, SamplingParams(max_tokens=8, seed=5)).result(240)
        for one, other in zip(drawn.sequences, again.sequences, strict=True):
            assert_same_sample(one, other)
        np.testing.assert_allclose(scored(sampler), moved, atol=1e-4)
