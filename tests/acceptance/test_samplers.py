"""The official SDK against servers that sample in separate workers, or in vLLM."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from ..drawn import as_drawn
from ..live import DEPLOYMENTS, EACH_LAYOUT, LiveServer, live_server, save_byte_tokenizer
from ..official import official_service
from ..tiny import tiny_model
from .test_official_sdk import batch, datum, logprobs_of, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(600),
]

MODEL = "tiny/qwen3"
PROMPT = [7, 8, 9, 10]
END = 2


# Layouts of training and of the samplers.
FSDP_AND_TP = {"parallel": "fsdp=2", "sampler_workers": 1, "sampler_parallel": "tp=2"}


@pytest.fixture(
    scope="module",
    params=[
        *EACH_LAYOUT,
        pytest.param("fsdp=2, samplers tp=2", marks=pytest.mark.full),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Covers each layout of training, and once a different layout of samplers. Uses head_dim 32, because vLLM's CPU
    attention does not support 16.
    """
    model = tiny_model("qwen3", tmp_path_factory.mktemp("model"), head_dim=32)
    save_byte_tokenizer(model)
    if request.param == "vllm":
        options = {"sampler": "vllm", "vllm_python": request.getfixturevalue("vllm_python"), "max_lora_rank": 8}
    elif request.param in DEPLOYMENTS:
        options = {"sampler_workers": 2} | DEPLOYMENTS[request.param]
    else:
        options = FSDP_AND_TP
    with live_server({MODEL: model}, tmp_path_factory.mktemp("state"), **options) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with official_service(server.url, "tml-acceptance") as client:
        yield client


@pytest.fixture(scope="module")
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=8, seed=1).result(60)


def test_sample_logprobs_equal_the_trainers(training: tinker.TrainingClient) -> None:
    train(training, batch(), 8)
    sampler = training.save_weights_and_get_sampling_client().result(60)
    params = types.SamplingParams(max_tokens=12, temperature=0.9, seed=3, stop=[])
    response = sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples=3, sampling_params=params).result(120)
    assert len({tuple(sequence.tokens) for sequence in response.sequences}) == 3
    for sequence in response.sequences:
        assert len(sequence.tokens) == 12 and sequence.stop_reason == "length"
        data = [datum(PROMPT + list(sequence.tokens))]
        trainer = logprobs_of(training.forward(data, "cross_entropy").result(60))[len(PROMPT) - 1 :]
        np.testing.assert_allclose(trainer, sequence.logprobs, atol=1e-3)


def test_samplers_keep_their_weights_and_new_ones_have_new_weights(training: tinker.TrainingClient) -> None:
    prompt = types.ModelInput.from_ints([*PROMPT, 11, 12, 13])
    earlier = training.save_weights_and_get_sampling_client().result(60)
    before = earlier.compute_logprobs(prompt).result(60)
    train(training, batch(seed=1), 4)
    later = training.save_weights_and_get_sampling_client().result(60)
    after = later.compute_logprobs(prompt).result(60)
    np.testing.assert_allclose(earlier.compute_logprobs(prompt).result(60)[1:], before[1:], atol=1e-3)
    assert not np.allclose(after[1:], before[1:], atol=1e-2)
    forward = logprobs_of(training.forward([datum([*PROMPT, 11, 12, 13])], "cross_entropy").result(60))
    np.testing.assert_allclose(np.asarray(after[1:], dtype=np.float64), forward, atol=1e-3)


def test_seeds_repeat_for_named_weights_and_the_base(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = training.save_weights_for_sampler("kept").result(60).path
    params = types.SamplingParams(max_tokens=8, seed=11, stop=[])
    drawn = []
    for sampler in (
        service.create_sampling_client(model_path=path).result(60),
        service.create_sampling_client(base_model=MODEL).result(60),
    ):
        tokens = [
            [
                as_drawn(one)
                for one in sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params).result(60).sequences
            ]
            for _ in range(2)
        ]
        assert tokens[0] == tokens[1] and tokens[0][0] != tokens[0][1]
        drawn.append(tokens[0])
    assert drawn[0] != drawn[1]


def test_stops_are_added_to_the_end_tokens_and_only_an_empty_list_removes_them(service: tinker.ServiceClient) -> None:
    """The hosted service does so: renderers of tinker-cookbook for base models give one string, and expect answers that
    end with the end token."""
    sampler = service.create_sampling_client(base_model=MODEL).result(60)

    def drawn(stop: list[str] | str | list[int] | None) -> list[types.SampledSequence]:
        params = types.SamplingParams(max_tokens=150, seed=3, stop=stop)
        return list(sampler.sample(types.ModelInput.from_ints(PROMPT), 32, params).result(120).sequences)

    endless = [as_drawn(one) for one in drawn([])]
    assert all(len(tokens) == 150 for tokens in endless)
    num_ended = sum(END in tokens for tokens in endless)
    assert num_ended > 4
    unlikely = ["\n\nUser:", "\n\nAssistant:"]
    cases = {None: [END], unlikely[0]: [END], tuple(unlikely): [END], (77,): [END, 77]}
    for stop, ends in cases.items():
        for sequence, tokens in zip(drawn(list(stop) if isinstance(stop, tuple) else stop), endless, strict=True):
            last = min((tokens.index(end) for end in ends if end in tokens), default=len(tokens))
            assert as_drawn(sequence) == tokens[: last + 1]
            if list(sequence.tokens) == tokens[: last + 1]:
                assert sequence.stop_reason == ("stop" if last < len(tokens) else "length")


def test_sampling_and_training_run_at_the_same_time(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client().result(60)
    params = types.SamplingParams(max_tokens=200, seed=5, stop=[])
    sampling = [sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params) for _ in range(4)]
    assert np.isfinite(train(training, batch(seed=2), 5)).all()
    responses = [each.result(120) for each in sampling]
    assert len({tuple(tuple(one.tokens) for one in response.sequences) for response in responses}) == 1
