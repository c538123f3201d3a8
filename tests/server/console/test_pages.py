"""Pages of the console over HTTP: what other tenants see, what is escaped, headers, CSV and events."""

import asyncio
import csv
import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from ..real import ALICE, BOB, Run, Server, batch
from .signed_in import signed_in

pytestmark = pytest.mark.anyio

EVIL = "\"><script>alert(1)</script><img src=x onerror='alert(1)'>"
_OF_RUN = ("", "/operations", "/checkpoints", "/metrics.csv")


async def evil_run(server: Server) -> Run:
    """Returns a run of which everything that a client can name is HTML; it has two steps and a failure."""
    session = {"sdk_version": EVIL, "tags": [EVIL], "user_metadata": {EVIL: EVIL}, "display_name": EVIL}
    session_id = (await server.post("create_session", session))["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny/qwen3", "lora_config": {"rank": 4}}
    await server.result((await server.post("create_model", body | {"user_metadata": {EVIL: EVIL}}))["request_id"])
    run = Run(server, f"{session_id}:train:0", session_id)
    await run.train(batch(), 2)
    assert "error" in await run.do("load_weights", path=f"tinker://{EVIL}/weights/a")
    entries = [{"step": step, "metrics": {EVIL: 1.0, "=1+1": 2.0}} for step in (1, 2)]
    await server.post(f"training_runs/{run.model_id}/metrics", {"entries": entries})
    await run.do("save_weights", path="mine", user_metadata={EVIL: EVIL})
    await run.do("save_weights_for_sampler")
    return run


async def stored(client: httpx.AsyncClient, run: Run, num_steps: int) -> dict[str, Any]:
    """Waits until the store has so many steps."""
    async with asyncio.timeout(30):
        while True:
            metrics = (await client.get(f"/console/api/v1/training_runs/{run.model_id}/metrics")).json()
            if len(metrics["training"]["steps"]) >= num_steps:
                return metrics
            await asyncio.sleep(0.05)


async def test_nothing_of_a_client_becomes_markup_or_script(server: Server) -> None:
    run = await evil_run(server)
    async with signed_in(server.app, ALICE) as client:
        await stored(client, run, 2)
        paths = ["/console/runs", f"/console/compare?run={run.model_id}", "/console/no-such-page"]
        paths += [f"/console/runs/{run.model_id}{part}" for part in _OF_RUN[:-1]]
        paths += ["/console/data", "/console/sessions", f"/console/sessions/{run.session_id}", "/console/checkpoints"]
        paths += [f"/console/checkpoints/{run.model_id}/weights/mine", f"/console/playground?model={EVIL}"]
        for path in [*paths, f"/console/runs?search={EVIL}", "/console/runs/%3Cscript%3E", "/console/sign-in"]:
            page = await client.get(path)
            assert page.headers["content-type"].startswith("text/html"), path
            assert not list(unsafe_markup(page.text)), path
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert page.headers["x-content-type-options"] == "nosniff" and page.headers["cache-control"] == "no-store"


async def test_an_overlay_follows_only_open_runs_and_none_loads_no_charts(server: Server) -> None:
    run = await evil_run(server)
    async with signed_in(server.app, ALICE) as client:
        assert "charts.js" not in (await client.get("/console/compare")).text
        overlay = f"/console/compare?run={run.model_id}"
        page = (await client.get(overlay)).text
        assert 'data-connected="live"' in page and "charts.js" in page
        await server.post(f"sessions/{run.session_id}/finish", {"reason": {"type": "success"}}, status=204)
        assert 'data-connected="complete"' in (await client.get(overlay)).text


async def test_names_of_sessions_are_titles(server: Server) -> None:
    session = {"sdk_version": "a", "display_name": "warm <house>"}
    session_id = (await server.post("create_session", session))["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny/qwen3", "lora_config": {"rank": 4}}
    await server.result((await server.post("create_model", body))["request_id"])
    run_id = f"{session_id}:train:0"
    async with signed_in(server.app, ALICE) as client:
        for path in (f"runs/{run_id}", f"sessions/{session_id}"):
            page = (await client.get(f"/console/{path}")).text
            assert "<h1>warm &lt;house&gt;</h1>" in page and path.partition("/")[2] in page, path
        for path in ("runs", "sessions", f"compare?run={run_id}"):
            assert ">warm &lt;house&gt;</a>" in (await client.get(f"/console/{path}")).text, path


async def test_a_page_that_is_not_there_has_navigation_for_whom_it_would_have(server: Server) -> None:
    async with signed_in(server.app, ALICE) as client:
        for path in ("no-such-page", "runs/no-such-run"):
            page = await client.get(f"/console/{path}")
            assert page.status_code == 404 and 'href="/console/runs"' in page.text and "data-sign-out" in page.text
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test") as stranger:
        page = await stranger.get("/console/runs", headers={"accept": "text/html", "x-api-key": "wrong"})
        assert page.status_code == 401 and 'href="/console/runs"' not in page.text


def test_unsafe_markup_is_found() -> None:
    unsafe = f'{EVIL}<p style="a"><script src="/evil.js"></script><a href="//evil">b</a><a href="javascript:a">c</a>'
    assert [name for name, _ in unsafe_markup(unsafe)] == ["script", "img", "p", "script", "a", "a"]


class _Markup(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))


