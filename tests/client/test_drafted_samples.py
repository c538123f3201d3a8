"""Sampling with a draft model through our client."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from trainhouse import AdamParams, Datum, SamplingParams, ServiceClient, TrainingClient

from ..drawn import as_drawn
from ..live import live_server

MODEL = "tiny/qwen3"
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, stop=[])
PROMPTS = [[5, 6, 7], [9, 10], [30, 31, 32, 33]]


@pytest.fixture(scope="module")
def service(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with (
        live_server({MODEL: tiny_models["qwen3"]}, tmp_path_factory.mktemp("server")) as server,
        ServiceClient(server.url, "tml-draft") as client,
    ):
        yield client


def save_for_sampling(draft: TrainingClient, name: str) -> str:
    path = draft.save_weights_for_sampler(name).result(60).path
    assert path is not None
    return path


@pytest.mark.slow
def test_a_draft_trained_on_samples_predicts_them(service: ServiceClient) -> None:
    plain = service.create_sampling_client(MODEL)
    samples = [plain.sample(prompt, 1, GREEDY).result(60) for prompt in PROMPTS]
    assert all(sample.guesses is None for sample in samples)
    draft = service.create_draft_client(MODEL, "eagle3", seed=5)
    untrained = save_for_sampling(draft, "untrained")
    drafted = service.create_sampling_client(MODEL, draft_path=untrained)
    texts = [[*prompt, *sample.sequences[0].tokens] for prompt, sample in zip(PROMPTS, samples, strict=True)]
    for _ in range(80):
        draft.forward_backward([Datum(text, {}) for text in texts], "eagle3")
        draft.optim_step(AdamParams(learning_rate=1e-2)).result(60)
    trained, lengths = save_for_sampling(draft, "trained"), []
    for path in (None, trained):
        lengths.append([])
        for prompt, sample in zip(PROMPTS, samples, strict=True):
            found = drafted.sample(prompt, 1, GREEDY, draft_path=path, num_draft_tokens=3).result(60)
            assert as_drawn(found.sequences[0]) == as_drawn(sample.sequences[0])
            assert found.guesses is not None and len(found.guesses.by_accepted) <= 4
            lengths[-1].append(found.guesses.acceptance_length)
    untrained_length, trained_length = map(np.mean, lengths)
    assert untrained_length < 1.1 and trained_length > 1.5
    assert drafted.sample([5], 1, GREEDY, draft_path="").result(60).guesses is None
    assert drafted.compute_logprobs([5, 6, 7]).result(60)[0] is None
