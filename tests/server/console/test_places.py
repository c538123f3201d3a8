"""The console's borders: what leads to it, and what holds for its requests as for all others."""

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from trainhouse.server.console.sign_in import FIRST_STEPS
from trainhouse.server.serving.server_process import greeting
from trainhouse.server.tenants.auth import create_key, list_keys
from trainhouse.server.tenants.scopes import ROUTE_SCOPES, SCOPES

from ..api import Api
from ..routes.test_pages import check_resources
from ..serving.test_connections import serving
from ..tenants.test_auth import check_counted
from ..tenants.test_isolation import paths_of
from ..tenants.test_revocation import answer_after, body_of, head_of, new_run, revoke_here
from .signed_in import PAGE, form_token, new_browser, sign_in

pytestmark = pytest.mark.anyio

README = Path(__file__).resolve().parents[3] / "README.md"
OPEN_PAGES = {
    "/console": "leads to the list of runs",
    "/console/sign-in": "takes a key, for a cookie",
    "/console/sign-out": "ends the session of the cookie",
    "/console/static/{version}/{file}": "part of the pages",
}
"""Paths of the console that need no key, and why."""


async def test_the_server_leads_to_the_console(api: Api) -> None:
    client = await api.client()
    answer = await client.get("/", headers=PAGE)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    body = {"sdk_version": "0.38.0", "tags": []}
    created = (await client.post("/api/v1/create_session", json=body)).json()
    assert created["info_message"] == f"console: http://test/console/sessions/{created['session_id']}"
    ready = greeting(api.services.config, "http://here:1", False)
    assert "\n  http://here:1/console shows runs in a browser, http://here:1/docs the API\n" in ready


async def test_signing_in_loads_resources_only_from_this_server(app: FastAPI) -> None:
    async with new_browser(app) as client:
        await check_resources(client, "/console/sign-in")
        page = await client.get("/console/sign-in", headers={"Host": 'a"><script>'})
    assert page.status_code == 200 and "<script>" not in page.text, "the Host header is escaped"


def test_the_first_steps_match_the_readme() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert FIRST_STEPS.format(url="http://127.0.0.1:8000", key="tml-local", model=model) == code


async def test_paths_without_a_scope_are_listed_with_a_reason(api: Api) -> None:
    paths = {path for path in paths_of(api.app.routes) if path.startswith("/console")}
    assert paths == OPEN_PAGES.keys() | {route.split()[1] for route in ROUTE_SCOPES if "/console/" in route}


@pytest.mark.parametrize("path", ["/console", "/console/runs"])
async def test_made_up_keys_are_counted(app: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    await check_counted(app, monkeypatch, path)


@pytest.mark.parametrize("ends", ["signing out", "revoking"])
async def test_a_browser_that_is_signed_out_while_its_form_arrives_does_nothing(app: FastAPI, ends: str) -> None:
    services = app.state.services
    key = await create_key(services.store, "team", SCOPES)
    run, route = await new_run(services, await services.auth.authenticate(key)), "POST /console/admin/keys"
    body = body_of(app, route)
    async with new_browser(app, "http://localhost") as client:
        await sign_in(client, key)
        token = await form_token(client)

        async def end() -> None:
            if ends == "revoking":
                await revoke_here(services, key)
            else:
                assert (await client.post("/console/sign-out", headers=token)).status_code == 204

        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        async with serving(app) as server:
            head = head_of(route, run, len(body), token | {"cookie": cookie})
            _, answer = await answer_after(server, head, body, end)

    assert answer.startswith(b"HTTP/1.1 401 "), answer
    assert len(await list_keys(services.store)) == 1
