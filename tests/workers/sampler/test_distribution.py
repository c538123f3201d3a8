"""Tests samples against the exact probabilities of all sequences, enumerated over a tiny vocabulary."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.batch.validated import ModelLimits
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler.engine import SamplingEngine
from trainhouse.workers.sampler.shared_state import SharedState
from transformers import AutoModelForCausalLM

from ...tiny import tiny_model
from ..adapted import SIZES, Adapted
from ..jobs import answers, job

VOCAB, LENGTH = 8, 3
pytestmark = pytest.mark.slow

PROMPT = (5, 7, 3, 3, 6)
NUM_SEQUENCES, NUM_JOBS = 10_000, 8
LEAST_P_VALUE = 1e-4

Params = Mapping[str, Any]
"""Fields of SamplingParams."""


@dataclass(frozen=True)
class Case:
    """Parameters of requests, and wrong ones whose distribution the test must reject."""

    params: Params
    wrong: tuple[Params, ...]


CASES = {
    "unfiltered": Case({}, ({"temperature": 1.15}, {"temperature": 0.9}, {"top_k": 7}, {"top_p": 0.98})),
    "cold": Case({"temperature": 0.6}, ({"temperature": 0.66}, {"temperature": 0.54})),
    "hot": Case({"temperature": 1.8}, ({"temperature": 2.3}, {"temperature": 1.5})),
    "greedy": Case({"temperature": 0.0}, ({"temperature": 0.1}, {"top_k": 2})),
    "top_k": Case({"top_k": 4}, ({"top_k": 3}, {"top_k": 5}, {"top_k": 4, "temperature": 1.15})),
    "top_p": Case({"top_p": 0.8}, ({"top_p": 0.9}, {"top_p": 0.7}, {"top_p": 0.8, "temperature": 1.15})),
    "min_p": Case({"min_p": 0.2}, ({"min_p": 0.3}, {"min_p": 0.1}, {"min_p": 0.2, "temperature": 1.15})),
    "min_p and top_p": Case(
        {"min_p": 0.2, "top_p": 0.9}, ({"min_p": 0.2}, {"top_p": 0.9}, {"min_p": 0.2, "top_p": 0.8})
    ),
    "all": Case(
        {"temperature": 1.4, "top_k": 6, "top_p": 0.85},
        (
            {"temperature": 1.4, "top_k": 7, "top_p": 0.85},
            {"temperature": 1.4, "top_k": 6, "top_p": 0.75},
            {"temperature": 1.4, "top_k": 6},
            {"temperature": 1.2, "top_k": 6, "top_p": 0.85},
        ),
    ),
}


def filtered(logits: np.ndarray, params: Params) -> np.ndarray:
    """Returns probabilities, float64 [VOCAB]: temperature first, then each filter on what the previous one kept."""
    temperature = params.get("temperature", 1.0)
    if temperature == 0:
        return np.eye(VOCAB)[logits.argmax()]
    exact = np.exp(logits.astype(np.float64) / temperature)
    exact /= exact.sum()
    for name, keeps in FILTERS.items():
        if name in params:
            exact = np.where(keeps(exact, params[name]), exact, 0)
            exact /= exact.sum()
    return exact


def keeps_top_k(exact: np.ndarray, top_k: float) -> np.ndarray:
    return exact >= np.sort(exact)[-int(top_k)]


def keeps_top_p(exact: np.ndarray, top_p: float) -> np.ndarray:
    """Keeps the smallest set of likeliest tokens that holds top_p (arXiv 1904.09751)."""
    likelier = np.array([exact[exact > each].sum() for each in exact])
    return likelier < top_p


def keeps_min_p(exact: np.ndarray, min_p: float) -> np.ndarray:
    """Keeps tokens at least min_p times as likely as the likeliest (arXiv 2407.01082)."""
    return exact >= min_p * exact.max()


FILTERS: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "min_p": keeps_min_p,
    "top_k": keeps_top_k,
    "top_p": keeps_top_p,
}


def test_reference_filters_keep_the_right_tokens() -> None:
    logits = np.full(VOCAB, -100.0)
    logits[:4] = np.log([0.5, 0.1, 0.25, 0.15])

    def kept(**params: float) -> list[float]:
        return filtered(logits, params)[:4].round(3).tolist()

    assert kept() == [0.5, 0.1, 0.25, 0.15]
    assert kept(top_k=2) == kept(top_p=0.6) == kept(min_p=0.4) == [0.667, 0, 0.333, 0]
    assert kept(top_p=0.8) == kept(top_k=3) == [0.556, 0, 0.278, 0.167]
    assert kept(top_k=3, top_p=0.8) == [0.667, 0, 0.333, 0], "top_p applies to what top_k kept"
    assert kept(min_p=0.4, top_p=0.6) == [1, 0, 0, 0], "and to what min_p kept"
    assert kept(temperature=0.5) == [0.725, 0.029, 0.181, 0.065]
    assert kept(temperature=0) == [1, 0, 0, 0]


@dataclass(frozen=True)
class Model:
    """A model with its logits, float32 [VOCAB], after each prefix of up to LENGTH - 1 sampled tokens."""

    directory: Path
    next_logits: Mapping[tuple[int, ...], np.ndarray]

    def exact(self, params: Params) -> np.ndarray:
        """Returns the probability of every sequence, float64 [VOCAB] * LENGTH."""
        joint = np.ones(())
        for length in range(LENGTH):
            prefixes = itertools.product(range(VOCAB), repeat=length)
            rows = [filtered(self.next_logits[prefix], params) for prefix in prefixes]
            joint = joint[..., None] * np.reshape(rows, (VOCAB,) * (length + 1))
        return joint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tiny_model("qwen3", tmp_path_factory.mktemp("model"), vocab_size=VOCAB, initializer_range=0.15)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prefixes = [prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCAB), repeat=length)]
    with torch.no_grad():
        logits = [reference(torch.tensor([PROMPT + prefix])).logits[0, -1].numpy() for prefix in prefixes]
    return Model(directory, dict(zip(prefixes, logits, strict=True)))


Drawn = Mapping[str, np.ndarray]
"""Case -> int64 [NUM_SEQUENCES, LENGTH], in the order of jobs and of their samples."""


@pytest.fixture(scope="module")
def drawn(model: Model) -> Drawn:
    """Draws several jobs of each case, each with another seed; the cases are mixed in the batches."""
    adapted = Adapted(model.directory)
    served = WorkerConfig(ServedModel("tiny", str(model.directory)), device="cpu", **SIZES)
    sampler = SamplingEngine(SharedState(adapted.base, adapted.models, ModelLimits(VOCAB, 64), served))
    jobs = [
        job(
            f"{name} {seed}", PROMPT, seed=seed, num_samples=NUM_SEQUENCES // NUM_JOBS, max_tokens=LENGTH, **case.params
        )
        for seed in range(NUM_JOBS)
        for name, case in CASES.items()
    ]
    found = answers(sampler.slice, *jobs)
    return {name: np.concatenate([tokens_of(found[f"{name} {seed}"]) for seed in range(NUM_JOBS)]) for name in CASES}


def tokens_of(response: SampleResponse) -> np.ndarray:
    return np.array([sequence.tokens for sequence in response.sequences], dtype=np.int64)


def p_value(outcomes: np.ndarray, exact: np.ndarray) -> float:
    """Returns the p-value of Pearson's chi-square test; zero if an impossible outcome was drawn.

    Outcomes with fewer than 8 expected draws share one bin.

    Args:
        outcomes: int64, [draws, n].
        exact: probabilities, [VOCAB] * n.
    """
    counts = np.zeros(exact.shape)
    np.add.at(counts, tuple(outcomes.T), 1)
    if counts[exact == 0].any():
        return 0.0
    expected = exact * len(outcomes)
    rare = expected < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2 + 1e-9), torch.tensor(statistic / 2)))


@pytest.mark.parametrize("name", CASES)
def test_sequences_follow_the_enumerated_distribution(model: Model, drawn: Drawn, name: str) -> None:
    assert p_value(drawn[name], model.exact(CASES[name].params)) > LEAST_P_VALUE


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, case in CASES.items() for wrong in case.wrong], ids=str
)
def test_the_distribution_of_other_parameters_is_rejected(model: Model, drawn: Drawn, name: str, wrong: Params) -> None:
    assert p_value(drawn[name], model.exact(wrong)) < LEAST_P_VALUE / 100


def marginal(exact: np.ndarray, position: int) -> np.ndarray:
    return exact.sum(tuple(axis for axis in range(LENGTH) if axis != position))


POSITIONS = list(itertools.product(range(LENGTH), repeat=2))


@pytest.mark.parametrize(("one", "other"), POSITIONS)
def test_consecutive_samples_and_seeds_are_independent(model: Model, drawn: Drawn, one: int, other: int) -> None:
    """Compares the frequencies of pairs of tokens with the products of their probabilities."""
    exact, tokens = model.exact({}), drawn["unfiltered"]
    independent = np.multiply.outer(marginal(exact, one), marginal(exact, other))
    by_seed = tokens.reshape(NUM_JOBS, -1, LENGTH)
    for first, second in ((tokens[::2], tokens[1::2]), (by_seed[::2], by_seed[1::2])):
        pairs = np.stack([first[..., one].ravel(), second[..., other].ravel()], axis=1)
        assert p_value(pairs, independent) > LEAST_P_VALUE


def test_dependent_tokens_are_detected(model: Model, drawn: Drawn) -> None:
    """Pairs tokens of one sample, which depend on each other, and then samples of which one in ten is a copy."""
    exact, tokens = model.exact({}), drawn["unfiltered"]
    for one, other in ((0, 1), (1, 2), (0, 0)):
        independent = np.multiply.outer(marginal(exact, one), marginal(exact, other))
        assert p_value(tokens[:, [one, other]], independent) < LEAST_P_VALUE / 100
    first, second = tokens[::2, 0], tokens[1::2, 0].copy()
    second[::10] = first[::10]
    independent = np.multiply.outer(marginal(exact, 0), marginal(exact, 0))
    assert p_value(np.stack([first, second], axis=1), independent) < LEAST_P_VALUE / 100


def test_p_values_of_correct_draws_are_uniform(model: Model) -> None:
    """Tests p_value on numpy's draws: it rejects neither too often nor too rarely."""
    exact = model.exact({})
    random = np.random.default_rng(0)
    draws = random.choice(exact.size, (100, NUM_SEQUENCES), p=exact.ravel())
    found = [p_value(np.stack(np.unravel_index(row, exact.shape), axis=1), exact) for row in draws]
    shares = np.histogram(found, bins=4, range=(0, 1))[0]
    assert shares.min() > 10 and max(shares) < 45, shares
