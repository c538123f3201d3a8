"""No route works without a key, and none shows, uses or changes anything of another tenant.

This is checked for every route of the OpenAPI document.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from ..api import DRAFTS, OPENAI
from ..real import ALICE, BOB, MODEL, Run, Server, batch, sample_body

pytestmark = pytest.mark.anyio

PUBLIC = {
    ("GET", "healthz"): "load balancers have no key, and it shows only that the process answers",
    ("GET", "readyz"): "the same, and how far the server is with its start, in numbers",
}
OPEN_PAGES = {
    "/": "leads to the console or to the page below",
    "/docs": "describes the API, shows nothing of any tenant",
    "/docs/{file}": "part of the page above",
    "/docs/start.js": "part of the page above",
    "/openapi.json": "read by the pages above",
    "/metrics": "for Prometheus: takes a key with the scope operator, as ROUTE_SCOPES says",
    "/api/v1/downloads/{run_id}/{kind}/{name}/{file:path}": "signed URLs: the signature grants the access",
    "/api/v1/archives/{run_id}/{kind}/{name}": "signed URLs, too",
}
"""Paths that are not in the OpenAPI document, and why they need no key; the console's: tests/server/console."""

OWN = {
    ("POST", "client/config"),
    ("POST", "client/dynamic_config"),
    ("POST", "create_session"),
    ("POST", "telemetry"),
    ("GET", "get_server_capabilities"),
    ("GET", "limits"),
    ("GET", "workers"),
    ("POST", "import_weights"),
    ("GET", "models/{name}/tokenizer"),
    ("GET", "models/{name}/tokenizer/{file}"),
    ("POST", "auth/token"),
    ("GET", "auth/apikey/me"),
    ("DELETE", "auth/apikey/me"),
    *([("GET", "/v1/models")] if OPENAI else ()),
}
"""Routes that name nothing that belongs to a tenant."""
LISTINGS = {("GET", "training_runs"), ("GET", "checkpoints"), ("GET", "sessions")}
NOTE = "written-by-alice"
CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"


@dataclass
class Things:
    """The things that Alice owns."""

    run: Run
    checkpoint: str
    sampler_weights: str
    sampler_id: str
    sample_request: str

    @property
    def secrets(self) -> tuple[str, ...]:
        """Returns what no other tenant may see: ids of Alice's things and what she wrote about them."""
        return (self.run.session_id, "mine", NOTE)


@pytest.fixture
async def things(server: Server) -> Things:
    session = {"sdk_version": "0.38.0", "tags": [NOTE], "user_metadata": {"note": NOTE}, "display_name": NOTE}
    run = await server.create_run(session_id=(await server.post("create_session", session))["session_id"])
    await run.train(batch(), 1)
    checkpoint = (await run.do("save_weights", path="mine", user_metadata={"note": NOTE}))["path"]
    sampler_weights = (await run.do("save_weights_for_sampler", path="mine"))["path"]
    sampler_id = (await run.do("save_weights_for_sampler"))["sampling_session_id"]
    sampled = await server.post("asample", sample_body(sampler_id))
    return Things(run, checkpoint, sampler_weights, sampler_id, sampled["request_id"])


async def described_routes(server: Server) -> set[tuple[str, str]]:
    paths = (await server.clients[ALICE].get("http://test/openapi.json")).json()["paths"]
    return {(method.upper(), path.removeprefix("/api/v1/")) for path, methods in paths.items() for method in methods}


