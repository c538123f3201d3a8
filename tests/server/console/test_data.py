"""The page of data: what it shows of each token, and what it refuses."""

import json
import re

import httpx
import pytest
from trainhouse import Datum, ServiceClient

from ...live import LiveServer
from .test_pages import EVIL, unsafe_markup

TOKENS = [*b"Go <b>&"]
DATUM = {
    "model_input": TOKENS,
    "loss_fn_inputs": {
        "target_tokens": [*TOKENS[1:], 33],
        "advantages": [0, 0, 2, -1, 0.1, -2, 0],
        "logprobs": [-0.5] * 7,
    },
}
CHAT = {"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Gone"}]}
HEADERS = {"X-API-Key": "tml-console-data"}


def show(server: LiveServer, text: str | bytes, model: str = "tiny/chat", **query: str) -> httpx.Response:
    # The first request reads the tokenizer, which takes seconds.
    query["model"] = model
    return httpx.post(f"{server.url}/console/data", params=query, content=text, headers=HEADERS, timeout=60)


@pytest.fixture(scope="module")
def spelled(shared_server: LiveServer) -> list[str]:
    """The tokens' texts, by the model's tokenizer."""
    return re.findall(r"<span[^>]*>([^<]*)</span>", show(shared_server, json.dumps(DATUM)).raise_for_status().text)


def test_each_token_has_its_text_its_numbers_and_a_shade(shared_server: LiveServer, spelled: list[str]) -> None:
    page = show(shared_server, json.dumps(DATUM)).raise_for_status().text
    assert "datum 0: 7 tokens, 4 trained on, sum of advantages -0.9" in page
    assert re.findall(r'<span class="(\w+)"', page) == [*["read"] * 3, "up4", "down3", "up1", "down4", "read"]
    assert f'title="token {TOKENS[6]}, advantages -2, logprobs -0.5"' in page
    assert len(spelled) == 8 and len(set(spelled)) == 8 and not list(unsafe_markup(page))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("\n".join([json.dumps(DATUM), "", json.dumps(DATUM)]), 2),
        (json.dumps([DATUM, DATUM], indent=1), 2),
        (json.dumps({"model_id": "a", "forward_backward_input": {"data": [DATUM] * 3}}), 3),
        ("\n".join([json.dumps(DATUM)] * 30), 20),
    ],
    ids=["lines", "a list", "a request", "the first 20"],
)
def test_data_come_as_lines_as_a_list_or_as_a_request(shared_server: LiveServer, text: str, number: int) -> None:
    assert show(shared_server, text).raise_for_status().text.count("<section") == number


def test_chats_and_rows_are_shown_as_the_client_makes_them(shared_server: LiveServer) -> None:
    """The template writes <s>, the content and a line break, and no end token."""
    rows = [CHAT, {"question": "Go", "answer": "Gone"}, {"prompt": "Go", "completion": "!"}]
    page = show(shared_server, "\n".join(map(json.dumps, rows))).raise_for_status().text
    assert page.count("<section") == 3 and "sum of weights 6" in page and "sum of weights 2" in page
    with ServiceClient(shared_server.url, HEADERS["X-API-Key"]) as service:
        tokenizer = service.create_sampling_client("tiny/chat").get_tokenizer()
    for train_on in ("assistant", "last", "all"):
        datum = Datum.from_row(CHAT, tokenizer, train_on)
        assert show(shared_server, json.dumps(CHAT), train_on=train_on).text == show(shared_server, as_json(datum)).text


def as_json(datum: Datum) -> str:
    inputs = {name: values.tolist() for name, values in datum.loss_fn_inputs.items()}
    return json.dumps({"model_input": datum.tokens.tolist(), "loss_fn_inputs": inputs})


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("{oops}", 400, "line 1 is not JSON"),
        ("[" * 100_000, 400, "the text is not JSON"),
        ("3", 400, "the text is '3': expected a datum"),
        ('{"messages": []}', 400, "line 1: messages is empty"),
        ('{"messages": 5}', 400, "line 1: messages is 5: expected a list of messages"),
        (json.dumps(CHAT | {"context": "unread"}), 400, "the column context may be a part of the prompt"),
        (json.dumps({"messages": CHAT["messages"] * 600}), 413, "too long for a page"),
        (json.dumps({"messages": [[[]]] * 9}), 400, "message 0 is of type list"),
        (json.dumps(CHAT)[:-1] + ', "tools": ' + "[" * 150 + "]" * 150 + "}", 400, "ignores tools"),
        (b"\xff", 400, "is not JSON"),
        ('{"prompt": "a\\ud800", "completion": "b"}', 400, "line 1 is not JSON: unexpected end of hex escape"),
        ('{"completion": "b", "a\\ud800": "a"}', 400, "line 1 is not JSON: unexpected end of hex escape"),
        (json.dumps({**CHAT, "tools": '["\\ud800"]'}), 400, "tools is not JSON: unexpected end of hex escape"),
        (json.dumps({"model_input": EVIL}), 400, "model_input"),
        (json.dumps({"model_input": [5] * 30_000, "loss_fn_inputs": {}}), 413, "a page shows at most 20000"),
        (" " * (2 << 20), 413, "1048576 bytes"),
        (json.dumps({"model_input": [5], "loss_fn_inputs": {"target_tokens": [5] * 30_000}}), 413, "at most 20000"),
        (json.dumps({"model_input": [5], "loss_fn_inputs": {"target_tokens": [[]]}}), 400, "shape [1, 0]"),
        ('{"model_input": [5], "loss_fn_inputs": {"target_tokens": [6], "weights": [NaN]}}', 400, "not finite"),
    ],
)
def test_what_is_no_data_is_refused(shared_server: LiveServer, text: str | bytes, status: int, words: str) -> None:
    answer = show(shared_server, text)
    assert answer.status_code == status and words in answer.json()["detail"]


def test_tokens_that_the_tokenizer_does_not_have_are_shown_by_id(shared_server: LiveServer) -> None:
    for token in (-100, 10**6, 2**40):
        datum = {"model_input": [5], "loss_fn_inputs": {"target_tokens": [token]}}
        assert f">token_id:{token}<" in show(shared_server, json.dumps(datum)).raise_for_status().text


def test_a_model_that_is_not_served_is_refused(shared_server: LiveServer) -> None:
    answer = show(shared_server, json.dumps(DATUM), "no/model")
    assert answer.status_code == 404 and "choose one of tiny/chat" in answer.json()["detail"]
