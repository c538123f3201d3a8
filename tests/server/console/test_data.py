"""The page of data: what it shows of each token, and what it refuses."""

import json
import re

import httpx
import pytest

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
HEADERS = {"X-API-Key": "tml-console-data"}


def show(server: LiveServer, text: str | bytes, model: str = "tiny/chat") -> httpx.Response:
    # The first request reads the tokenizer, which takes seconds.
    return httpx.post(f"{server.url}/console/data", params={"model": model}, content=text, headers=HEADERS, timeout=60)


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


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("{oops}", 400, "line 1 is not JSON"),
        ("[" * 100_000, 400, "the text is not JSON"),
        ("3", 400, "the text is '3': expected a datum"),
        ('{"messages": []}', 400, "line 1 is no datum, since it has no model_input. A chat or a row"),
        (b"\xff", 400, "is not JSON"),
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