def requests_of_bob(things: Things, bobs_session: str) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yields method, route and body of requests that name Alice's things wherever one can be named."""
    model_id, session_id = things.run.model_id, things.run.session_id
    model = {"model_id": model_id}
    data = {"loss_fn": "cross_entropy", "data": [{"model_input": [1], "loss_fn_inputs": {"target_tokens": [2]}}]}
    yield "POST", "session_heartbeat", {"session_id": session_id}
    yield "POST", "sessions/{session_id}/finish", {"reason": {"type": "success"}}
    yield "PUT", "sessions/{session_id}/project", {"project_id": "p"}
    yield "GET", "sessions/{session_id}", None
    new_model = {"model_seq_id": 7, "base_model": MODEL, "lora_config": {"rank": 4}}
    yield "POST", "create_model", new_model | {"session_id": session_id}
    if DRAFTS:
        draft = {"model_role": "draft", "draft": {"algorithm": "eagle3"}, "target_path": things.sampler_weights}
        yield "POST", "create_model", {"session_id": bobs_session, "model_seq_id": 0, "base_model": MODEL} | draft
        yield "POST", "set_target", model | {"path": things.sampler_weights}
        yield "POST", "build_vocab_map", model | {"tokens": [[1, 2]]}
        yield "POST", "capture", model | {"data": [{"model_input": [1, 2]}]}
        yield "POST", "release_features", model
    yield "POST", "unload_model", model
    yield "POST", "schedule_checkpoints", model
    yield "POST", "create_evaluation", model | data | {"evaluation": {"name": "a", "every": 1}}
    yield "POST", "delete_evaluation", model | {"name": "a"}
    yield "POST", "get_info", model
    yield "POST", "forward_backward", model | data
    yield "POST", "forward", model | data
    yield "POST", "optim_step", model
    for route in ("save_weights", "save_checkpoint", "save_weights_for_sampler", "save_weights_external"):
        yield "POST", route, model | {"path": "b"}
    yield "POST", "save_weights_for_sampler", model
    for route in ("load_weights", "load_checkpoint"):
        yield "POST", route, model | {"path": things.checkpoint}
        yield "POST", route, {"session_id": session_id, "model_seq_id": 7, "path": things.checkpoint}
        yield "POST", route, {"session_id": bobs_session, "model_seq_id": 0, "path": things.checkpoint}
    new_sampler = {"sampling_session_seq_id": 7}
    yield "POST", "create_sampling_session", new_sampler | {"session_id": session_id, "base_model": MODEL}
    of_weights = new_sampler | {"session_id": bobs_session, "model_path": things.sampler_weights}
    yield "POST", "create_sampling_session", of_weights
    drafted = {"base_model": MODEL, "draft_path": things.sampler_weights}
    yield "POST", "create_sampling_session", new_sampler | {"session_id": bobs_session} | drafted
    yield "GET", "samplers/{sampler_id}", None
    yield "POST", "join_sampling_session", {"sampling_session_id": things.sampler_id}
    for route in ("sample", "asample"):
        yield "POST", route, sample_body(things.sampler_id, 7)
        yield "POST", route, {"model_path": things.sampler_weights, "prompt": sample_body("")["prompt"]}
        yield "POST", route, drafted | {"prompt": sample_body("")["prompt"]}
    for route in ("retrieve_future", "cancel_future"):
        yield "POST", route, {"request_id": f"{model_id}:1"}
        yield "POST", route, {"request_id": things.sample_request}
    yield "POST", "retrieve_futures", {"target": {"sampling_session_id": things.sampler_id}, "timeout": 0}
    yield "GET", "training_runs/{run_id}", None
    yield "GET", "training_runs/{run_id}/checkpoints", None
    yield "GET", "training_runs/{run_id}/metrics", None
    yield "GET", "training_runs/{run_id}/operations", None
    yield "POST", "training_runs/{run_id}/metrics", {"entries": [{"step": 1, "metrics": {"reward": 1.0}}]}
    yield "DELETE", CHECKPOINT, None
    yield "POST", f"{CHECKPOINT}/publish", None
    yield "DELETE", f"{CHECKPOINT}/publish", None
    yield "PUT", f"{CHECKPOINT}/ttl", {"ttl_seconds": 3600}
    yield "GET", f"{CHECKPOINT}/external_weights_urls", None
    yield "GET", f"{CHECKPOINT}/archive", None
    yield "POST", "weights_info", {"tinker_path": things.checkpoint}
    yield "POST", "copy_weights", {"source_path": things.checkpoint}
    for name in (things.sampler_weights, things.sampler_id) if OPENAI else ():
        yield "POST", "/v1/completions", {"model": name, "prompt": [1, 2]}
        yield "POST", "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "hi"}]}
    if OPENAI:
        yield "GET", "/v1/models/{name}", None


