"""The OpenAPI document: every route has a description and an example, and every example works."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainhouse.schemas.verbs import BASE_MODEL, SESSION_ID
from trainhouse.workers.dispatch import WorkerDispatch

from ...live import save_byte_tokenizer
from ..real import ALICE, MODEL, PROTOBUF, Server, running_server, server_config

pytestmark = pytest.mark.anyio

FIRST = ("create_session", "create_model", "forward_backward", "optim_step", "save_weights", "create_sampling_session")
LAST = ("unload_model", "publish", "{name}", "me", "finish")
"""Path endings of routes that delete or end things, in the order to call them; `{name}`: a checkpoint, `me`: a key."""
FILES = ("post", "/api/v1/import_weights")
"""Takes files, so it has no JSON example: see test_importing."""
DRAFT_ROUTES = {
    ("post", f"/api/v1/{name}") for name in ("set_target", "build_vocab_map", "capture", "release_features")
}
"""Routes of draft models: see test_drafts."""


@pytest.fixture
async def server(dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path) -> AsyncIterator[Server]:
    """A server whose model has a tokenizer."""
    shutil.copytree(tiny_models["qwen3"], tmp_path / "model")
    save_byte_tokenizer(tmp_path / "model")
    async with running_server(server_config(tmp_path / "model", tmp_path / "state"), dispatch) as running:
        yield running


async def operations_in_order(server: Server) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns (method, path) -> operation, in an order in which the examples can be sent."""
    paths = (await server.clients[ALICE].get("http://test/openapi.json")).json()["paths"]
    operations = {(method, path): one for path, methods in paths.items() for method, one in methods.items()}

    def position(route: tuple[str, str]) -> int:
        method, path = route
        end = path.rpartition("/")[2]
        if method == "delete" or end in ("finish", "unload_model"):
            return len(FIRST) + 1 + LAST.index(end)
        return FIRST.index(end) if end in FIRST else len(FIRST)

    return {route: operations[route] for route in sorted(operations, key=position)}


async def send(server: Server, method: str, path: str, operation: dict[str, Any], session_id: str) -> httpx.Response:
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            ((_, example),) = parameter["examples"].items()
            path = path.replace(f"{{{parameter['name']}}}", example["value"])
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
    live = json.dumps([path, body]).replace(SESSION_ID, session_id).replace(BASE_MODEL, MODEL)
    path, body = json.loads(live)
    return await server.clients[ALICE].request(method, f"http://test{path}", json=body, headers={"Prefer": "wait=30"})


async def test_every_example_works(server: Server) -> None:
    session_id = await server.create_session()
    for (method, path), operation in (await operations_in_order(server)).items():
        if (method, path) in {FILES, *DRAFT_ROUTES}:
            continue
        answer = await send(server, method, path, operation, session_id)
        if (method, path) == ("delete", "/api/v1/auth/apikey/me"):
            assert answer.status_code == 404 and "did not create the key" in answer.json()["detail"], "a made-up key"
        else:
            redirects = path.endswith("/archive") and answer.is_redirect
            assert (answer.is_success or redirects) and '"error"' not in answer.text, (method, path, answer.text)
            assert not answer.text.startswith('{"request_id"'), "Prefer: wait returns the result"


async def test_every_route_has_a_description_and_an_example_body(server: Server) -> None:
    for route, operation in (await operations_in_order(server)).items():
        assert operation.get("description"), route
        if "requestBody" in operation and route != FILES:
            assert operation["requestBody"]["content"]["application/json"]["example"], route
    forward_backward = (await operations_in_order(server))["post", "/api/v1/forward_backward"]
    assert PROTOBUF in forward_backward["requestBody"]["content"]


def unbounded(schema: object, document: dict[str, Any], place: str = "") -> Iterator[str]:
    """Yields the places of integers without both bounds."""
    if isinstance(schema, list):
        for entry in schema:
            yield from unbounded(entry, document, place)
    elif isinstance(schema, dict):
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        bounds = {name.removeprefix("exclusive").lower() for name in schema}
        if schema.get("type") == "integer" and not {"minimum", "maximum"} <= bounds:
            yield place
        for name, entry in schema.items():
            inner = f"{place}.{name}" if place.endswith("properties") else f"{place}/{name}"
            if name not in ("example", "examples", "default"):
                yield from unbounded(entry, document, inner)


async def test_every_integer_of_a_request_has_bounds(server: Server) -> None:
    document = (await server.clients[ALICE].get("http://test/openapi.json")).json()
    found = [
        place
        for (method, path), operation in (await operations_in_order(server)).items()
        for place in unbounded([operation.get("parameters", []), operation.get("requestBody", {})], document, path)
    ]
    assert not found
    assert list(unbounded({"type": "integer", "minimum": 0}, document, "control")) == ["control"]


HUGE = 10**400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_model", {"session_id": "s", "model_seq_id": HUGE, "base_model": "m", "lora_config": {}}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "m", "lora_config": {"rank": HUGE}}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "m", "lora_config": {"seed": -HUGE}}),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": HUGE, "base_model": "m"}),
        ("optim_step", {"model_id": "s:train:0", "seq_id": HUGE, "adam_params": {}}),
        ("save_weights", {"model_id": "s:train:0", "seq_id": HUGE, "path": "a"}),
        ("save_weights_for_sampler", {"model_id": "s:train:0", "seq_id": 1, "sampling_session_seq_id": HUGE}),
        ("load_weights", {"session_id": "s", "model_seq_id": HUGE, "path": "tinker://a/weights/b"}),
        ("copy_weights", {"source_path": "tinker://a/weights/b", "session_id": "s", "model_seq_id": HUGE}),
        ("asample", {"sampling_session_id": "s", "seq_id": HUGE, "prompt": {"chunks": []}}),
        ("asample", {"base_model": MODEL, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [HUGE]}]}}),
        ("asample", {"base_model": MODEL, "prompt": {"chunks": []}, "sampling_params": {"max_tokens": HUGE}}),
        ("asample", {"base_model": MODEL, "prompt": {"chunks": []}, "sampling_params": {"logit_bias": {HUGE: 1}}}),
        ("forward_backward", {"model_id": "s:train:0", "seq_id": HUGE, "loss_fn": "cross_entropy", "data": []}),
        ("retrieve_futures", {"target": {"sampling_session_id": "s", "cloned_sampler_id": HUGE}}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(str(at) for at in value),
)
async def test_an_integer_of_400_digits_is_refused_with_a_short_message(server: Server, path: str, body: dict) -> None:
    refused = await server.clients[ALICE].post(path, json=body)
    assert refused.status_code == 400, refused.text
    assert "00..." in refused.text and len(refused.text) < 400


async def test_the_openapi_document_declares_the_key_header(server: Server) -> None:
    document = (await server.clients[ALICE].get("http://test/openapi.json")).json()
    (scheme,) = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["in"], scheme["name"]) == ("apiKey", "header", "X-API-Key")
    open_routes = [
        route for route, operation in (await operations_in_order(server)).items() if not operation.get("security")
    ]
    assert open_routes == [("get", "/api/v1/healthz"), ("get", "/api/v1/readyz")]


async def test_the_document_is_encoded_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await server.clients[ALICE].get("http://test/openapi.json")
    monkeypatch.setattr(server.app, "openapi", lambda: pytest.fail("it is built again"))
    again = await server.clients[ALICE].get("http://test/openapi.json")
    assert again.content == first.content and again.headers["content-type"] == "application/json"
    assert (await server.clients[ALICE].head("http://test/openapi.json")).status_code == 200
