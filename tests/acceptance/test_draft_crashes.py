"""A policy and its draft train and sample while workers and the server are killed, with the same results."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse import AdamParams, Datum, SamplingParams, ServiceClient, TrainingClient

from .crashing import Crashing, Faults, do_nothing
from .training_script import MODEL

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NUM_STEPS = 8
PROMPTS = [[5, 6, 7], [9, 10], [30, 31, 32, 33]]
ADAM = AdamParams(learning_rate=3e-3)
TOLERANCE = 1e-4
STRIKES = {1: "worker", 2: "server", 4: "both", 5: "server", 7: "worker"}


@dataclass
class Results:
    """Results per step: the draft's losses on features captured by itself and by the policy, and samples with the
    draft. feature_bytes: stored in the end.
    """

    losses: list[list[float]] = field(default_factory=list)
    samples: list[list[list[int]]] = field(default_factory=list)
    feature_bytes: int = -1


def texts() -> list[list[int]]:
    return np.random.default_rng(0).integers(5, 60, (4, 24)).tolist()


def trained(service: ServiceClient, faults: Faults, fields: Mapping[str, Any]) -> Results:
    results = Results()
    policy = service.create_lora_training_client(MODEL, rank=4, seed=0)
    draft = service.create_draft_client(MODEL, "eagle3", seed=1, **fields)
    if fields:
        draft.build_vocab_map(texts())
    supervised = [Datum(text[:-1], {"target_tokens": text[1:], "weights": [1.0] * 23}) for text in texts()]
    for step in range(NUM_STEPS):
        path = _saved(policy, f"policy-{step}")
        draft.set_target(path)
        captured = draft.capture([Datum(each.tokens, {}) for each in supervised], uses=1)
        output = policy.forward_backward(supervised, "cross_entropy", capture_for=draft)
        policy.optim_step(ADAM)
        refs = output.result(120).feature_refs
        assert refs is not None
        from_policy = [Datum(each.tokens, {}, feature_ref=ref) for each, ref in zip(supervised, refs, strict=True)]
        passed = [draft.forward_backward(data, "eagle3") for data in (captured.result(120), from_policy)]
        stepped = draft.optim_step(ADAM)
        faults.get(step, do_nothing)()
        results.losses.append([each.result(120).metrics["loss:sum"] for each in passed])
        stepped.result(120)
        results.samples.append(
            _sampled(service, path, _saved(draft, f"draft-{step}"), faults.get(100 + step, do_nothing))
        )
    used = service.get_limits().feature_bytes
    assert used is not None
    results.feature_bytes = int(used.used)
    return results


def _saved(client: TrainingClient, name: str) -> str:
    path = client.save_weights_for_sampler(name).result(120).path
    assert path is not None
    return path


def _sampled(service: ServiceClient, path: str, draft_path: str, fault: Callable[[], None]) -> list[list[int]]:
    sampler = service.create_sampling_client(model_path=path, draft_path=draft_path)
    params = [SamplingParams(max_tokens=48, temperature=each, seed=7, stop=[]) for each in (0.0, 1.0)]
    futures = [sampler.sample(prompt, 1, each) for prompt in PROMPTS for each in params]
    fault()
    responses = [future.result(120) for future in futures]
    assert all(response.guesses is not None for response in responses)
    return [response.sequences[0].tokens.tolist() for response in responses]


def delayed(crashing: Crashing, strikes: Mapping[int, str]) -> Faults:
    """Each strike happens within half a second: during a step's passes, and during the samples of the step before."""
    drawn = random.Random(0)

    def strike(killed: str) -> None:
        time.sleep(drawn.uniform(0, 0.5))
        crashing.strike(killed)

    pass_faults = {step: partial(strike, killed) for step, killed in strikes.items()}
    return pass_faults | {100 + step - 1: fault for step, fault in pass_faults.items()}


@pytest.mark.parametrize(
    "fields", [{}, {"target_repr": "pruned_logits", "draft_vocab_size": 48}], ids=["hidden_state", "pruned_logits"]
)
def test_draft_training_survives_crashes_unchanged(
    fields: dict[str, Any], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    found = []
    for name, strikes in (("undisturbed", {}), ("struck", STRIKES)):
        with (
            Crashing(tiny_models["qwen3"], tmp_path / name).running() as crashing,
            ServiceClient(crashing.url, "tml-draft") as service,
        ):
            found.append(trained(service, delayed(crashing, strikes), fields))
    wanted, struck = found
    np.testing.assert_allclose(struck.losses, wanted.losses, rtol=TOLERANCE)
    assert not np.allclose(wanted.losses[1:], wanted.losses[:-1], rtol=TOLERANCE), "the draft does not learn"
    assert struck.samples == wanted.samples
    assert struck.feature_bytes == wanted.feature_bytes == 0
