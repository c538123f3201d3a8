"""Unpaired surrogates and NUL, which JSON can express but databases and answers cannot hold: refused in every
string."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from sqlalchemy import text
from trainhouse.schemas import checkpoints, drafts, futures, models, sampling, training
from trainhouse.schemas.codec import (
    PROTOBUF,
    check_json_text,
    decode_forward_backward,
    decode_model,
    encode_forward_backward_request,
)
from trainhouse.schemas.errors import RequestError
from trainhouse.server.http.errors import error_response

from ..api import ALICE, Api

pytestmark = pytest.mark.anyio

HALVES = ("\ud800", "a\udfffb", "\ude00\ud83d")
OPENAI = ("/v1/completions", "/v1/chat/completions")
"""Routes whose prompts may contain NUL, which is a token like any other."""


def spoiled(value: Any, by: str) -> Iterator[Any]:
    """Yields copies of the JSON value with one string, or one key, replaced: each in turn."""
    if isinstance(value, str):
        yield by
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            for other in spoiled(entry, by):
                yield [*value[:index], other, *value[index + 1 :]]
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield {other: each for other, each in value.items() if other != key} | {f"{key}{by}": entry}
            for other in spoiled(entry, by):
                yield value | {key: other}


@pytest.mark.slow
async def test_no_route_accepts_a_string_that_cannot_be_stored(app: FastAPI) -> None:
    headers = {"X-API-Key": ALICE, "Content-Type": "application/json"}
    num_sent = 0
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path, methods in app.openapi()["paths"].items():
            for method, operation in methods.items():
                content = operation.get("requestBody", {}).get("content", {})
                example = copy.deepcopy(content.get("application/json", {}).get("example"))
                if example is None:
                    continue
                example |= {"user_metadata": {"a": "b", "c": [{"d": "e"}]}, "extra": ["f"]}
                for by in (*HALVES, *(() if path in OPENAI else ("a\0",))):
                    for body in spoiled(example, by):
                        answer = await client.request(method, path, content=json.dumps(body), headers=headers)
                        assert answer.status_code == 400, (method, path, body, answer.text)
                        num_sent += 1
    assert num_sent > 500


def wire_models() -> Iterator[type[BaseModel]]:
    for module in (checkpoints, drafts, futures, models, sampling, training):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, training.Wire) and kind.__module__ == module.__name__:
                yield kind


@pytest.mark.parametrize("kind", list(wire_models()), ids=lambda kind: kind.__name__)
def test_no_schema_accepts_a_string_that_cannot_be_stored(kind: type[BaseModel]) -> None:
    """Every field is tried, with values at any depth, regardless of its type."""
    decode = partial(decode_model, kind)
    for name in kind.model_fields:
        for value in ("\ud800", "a\0b", ["\ud800"], {"\ud800": 1}, {"a": {"b": ["\0"]}}):
            with pytest.raises(RequestError, match="neither NUL nor half a surrogate pair") as refused:
                decode(json.dumps({name: value}).encode())
            assert refused.value.status == 400


@pytest.mark.parametrize(
    ("body", "is_fine"),
    [
        (rb'"\ud83d\ude00"', True),
        (rb'"\uD83D\uDE00 \\ud800 \\u0000 \\\\u0000"', True),
        ('"😀 é"'.encode(), True),
        (rb'"\ud800"', False),
        (rb'"\\\ud800"', False),
        (rb'"\ud83d\\ude00"', False),
        (rb'"\ud83d\ud83d\ude00"', False),
        (rb'"\u0000"', False),
        (b'"\xed\xa0\x80"', False),
        ('"a"'.encode("utf-16"), False),
    ],
)
def test_check_json_text_accepts_pairs_and_refuses_halves(body: bytes, is_fine: bool) -> None:
    if is_fine:
        check_json_text(body)
        return
    with pytest.raises(ValueError, match=r"surrogate pair|not UTF-8"):
        check_json_text(body)


def test_nul_in_protobuf_names_is_refused() -> None:
    good = training.ForwardBackwardRequest("m", 1, (training.Datum(np.array([5], np.int32)),), "cross_entropy")
    assert decode_forward_backward(encode_forward_backward_request(good), PROTOBUF).model_id == "m"
    for name in ("model_id", "loss_fn", "capture_for"):
        body = encode_forward_backward_request(replace(good, **{name: "a\0b"}))
        with pytest.raises(RequestError, match=name):
            decode_forward_backward(body, PROTOBUF)


async def test_a_session_stored_with_an_unpaired_surrogate_is_shown(api: Api) -> None:
    """Earlier versions stored such sessions."""
    session_id = await api.session()
    store = api.services.store
    stored = json.dumps({"a\ud800": "\udfff", "c": "d"})
    statement = text("UPDATE sessions SET user_metadata = :stored, tags = :tags")

    def spoil(connection: Any) -> None:
        connection.execute(statement, {"stored": stored, "tags": json.dumps(["\ud800"])})

    await store.write(spoil)
    api.services.sessions._open.clear()
    answer = await (await api.client()).get(f"/api/v1/sessions/{session_id}")
    assert answer.status_code == 200
    assert answer.json()["user_metadata"] == {"a\ufffd": "\ufffd", "c": "d"}


async def test_an_error_that_quotes_half_a_surrogate_pair_is_answered() -> None:
    """No check of what arrives finds every text that an error may repeat."""
    request = Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""})
    answer = await error_response(request, RequestError("no \ud800 here"))
    assert (answer.status_code, json.loads(bytes(answer.body))) == (400, {"detail": r"no \ud800 here"})
