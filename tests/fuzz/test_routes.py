"""Random requests to every route, valid and invalid by the OpenAPI document, with names of existing things.

None is answered with a server error, none breaks a connection, and afterwards the server trains and samples.
"""

import http.client
import itertools
import logging
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from ..live import save_byte_tokenizer
from ..server.real import ALICE, MODEL, server_config
from .effort import MANY, effort
from .extremes import Extremes, Input
from .serving import Served, served

FEW = 2
FEW_EXTREMES = 500
_INPUTS_WITH_SAME_THINGS = 1000
_AT_ONCE = 8
_SECONDS = 20
_DATUM = {"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8]}}
_SAMPLED = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"max_tokens": 2}}
_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}"
    "{% endfor %}{{ tools | tojson if tools }}"
)
_ENDS_THINGS = ("finish", "{name}", "publish", "ttl", "load_weights", "load_checkpoint")
"""Path endings of the routes that end or change things that other requests need."""


@dataclass
class Client:
    server: Served
    http: requests.Session = field(default_factory=requests.Session)
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.http.headers["X-API-Key"] = ALICE

    def post(self, route: str, body: object) -> requests.Response:
        return self.http.post(f"{self.server.url}/api/v1/{route}", json=body, timeout=_SECONDS)

    def do(self, route: str, body: object) -> dict:
        """Submits an operation and returns its result."""
        submitted = self.post(route, body)
        assert submitted.status_code == 200, submitted.text
        while (
            answer := self.post("retrieve_future", {"request_id": submitted.json()["request_id"]})
        ).status_code == 408:
            pass
        return answer.json()

    def send(self, case: Case) -> requests.Response | schemathesis.Response:
        self.num_requests += 1
        headers = {"X-API-Key": ALICE}
        return case.call(base_url=self.server.url, session=self.http, headers=headers, timeout=_SECONDS)

    def things(self) -> Mapping[str, object]:
        """Creates one thing of each kind; returns their names by the names that paths and bodies have for them."""
        session_id = self.post("create_session", {"sdk_version": "fuzz"}).json()["session_id"]
        new = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 2}}
        model_id = self.do("create_model", new)["model_id"]
        path = self.do("save_weights", {"model_id": model_id, "path": "saved"})["path"]
        sampled = self.do("save_weights_for_sampler", {"model_id": model_id, "path": "saved"})["path"]
        sampler_id = self.do("save_weights_for_sampler", {"model_id": model_id})["sampling_session_id"]
        ids = {"session_id": session_id, "model_id": model_id, "run_id": model_id, "request_id": f"{model_id}:1"}
        samplers = dict.fromkeys(("sampler_id", "sampling_session_id", "model"), sampler_id)
        paths = dict.fromkeys(("tinker_path", "source_path"), path) | {"model_path": sampled}
        return ids | samplers | paths | {"base_model": MODEL, "kind": "weights", "name": "saved"}


