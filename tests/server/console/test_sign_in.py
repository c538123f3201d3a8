"""Signing in to the console: cookies, forms, and what a cookie opens."""

from pathlib import Path

import pytest
from trainhouse.schemas.errors import RequestError
from trainhouse.server.tenants.auth import create_key, hash_key
from trainhouse.server.tenants.browser_sessions import (
    LIFETIME_SECONDS,
    MAX_PER_TENANT,
    MAX_SESSIONS,
    MAX_STREAMS,
    BrowserSessions,
)
from trainhouse.server.tenants.rate_limits import UnauthenticatedLimits

from ..api import ALICE, BOB, Api, Clock
from .signed_in import form_token, new_browser, sign_in, signed_in

pytestmark = pytest.mark.anyio


async def test_a_key_is_exchanged_for_a_cookie_that_scripts_and_other_sites_cannot_use(api: Api) -> None:
    for url, is_secure in (("http://test", False), ("https://test", True)):
        async with new_browser(api.app, url) as client:
            answer = await sign_in(client, ALICE)
            assert (answer.status_code, answer.headers["location"]) == (303, "/console")
            cookie, *flags = answer.headers["set-cookie"].split("; ")
            assert {"HttpOnly", "SameSite=strict", "Path=/console"} <= {*flags} and ("Secure" in flags) == is_secure
            assert ALICE not in cookie and hash_key(ALICE) not in cookie
            page = await client.get("/console/runs")
            assert page.status_code == 200 and (await api.tenant()).name in page.text and ALICE not in page.text


async def test_browsers_stay_signed_in_to_several_servers_of_one_host(api: Api) -> None:
    async with new_browser(api.app, "http://test:8000") as client:
        for port in (8000, 8001):
            assert (await sign_in(client, ALICE)).status_code == 303
            client.base_url = f"http://test:{port + 1}"
        assert set(client.cookies) == {"trainhouse_console_8000", "trainhouse_console_8001"}
        client.base_url = "http://test:8001"
        token = await form_token(client)
        assert (await client.post("http://test:8001/console/sign-out", headers=token)).status_code == 204
        assert (await client.get("http://test:8000/console/runs")).status_code == 200
        assert (await client.get("http://test:8001/console/runs")).status_code == 303
        for host in ("test:x", "test:²", "[::1]"):
            answer = await client.get("/console/runs", headers={b"Host": host.encode("latin-1")})
            assert answer.status_code == 303, host


@pytest.mark.parametrize("key", ["", "secret", "tml-made-up"])
async def test_a_wrong_key_is_refused_and_not_repeated(api: Api, key: str) -> None:
    await create_key(api.services.store, "team")
    async with new_browser(api.app) as client:
        answer = await sign_in(client, key)
        assert answer.status_code == 401 and "set-cookie" not in answer.headers
        assert 'role="alert"' in answer.text and f'value="{key or "-"}"' not in answer.text
        assert (await client.get("/console/runs")).headers["location"] == "/console/sign-in?next=/console/runs"


async def test_guesses_are_limited_like_those_of_the_api(api: Api) -> None:
    await create_key(api.services.store, "team")
    api.services.auth.unauthenticated_limits = UnauthenticatedLimits(5, Clock())
    async with new_browser(api.app) as client:
        statuses = [(await sign_in(client, f"tml-guess-{number}")).status_code for number in range(6)]
    assert statuses == [401] * 5 + [429]


async def test_one_returns_only_to_a_page_of_the_console(api: Api) -> None:
    async with new_browser(api.app) as client:
        first = await client.get("/console/runs?search=a&page=2")
        target = "/console/runs?search=a&page=2"
        assert first.headers["location"] == "/console/sign-in?next=/console/runs%3Fsearch%3Da%26page%3D2"
        form = await client.get(first.headers["location"])
        assert 'value="/console/runs?search=a&amp;page=2"' in form.text
        assert (await sign_in(client, ALICE, next=target)).headers["location"] == target
        for wrong in ("https://evil", "//evil", "/console/\\evil", "/\\evil", "/console/sign-in", "javascript:a"):
            assert (await sign_in(client, ALICE, next=wrong)).headers["location"] == "/console", wrong


async def test_an_open_server_says_which_keys_it_accepts_and_another_names_no_model(api: Api) -> None:
    async with new_browser(api.app) as client:
        assert "tml-local" in (text := (await client.get("/console/sign-in")).text) and "tiny/qwen3" in text
        await create_key(api.services.store, "team")
        assert "tml-local" not in (text := (await client.get("/console/sign-in")).text) and "tiny/qwen3" not in text