def unsafe_markup(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields tags with inline scripts or styles, and those that lead to other places than this server."""
    markup = _Markup()
    markup.feed(text)
    for tag, attributes in markup.tags:
        places = [attributes[name] for name in ("src", "href", "action") if name in attributes]
        is_inline = tag == "style" or (tag == "script" and "src" not in attributes)
        is_elsewhere = not all(re.match(r"/(?!/)|[#?]", place) for place in places)
        is_ours = tag not in ("script", "img", "link") or all(place.startswith("/console/static/") for place in places)
        if is_inline or is_elsewhere or not is_ours or any(re.match("on|style", name) for name in attributes):
            yield tag, attributes


async def test_another_tenants_run_is_not_found(server: Server) -> None:
    run = await evil_run(server)
    async with signed_in(server.app, BOB) as bob, signed_in(server.app, ALICE) as alice:
        paths = [f"/console/runs/{run.model_id}{part}" for part in _OF_RUN]
        paths += [f"/console/compare?run={run.model_id}", f"/console/events?run={run.model_id}"]
        paths += [f"/console/sessions/{run.session_id}", f"/console/checkpoints/{run.model_id}/weights/mine"]
        for path in [*paths, f"/console/api/v1/training_runs/{run.model_id}/metrics"]:
            assert (await bob.get(path)).status_code == 404, path
            if "events" not in path:
                assert (await alice.get(path)).status_code == 200, path
        for path in ("runs", "sessions", "checkpoints", "playground"):
            assert run.session_id not in (await bob.get(f"/console/{path}")).text, path
            assert run.session_id in (await alice.get(f"/console/{path}")).text, path


async def test_the_timeline_says_why_operations_failed(server: Server) -> None:
    run = await evil_run(server)
    async with signed_in(server.app, ALICE) as client:
        await stored(client, run, 2)
        whole = (await client.get(f"/console/runs/{run.model_id}/operations")).text
        failed = (await client.get(f"/console/runs/{run.model_id}/operations?failed=true")).text
    assert whole.count("<tr>") > failed.count("<tr") == 2 and "optim_step" in whole and "optim_step" not in failed
    assert "load_weights" in failed and "tinker://" in failed


async def test_csv_has_every_step_and_no_formulas(server: Server) -> None:
    run = await evil_run(server)
    async with signed_in(server.app, ALICE) as client:
        metrics = await stored(client, run, 2)
        answer = await client.get(f"/console/runs/{run.model_id}/metrics.csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(row["source"], row["step"]) for row in rows] == [
        *(("training", "1"), ("training", "2"), ("logged", "1"), ("logged", "2"))
    ]
    assert [float(row["loss:mean"]) for row in rows[:2]] == metrics["training"]["metrics"]["loss:mean"]
    assert rows[2]["'=1+1"] == "2.0" and rows[2][EVIL] == "1.0" and rows[2]["loss:mean"] == ""


@pytest.mark.parametrize(("path", "shown"), [("", '<td class="num">2</td>'), ("/{run}/metrics.csv", "training,2,")])
async def test_pages_show_steps_as_soon_as_the_client_has_their_results(
    server: Server, path: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainhouse.server.journal.futures._LINGER_SECONDS", 30.0)
    run = await server.create_run()
    async with signed_in(server.app, ALICE) as client:
        await run.train(batch(), 2)
        assert shown in (await client.get("/console/runs" + path.format(run=run.model_id))).text


async def test_events_bring_later_steps_once_until_the_browser_signs_out(server: Server) -> None:
    run = await evil_run(server)
    async with signed_in(server.app, ALICE) as client:
        metrics = await stored(client, run, 2)
        since = f"{metrics['training']['last']}_{metrics['logged']['last']}"
        stream = asyncio.create_task(client.get(f"/console/events?run={run.model_id}&since={since}"))
        await run.train(batch(), 1)
        await server.post(f"training_runs/{run.model_id}/metrics", {"entries": [{"step": 2, "metrics": {"kl": 0.5}}]})
        await stored(client, run, 3)
        await asyncio.sleep(1.0)
        [cookie] = client.cookies.values()
        server.services.browsers.end(cookie)
        server.services.history.has_grown([run.model_id])
        answer = await asyncio.wait_for(stream, 20)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [step for event in events for step in event["metrics"]["training"]["steps"]] == [3]
    assert {event["run"] for event in events} == {run.model_id}
    last = events[-1]["metrics"]["logged"]
    assert last["steps"] == [2] and last["metrics"]["kl"] == [0.5], "a step that has grown is sent again"
    for wrong in ("1", "1_2.3_4", "x_y", "1_" + 30 * "9"):
        async with signed_in(server.app, ALICE) as client:
            assert (await client.get(f"/console/events?run={run.model_id}&since={wrong}")).status_code == 400, wrong


async def test_static_files_are_small_and_named_by_their_content(server: Server) -> None:
    async with signed_in(server.app, ALICE) as client:
        page = await client.get(f"/console/compare?run={(await server.create_run()).model_id}")
        assert page.status_code == 200
        urls = set(re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page.text))
        assert len(urls) >= 5 and len({url.rpartition("/")[0] for url in urls}) == 1, "scripts import each other"
        answers = [await client.get(url) for url in urls]
        assert all(one.status_code == 200 and "immutable" in one.headers["cache-control"] for one in answers)
        assert sum(len(one.content) for one in answers) + len(page.content) < 200_000
        assert (await client.get("/console/static/a/__init__.py")).status_code == 404
