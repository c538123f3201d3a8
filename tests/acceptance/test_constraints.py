"""Constraints that would crash or hold up the ranks fail alone: the ranks stay up, and other tenants continue."""

from collections.abc import Iterator

import httpx
import psutil
import pytest
from trainhouse import AdamParams, Datum, SamplingParams, ServiceClient
from trainhouse.client.errors import RequestFailedError
from trainhouse.schemas.sampling import Constraint

from ..drawn import as_drawn
from ..live import DEPLOYMENTS, LiveServer, live_server, save_byte_tokenizer
from ..server.sampling.test_constraint_checks import COSTLY
from ..tiny import tiny_model

MODEL = "tiny/chat"
HIDDEN = Constraint(regex="[a-z]{40}(a{1000}){1000}")
"""Costs a second, but only after more tokens than a trial takes."""


@pytest.fixture(scope="module", params=["local", pytest.param("tp=2", marks=[pytest.mark.slow])])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = tiny_model("llama", tmp_path_factory.mktemp("model"))
    save_byte_tokenizer(model)
    with live_server({MODEL: model}, tmp_path_factory.mktemp("state"), **DEPLOYMENTS[request.param]) as running:
        yield running


def process_ids(server: LiveServer) -> set[int]:
    return {each.pid for each in psutil.Process(server.process.pid).children(recursive=True)}


def constrained(constraint: Constraint, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, constraint=constraint)


def test_costly_constraints_fail_alone(server: LiveServer) -> None:
    data = [Datum(list(range(3, 40)), {"target_tokens": list(range(4, 41))})]
    with ServiceClient(server.url, "tml-attacker") as attacker, ServiceClient(server.url, "tml-other") as other:
        training = other.create_lora_training_client(MODEL, rank=4, seed=1)
        sampling, free = (
            attacker.create_sampling_client(base_model=MODEL),
            other.create_sampling_client(base_model=MODEL),
        )
        free.sample([5, 6], sampling_params=constrained(Constraint(regex="[a-c]{5}"))).result(60)
        before = process_ids(server)
        names = ("rules", "properties")
        failing = [sampling.sample([5, 6], sampling_params=constrained(COSTLY[name])) for name in names]
        failing.append(sampling.sample([5, 6], sampling_params=constrained(HIDDEN)))
        for _ in range(10):
            training.forward_backward(data, "cross_entropy").result(60)
            training.optim_step(AdamParams(learning_rate=1e-3)).result(60)
            found = free.sample([5, 6], 2, constrained(Constraint(regex="[a-c]{5}"))).result(60)
            for sequence in found.sequences:
                assert len(sequence.tokens) == 5 and sequence.stop_reason == "stop"
        for each in failing:
            with pytest.raises(RequestFailedError, match="the constraint ") as failed:
                each.result(120)
            assert failed.value.category == "user"
        assert before <= process_ids(server), "a rank died"


def test_response_format_is_refused_in_the_words_of_the_request(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer tml-openai"}, timeout=120) as client:
        for stream in (False, True):
            schema = {"name": "wide", "schema": COSTLY["patterns"].json_schema}
            body = {"model": MODEL, "prompt": "hi", "max_tokens": 9, "stream": stream}
            answer = client.post(
                "/v1/completions", json=body | {"response_format": {"type": "json_schema", "json_schema": schema}}
            )
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "response_format"
            assert "the constraint is too complex" in answer.json()["error"]["message"]
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 9, "response_format": {"type": "json_object"}}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_samples_under_a_constraint_are_reproducible(server: LiveServer) -> None:
    with ServiceClient(server.url, "tml-again") as service:
        client = service.create_sampling_client(base_model=MODEL)
        params = SamplingParams(max_tokens=60, seed=4, constraint=Constraint(regex="(yes|no|perhaps){3,5}"))
        one, again = (client.sample([5, 6], 4, params).result(60) for _ in range(2))
        for first, second in zip(one.sequences, again.sequences, strict=True):
            assert as_drawn(first) == as_drawn(second)
            assert len(first.tokens) >= 6