async def test_forms_of_other_sites_sign_no_one_in(api: Api) -> None:
    async with new_browser(api.app) as client:
        form = {"key": ALICE}
        for headers in ({"Origin": "https://evil"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
            answer = await client.post("/console/sign-in", data=form, headers=headers)
            assert answer.status_code == 403 and "set-cookie" not in answer.headers, headers
        for headers in ({"Origin": "http://test"}, {"Sec-Fetch-Site": "same-origin"}, {}):
            assert (await client.post("/console/sign-in", data=form, headers=headers)).status_code == 303


async def test_changes_need_the_token_of_a_page(api: Api) -> None:
    checkpoint = await api.save(await api.run())
    url = f"/console/api/v1/training_runs/{checkpoint.run_id}/checkpoints/weights/a"
    async with signed_in(api.app, ALICE) as client, signed_in(api.app, ALICE) as other:
        token = await form_token(client)
        for headers in ({}, {"X-Form-Token": ""}, {"X-Form-Token": "a"}, await form_token(other)):
            assert (await client.delete(url, headers=headers)).status_code == 403, headers
            assert (await client.post("/console/sign-out", headers=headers)).status_code == 403
        assert (await client.put(f"{url}/ttl", json={"ttl_seconds": 3600})).status_code == 403
        assert await api.services.store.checkpoints.get(checkpoint.run_id, "weights", "a") == checkpoint
        assert (await client.delete(url, headers=token)).status_code == 204


async def test_the_cookie_opens_only_the_console_and_there_only_what_pages_call(api: Api) -> None:
    run = await api.run()
    async with signed_in(api.app, ALICE) as client:
        token = await form_token(client)
        (secret,) = client.cookies.jar
        headers = {"Cookie": f"{secret.name}={secret.value}"}
        assert (await client.get("/api/v1/training_runs", headers=headers)).status_code == 401
        bearer = {"X-API-Key": secret.value or ""}
        assert (await client.get("/api/v1/training_runs", headers=bearer)).status_code == 401
        for method, path in (("POST", "auth/token"), ("GET", "training_runs"), ("DELETE", "auth/apikey/me")):
            assert (await client.request(method, f"/console/api/v1/{path}", headers=token)).status_code == 404
        for path in ("%2e%2e/api/v1/training_runs", "static/%2e%2e/runs", f"api/v1/training_runs/{run.run_id}"):
            assert (await client.get(f"/console/{path}")).status_code == 404


async def test_signing_out_revoking_the_key_and_time_end_a_session(api: Api) -> None:
    key = await create_key(api.services.store, "team")
    async with signed_in(api.app, key) as client, signed_in(api.app, key) as other:
        cookies = dict(client.cookies)
        assert (await client.post("/console/sign-out", headers=await form_token(client))).status_code == 204
        client.cookies.update(cookies)
        assert (await client.get("/console/runs")).status_code == 303, "the cookie that was kept is worth nothing"
        assert (await other.get("/console/runs")).status_code == 200
        record = (await api.services.auth.identify(key)).key
        assert record is not None
        await api.services.auth.revoke(record)
        assert (await other.get("/console/runs")).status_code == 303
        assert (await other.get("/console/runs", headers={"Accept": "*/*"})).status_code == 401


async def test_scopes_of_the_key_hold_for_its_pages(api: Api) -> None:
    key = await create_key(api.services.store, "team", ("sample",))
    async with signed_in(api.app, key) as client:
        refused = await client.get("/console/runs")
        assert refused.status_code == 403 and "needs read" in refused.text and "<h1>403" in refused.text
        assert (await client.get("/console")).headers["location"] == "/console/playground", "the first it may see"


def test_sessions_expire_and_their_number_is_bounded() -> None:
    clock = Clock()
    sessions = BrowserSessions(clock)
    secrets = [sessions.begin("tenant", "token") for _ in range(MAX_PER_TENANT + 1)]
    assert sessions.find(secrets[0]) is None and sessions.find(secrets[1]) and sessions.find(secrets[-1])
    others = [sessions.begin(f"tenant {number}", "token") for number in range(MAX_SESSIONS)]
    assert sessions.find(secrets[-1]) is None and all(map(sessions.find, others))
    clock.now += LIFETIME_SECONDS
    assert not any(map(sessions.find, others)) and sessions.find(None) is None


def test_a_tenant_has_a_bounded_number_of_streams() -> None:
    sessions = BrowserSessions()
    streams = [sessions.streaming("a") for _ in range(MAX_STREAMS)]
    for stream in streams:
        stream.__enter__()
    with pytest.raises(RequestError, match="already"), sessions.streaming("a"):
        pass
    with sessions.streaming("b"):
        pass
    streams[0].__exit__(None, None, None)
    with sessions.streaming("a"):
        pass


async def test_another_tenant_sees_other_runs(api: Api, tmp_path: Path) -> None:
    run = await api.run()
    async with signed_in(api.app, ALICE) as alice, signed_in(api.app, BOB) as bob:
        assert run.run_id in (await alice.get("/console/runs")).text
        assert run.session_id not in (await bob.get("/console/runs")).text
        assert run.session_id not in (await bob.get(f"/console/runs?search={run.session_id[:6]}&page=1")).text.replace(
            f'value="{run.session_id[:6]}"', ""
        )


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, b"a=1&" * 9, 400),
        ({}, b"key=" + b"a" * 20_000, 413),
        ({"Origin": "http://["}, b"key=tml-a", 403),
        ({"Origin": "http://\u2100"}, b"key=tml-a", 403),
        ({"Origin": "http://evil"}, b"key=tml-a", 403),
    ],
)
async def test_malformed_forms_are_refused_and_counted(
    api: Api, headers: dict[str, str], body: bytes, status: int
) -> None:
    await create_key(api.services.store, "team")
    api.services.auth.unauthenticated_limits = UnauthenticatedLimits(3, Clock())
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    async with new_browser(api.app) as client:
        answers = [await client.post("/console/sign-in", content=body, headers=raw) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [status] * 3 + [429] * 2