@pytest.fixture(scope="module")
def client(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = tmp_path_factory.mktemp("bytes") / "model"
    shutil.copytree(tiny_models["qwen3"], model)
    save_byte_tokenizer(model)
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    limits = {"long_poll_seconds": 0.5, "max_context_length": 64, "max_lora_rank": 4, "seq_gap_seconds": 1}
    config = server_config(model, tmp_path_factory.mktemp("state"), **limits)
    with served(config) as server:
        client = Client(server)
        yield client
        client.http.close()


@pytest.fixture
def errors() -> Iterator[list[logging.LogRecord]]:
    """The errors that the server logs."""
    kept = _Kept(logging.ERROR)
    logging.getLogger().addHandler(kept)
    yield kept.records
    logging.getLogger().removeHandler(kept)


class _Kept(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [FEW, pytest.param(MANY, marks=[pytest.mark.full, pytest.mark.timeout(7200)])])
def test_no_request_is_answered_with_a_server_error(
    client: Client, errors: list[logging.LogRecord], num_examples: int
) -> None:
    schema = schemathesis.openapi.from_dict(client.server.document)
    lasting = client.things()
    operations = [found.ok() for found in schema.get_all_operations()]
    failures = []
    for operation in operations:
        things = client.things() if operation.path.endswith(_ENDS_THINGS) else lasting
        failures += _failures(client, operation, things, num_examples)
    assert not failures, "\n".join(failures)
    assert not errors, errors[0].getMessage()
    _assert_server_works(client)
    print(f"{client.num_requests} requests to {len(operations)} routes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_inputs", [FEW_EXTREMES, pytest.param(20 * MANY, marks=[pytest.mark.full, pytest.mark.timeout(7200)])]
)
def test_no_extreme_request_is_answered_with_a_server_error(
    client: Client, errors: list[logging.LogRecord], num_inputs: int
) -> None:
    """Surrogates, NUL, numbers beyond all bounds, nesting, wrong types, broken and random bytes, in all routes."""
    seed = 0 if num_inputs == FEW_EXTREMES else random.randrange(1 << 32)
    failures, statuses, left = [], Counter[int](), num_inputs
    while left:
        extremes = Extremes(client.server.document, client.things(), seed + left)
        inputs = [extremes.next() for _ in range(min(left, _INPUTS_WITH_SAME_THINGS))]
        left -= len(inputs)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            answers = list(threads.map(partial(_answers, client.server.url), _dealt(inputs)))
        for answer in itertools.chain.from_iterable(answers):
            statuses[answer.status] += 1
            if not 200 <= answer.status < 500:
                failures.append(f"{answer.status} {answer.sent}: {answer.text[:300]}")
        failures += _failed_by_server(client, itertools.chain.from_iterable(answers))
    assert not failures, f"seed {seed}\n" + "\n".join(failures[:50])
    assert not errors, f"seed {seed}: {errors[0].getMessage()}"
    assert client.http.get(f"{client.server.url}/api/v1/healthz", timeout=_SECONDS).status_code == 200
    _assert_server_works(client)
    print(f"{num_inputs} extremes: {dict(statuses)}")


def _failed_by_server(client: Client, answers: Iterable["Answer"]) -> Iterator[str]:
    """Waits for the results of what was accepted."""
    for answer in answers:
        if not (found := re.match('{"request_id":"([^"]+)"', answer.text)):
            continue
        while (result := client.post("retrieve_future", {"request_id": found[1]})).status_code == 408:
            pass
        if result.json().get("category") == "server":
            yield f"{result.text} {answer.sent}"


@dataclass(frozen=True)
class Answer:
    """Holds the answer to an input; status is 0 if no answer arrived."""

    sent: Input
    status: int
    text: str


def _dealt(inputs: Sequence[Input]) -> list[Sequence[Input]]:
    return [inputs[start::_AT_ONCE] for start in range(_AT_ONCE)]


def _answers(url: str, inputs: Sequence[Input]) -> list[Answer]:
    """Sends the inputs one after another, over one connection where possible."""
    address = urlsplit(url)
    assert address.hostname and address.port
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=3 * _SECONDS)
    try:
        return [_answer(connection, one) for one in inputs]
    finally:
        connection.close()


def _answer(connection: http.client.HTTPConnection, sent: Input) -> Answer:
    headers = {"X-API-Key": ALICE} | dict(sent.headers)
    for is_last in (False, True):
        try:
            connection.request(sent.method, sent.target, sent.body, headers)
            answer = connection.getresponse()
            return Answer(sent, answer.status, answer.read().decode(errors="replace"))
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            # The server may have closed this connection earlier, or closes it unread: a new one gives the real answer.
            if is_last:
                return Answer(sent, 0, repr(error))
    raise AssertionError("unreachable")


def _failures(
    client: Client, operation: schemathesis.APIOperation, things: Mapping[str, object], num_examples: int
) -> list[str]:
    failures = []

    @effort(num_examples)
    @given(case=_cases(operation), are_real=st.booleans())
    def send(case: Case, are_real: bool) -> None:
        if are_real:
            case.path_parameters = _named(case.path_parameters, things)
            case.body = _named(case.body, things)
        answer = client.send(case)
        if answer.status_code >= 500:
            failures.append(f"{case.as_curl_command()}: {answer.text}")

    send()
    return failures


def _cases(operation: schemathesis.APIOperation) -> st.SearchStrategy[Case]:
    """Draws valid cases, and invalid ones if the operation has any input."""
    described = operation.as_strategy(GenerationMode.POSITIVE)
    has_input = operation.body or operation.query or operation.path_parameters
    return described | operation.as_strategy(GenerationMode.NEGATIVE) if has_input else described


def _named(value: object, things: Mapping[str, object]) -> object:
    """Returns the value with made-up names replaced by those of existing things."""
    if isinstance(value, list):
        return [_named(entry, things) for entry in value]
    if isinstance(value, dict):
        return {key: things[key] if key in things else _named(entry, things) for key, entry in value.items()}
    return value


def _assert_server_works(client: Client) -> None:
    things = client.things()
    model = {"model_id": things["model_id"]}
    trained = client.do("forward_backward", model | {"loss_fn": "cross_entropy", "data": [_DATUM]})
    assert trained["metrics"]["loss:sum"] > 0
    assert "metrics" in client.do("optim_step", model | {"adam_params": {}})
    assert client.do("asample", {"sampling_session_id": things["sampler_id"]} | _SAMPLED)["sequences"]