async def ask(client: httpx.AsyncClient, method: str, route: str, things: Things, body: object) -> httpx.Response:
    run = things.run
    names = {"session_id": run.session_id, "run_id": run.model_id, "sampler_id": things.sampler_id}
    names["name"] = things.sampler_weights if route.startswith("/v1/") else "mine"
    path = route.format(kind="weights", file="tokenizer.json", **names)
    return await client.request(method, f"http://test{path}" if path.startswith("/") else path, json=body)


def leaked_secrets(sent: tuple[str, object], answer: httpx.Response, things: Things) -> list[str]:
    """Returns the secrets of Alice that the answer shows and the request did not name."""
    asked = f"{answer.request.url}{json.dumps(sent)}"
    headers = " ".join(answer.headers.values())
    return [secret for secret in things.secrets if secret in f"{answer.text}{headers}" and secret not in asked]


async def test_everything_of_another_tenant_is_not_found(server: Server, things: Things) -> None:
    requests = list(requests_of_bob(things, await server.create_session(BOB)))
    for method, route, body in requests:
        answer = await ask(server.clients[BOB], method, route, things, body)
        reason = "error" if route.startswith("/v1/") else "detail"
        assert (answer.status_code, reason in answer.json()) == (404, True), (method, route, body, answer.text)
        assert not leaked_secrets((route, body), answer, things), (method, route, answer.text)
    asked = {(method, route) for method, route, _ in requests}
    described = await described_routes(server)
    untried = described - asked - OWN - LISTINGS - PUBLIC.keys()
    assert not untried, (
        f"request things of another tenant through {untried} in requests_of_bob, or list these routes in OWN"
    )
    assert asked | OWN | LISTINGS | PUBLIC.keys() == described, "there are no such routes"
    print(f"{len(requests)} requests to {len(asked)} routes for things of another tenant")
    assert "metrics" in await server.result(f"{things.run.model_id}:2"), "none of these requests had an effect"
    assert (await server.clients[ALICE].get(f"samplers/{things.sampler_id}")).status_code == 200
    assert await things.run.submit("forward", loss_fn="cross_entropy", data=[{"model_input": [1]}])


async def test_paths_outside_the_openapi_document_are_listed_with_a_reason(server: Server) -> None:
    described = server.app.openapi()["paths"]
    undescribed = {path for path in paths_of(server.app.routes) if path.replace(":path}", "}") not in described}
    assert {path for path in undescribed if not path.startswith("/console")} == OPEN_PAGES.keys()


def paths_of(routes: Iterable[Any]) -> Iterator[str]:
    """Yields the paths of all routes, including those of nested routers."""
    for route in routes:
        if hasattr(route, "endpoint"):
            yield route.path
        else:
            yield from paths_of(route.effective_candidates())


async def test_routes_that_name_nothing_show_nothing_of_another_tenant(server: Server, things: Things) -> None:
    for method, route in OWN - {("DELETE", "auth/apikey/me")}:
        answer = await ask(server.clients[BOB], method, route, things, {} if method == "POST" else None)
        assert answer.status_code < 500 and not leaked_secrets((route, None), answer, things), (route, answer.text)


async def test_listings_show_nothing_of_another_tenant(server: Server, things: Things) -> None:
    for _, route in LISTINGS:
        for parameters in ({}, {"access_scope": "accessible"}):
            seen = await server.clients[BOB].get(route, params=parameters)
            assert not leaked_secrets((route, None), seen, things), route
        assert things.run.session_id in (await server.clients[ALICE].get(route)).text, "its owner sees it"


async def test_a_refused_body_uses_no_seq_id_of_another_tenant(server: Server, things: Things) -> None:
    seq_id = next(things.run.numbers)
    broken = b'{"model_id": "%s", "seq_id": %d, broken' % (things.run.model_id.encode(), seq_id)
    assert (await server.clients[BOB].post("optim_step", content=broken)).status_code == 400
    assert (await things.run.submit("optim_step", seq_id=seq_id))["seq_id"] == seq_id


async def test_without_a_key_every_route_answers_401(server: Server, things: Things) -> None:
    routes = await described_routes(server) - PUBLIC.keys()
    client = server.clients[ALICE]
    key = client.headers.pop("X-API-Key")
    try:
        answers = {
            (method, route): (await ask(client, method, route, things, None)).status_code for method, route in routes
        }
    finally:
        client.headers["X-API-Key"] = key
    assert set(answers.values()) == {401}, answers
