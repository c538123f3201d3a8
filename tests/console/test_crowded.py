"""Ten thousand runs, one of them of ten thousand steps: pages stay fast and small."""

import asyncio
import math
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Connection, insert
from trainhouse.schemas.models import LoraConfig
from trainhouse.server.store import DATABASE_NAME, OperationRecord, RunRecord, SessionRecord, SqliteStore, TenantRecord
from trainhouse.server.store.database.rows import row_values
from trainhouse.server.store.database.schema import operations, runs, sessions, tenants
from trainhouse.server.tenants.auth import hash_key

from ..live import live_server, save_byte_tokenizer
from ..tiny import tiny_model
from .browser import Browser, chromium
from .trained import KEY

pytestmark = pytest.mark.slow

NUM_RUNS = NUM_STEPS = 10_000
LONG = "long:train:0"
MOST_BYTES = 500_000
DRAWN = "return document.documentElement.dataset.firstChart"
"""Milliseconds from the navigation to the first chart."""


def fill(state_dir: Path) -> None:
    """Writes runs of the tenant that KEY stands for on a server without keys."""
    tenant_id, now = f"local-{hash_key(KEY)[:16]}", time.time()
    names = ["long", *(f"{number:016x}" for number in range(NUM_RUNS - 1))]
    lora = LoraConfig(rank=4, seed=1)

    def statements(connection: Connection) -> None:
        connection.execute(insert(tenants), [row_values(TenantRecord(tenant_id, tenant_id, now))])
        ended = [SessionRecord(name, tenant_id, now, now, now, "success") for name in names]
        connection.execute(insert(sessions), [row_values(one) for one in ended])
        records = [
            RunRecord(f"{name}:train:0", name, tenant_id, "tiny/chat", lora, now, now - at, {"number": f"no-{at}"})
            for at, name in enumerate(names)
        ]
        connection.execute(insert(runs), [row_values(one) for one in records])
        connection.execute(insert(operations), [row_values(one) for one in history(now)])

    async def write() -> None:
        await store.write(statements)

    store = SqliteStore(state_dir / DATABASE_NAME)
    asyncio.run(write())
    store.close()


def history(now: float) -> Iterator[OperationRecord]:
    for step in range(1, NUM_STEPS + 1):
        at = now - NUM_STEPS + step
        sums = {"loss:sum": 100.0 / step, "weight:sum": 10.0, **{f"metric-{number}:mean": 0.5 for number in range(10)}}
        yield OperationRecord(LONG, 2 * step - 1, "forward_backward", at - 0.5, 0.01, 0.4, 100, None, None, sums)
        stepped = {"learning_rate": 1e-3, "unclipped_grad_l2:mean": 1.0}
        yield OperationRecord(LONG, 2 * step, "optim_step", at, 0.01, 0.1, 0, step, None, stepped)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    model, state_dir = tiny_model("llama", tmp_path_factory.mktemp("chat")), tmp_path_factory.mktemp("crowded")
    save_byte_tokenizer(model)
    fill(state_dir)
    with live_server({"tiny/chat": model}, state_dir) as server, chromium(tmp_path_factory.mktemp("profile")) as driver:
        browser = Browser(driver, server.url, tmp_path_factory.mktemp("screenshots"))
        browser.sign_in(KEY)
        yield browser
        assert not browser.problems()


def page_bytes(browser: Browser) -> int:
    """Returns the bytes of the page and all that it loaded, before compression."""
    kinds = "['navigation', 'resource']"
    sizes = f"{kinds}.flatMap((kind) => performance.getEntriesByType(kind)).map((one) => one.decodedBodySize)"
    return sum(browser.script(f"return {sizes}"))


def seconds_to_load(browser: Browser) -> float:
    return browser.script("return performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000


def seconds_to_read_all(browser: Browser) -> float:
    """Returns how long the server takes to read every step of the run: the measure where other work has the cores."""
    began = time.perf_counter()
    address = f"{browser.url}/api/v1/training_runs/{LONG}/metrics?points=2000&limit=10000"
    answer = httpx.get(address, headers={"X-API-Key": KEY}, timeout=60).raise_for_status()
    assert len(answer.json()["training"]["steps"]) == 2000
    return time.perf_counter() - began


def test_ten_thousand_runs_are_paged_and_searched(crowded: Browser) -> None:
    crowded.open("/console/runs")
    assert LONG in crowded.text() and "1 to 25 of 10,000" in crowded.text()
    crowded.follow("a[rel=next]")
    assert "26 to 50 of 10,000" in crowded.text()
    seconds: dict[str, float] = {}
    measure = math.inf
    for query in 3 * ("page=1", "page=400", "search=NO-777"):
        crowded.open(f"/console/runs?{query}")
        seconds[query] = min(seconds.get(query, math.inf), seconds_to_load(crowded))
        measure = min(measure, seconds_to_read_all(crowded))
    assert "1 to 11 of 11" in crowded.text()
    crowded.screenshots("many-runs")
    print(seconds, measure, page_bytes(crowded))
    assert max(seconds.values()) < max(1.0, measure) and page_bytes(crowded) < MOST_BYTES


def test_a_run_of_ten_thousand_steps_is_drawn_within_a_second(crowded: Browser) -> None:
    times, measures = [], []
    for _ in range(4):
        crowded.open(f"/console/runs/{LONG}")
        crowded.until(lambda: crowded.script(DRAWN), "drawn")
        times.append(int(crowded.script(DRAWN)) / 1000)
        measures.append(seconds_to_read_all(crowded))
    print(f"first chart after {times} s, all steps read in {measures} s, {page_bytes(crowded)} bytes")
    assert "at 10000" in crowded.text(".chart")
    crowded.screenshots("long-run")
    assert min(times) < max(1.0, 2 * min(measures)) and page_bytes(crowded) < MOST_BYTES
