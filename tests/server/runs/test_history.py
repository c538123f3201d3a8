"""The history of runs: metrics by step and operations, through crashes, pages, averages and shortening."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from trainhouse.server.operations.operation import WaitClock
from trainhouse.server.runs import history
from trainhouse.server.store import OperationRecord
from trainhouse.server.store.tables import operation_table
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.scheduler.work import CallSize

from ...live import live_server
from ..gated import GATED
from ..real import ADAM, ALICE, BOB, MODEL, Run, Server, batch, running_server, server_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NORM = "unclipped_grad_l2:mean"


async def get(server: Server, run: Run, what: str, /, key: str | None = None, status: int = 200, **query: Any) -> Any:
    response = await server.clients[key or run.key].get(f"training_runs/{run.model_id}/{what}", params=query)
    assert response.status_code == status, response.text
    return response.json()


async def operations_of(server: Server, run: Run, number: int) -> list[dict[str, Any]]:
    """Returns the run's operations, which are in its history as soon as a client has their results."""
    found = (await get(server, run, "operations"))["operations"]
    assert len(found) == number
    return found


async def log(server: Server, run: Run, entries: object, status: int = 200, key: str | None = None) -> Any:
    return await server.post(f"training_runs/{run.model_id}/metrics", {"entries": entries}, key or run.key, status)


def entry(step: int, **metrics: float) -> dict[str, object]:
    return {"step": step, "metrics": metrics}


async def test_a_step_has_the_metrics_of_the_passes_since_the_one_before(server: Server) -> None:
    run = await server.create_run()
    outputs, steps = [], []
    for num_passes in (2, 1):
        outputs.append([await run.forward_backward(batch()) for _ in range(num_passes)])
        steps.append((await run.optim_step())["metrics"])
    operations = await operations_of(server, run, 6)
    assert [one["kind"] for one in operations[::-1]] == [
        *("create_model", "forward_backward", "forward_backward", "optim_step", "forward_backward", "optim_step")
    ]
    assert all(one["busy_seconds"] > 0 and one["queued_seconds"] >= 0 and "error" not in one for one in operations)
    training = (await get(server, run, "metrics"))["training"]
    assert training["steps"] == [1, 2] and training["next"] is None
    found, losses = training["metrics"], [sum(float(each.metrics["loss:sum"]) for each in one) for one in outputs]
    assert found["loss:sum"] == pytest.approx(losses)
    weights = [sum(sum(each.loss_fn_inputs["weights"].data) for each in batch()) * number for number in (2, 1)]
    assert found["weight:sum"] == weights and found["loss:mean"] == pytest.approx(
        [loss / weight for loss, weight in zip(losses, weights, strict=True)]
    )
    assert found[NORM] == pytest.approx([metrics[NORM] for metrics in steps])
    assert found["learning_rate"] == [ADAM["learning_rate"]] * 2
    assert min(found["step_seconds"]) > 0 and min(found["tokens_per_second"]) > 0


async def test_failed_operations_say_why(server: Server) -> None:
    run = await server.create_run()
    assert "error" in await run.optim_step()
    await operations_of(server, run, 2)
    (failed,) = (await get(server, run, "operations", failed=True))["operations"]
    assert failed["kind"] == "optim_step" and "step" not in failed and "gradients" in failed["error"]
    assert (await get(server, run, "metrics"))["training"]["steps"] == []


async def test_crashes_neither_lose_nor_repeat_steps(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path / "state")
    norms = []
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        for _ in range(3):
            await run.forward_backward(batch())
            norms.append((await run.optim_step())["metrics"][NORM])
        # As after a kill: results are in their file, and their places not in the store.
        server.services.futures._unstored.clear()
    for _ in range(2):
        async with running_server(config, dispatch) as server:
            run.server = server
            os.kill(dispatch.pids(MODEL)[0], signal.SIGKILL)
            await run.forward_backward(batch())
            norms.append((await run.optim_step())["metrics"][NORM])
            await operations_of(server, run, 1 + 2 * len(norms))
            training = (await get(server, run, "metrics"))["training"]
            assert training["steps"] == list(range(1, len(norms) + 1))
            assert training["metrics"][NORM] == pytest.approx(norms)
            assert None not in training["metrics"]["loss:mean"]


async def test_clients_log_their_own_metrics(server: Server) -> None:
    run, stranger = await server.create_run(), await server.create_run(BOB)
    await log(server, run, [entry(1, reward=0.5, kl=0.1), entry(3, reward=0.75)])
    await log(server, run, [entry(3, kl=0.2), entry(1, reward=0.25)])
    await log(server, run, [entry(3, kl=0.2), entry(1, reward=0.25)])  # a retry
    logged = (await get(server, run, "metrics"))["logged"]
    assert logged["steps"] == [1, 3]
    assert logged["metrics"] == {"reward": [0.25, 0.75], "kl": [0.1, 0.2]}
    only = (await get(server, run, "metrics", names="kl", logged_after=1))["logged"]
    assert (only["steps"], only["metrics"]) == ([3], {"kl": [0.2]})
    for what in ("metrics", "operations"):
        assert "no training run" in (await get(server, run, what, BOB, 404))["detail"]
    await log(server, run, [entry(1, reward=1.0)], 404, BOB)
    assert (await get(server, stranger, "metrics"))["logged"]["steps"] == []


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [entry(-1, reward=1.0)],
        [entry(2**53 + 1, reward=1.0)],
        [entry(1, **{f"m{number}": 0.0 for number in range(65)})],
        [entry(1, **{"m" * 129: 0.0})],
        [{"step": 1, "metrics": {"reward": "NaN"}}],
        [{"step": 1, "metrics": {"reward": None}}],
        [entry(1, reward=0.0)] * 1001,
    ],
)
async def test_logged_metrics_are_bounded(server: Server, entries: object) -> None:
    run = await server.create_run()
    await log(server, run, entries, 400)
    assert (await get(server, run, "metrics"))["logged"]["steps"] == []


async def test_a_run_cannot_log_without_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await server.create_run()
    monkeypatch.setattr(history, "_MAX_LOGGED_BYTES", 1000)
    await log(server, run, [entry(step, reward=0.5) for step in range(8)])
    refused = await log(server, run, [entry(8, reward=0.5)], 413)
    assert "1000 bytes: log fewer metrics" in refused["detail"]
    await log(server, run, [entry(7, reward=0.75)])  # takes no more room
    assert (await get(server, run, "metrics"))["logged"]["steps"] == list(range(8))


def operation(run: Run, seq_id: int, step: int | None, since: float) -> OperationRecord:
    """A pass of 10 tokens with loss 2, or a step with learning rate `step`."""
    metrics = {"loss:sum": 2.0, "weight:sum": 8.0} if step is None else {"learning_rate": float(step)}
    kind, tokens = ("forward_backward", 10) if step is None else ("optim_step", 0)
    return OperationRecord(run.model_id, seq_id, kind, since + seq_id, 0.5, 1.0, tokens, step, None, metrics)


async def with_steps(server: Server, num_steps: int, since: float | None = None) -> Run:
    """Returns a run with a history of so many steps of two passes each, a second apart."""
    since = time.time() if since is None else since
    run = await server.create_run()
    await operations_of(server, run, 1)
    records = [
        operation(run, 3 * (step - 1) + part, step if part == 3 else None, since)
        for step in range(1, num_steps + 1)
        for part in (1, 2, 3)
    ]
    for first in range(0, len(records), 300):
        await server.services.store.results.put((), records[first : first + 300])
    return run


async def test_long_histories_come_in_pages_or_averaged(server: Server) -> None:
    run = await with_steps(server, 2100)
    pages, after = [], -1
    while after is not None:
        pages.append((await get(server, run, "metrics", after=after, limit=900))["training"])
        after = pages[-1]["next"]
    assert [len(page["steps"]) for page in pages] == [900, 900, 300]
    rates = [rate for page in pages for rate in page["metrics"]["learning_rate"]]
    assert rates == [float(step) for step in range(1, 2101)]
    assert set(pages[0]["metrics"]["loss:mean"]) == {0.25} and set(pages[0]["metrics"]["tokens"]) == {20.0}
    averaged = (await get(server, run, "metrics", points=100, limit=100_000))["training"]
    assert averaged["steps"] == list(range(21, 2101, 21)) and averaged["next"] is None
    assert averaged["metrics"]["learning_rate"][:2] == [11.0, 32.0]
    assert set(averaged["metrics"]["loss:mean"]) == {0.25}


@pytest.mark.parametrize("most", [7, 2])
async def test_operations_are_read_a_bounded_number_at_a_time(
    server: Server, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    run = await with_steps(server, 5)
    before = (await get(server, run, "metrics"))["training"]
    monkeypatch.setattr(operation_table, "_MAX_READ", most)
    assert (await get(server, run, "metrics"))["training"] == before
    assert before["steps"] == [1, 2, 3, 4, 5]
    assert len(await server.services.store.operations.list_of_steps(run.model_id, 0, 5)) == most


async def test_a_step_with_more_passes_than_are_read_at_a_time_keeps_the_metrics_of_all(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, since = await server.create_run(), time.time()
    await operations_of(server, run, 1)
    passes = [
        replace(
            operation(run, seq_id, None, since),
            num_tokens=10 * seq_id,
            queued_seconds=1.0 / seq_id,
            metrics={
                "loss:sum": 2.0 * seq_id,
                "weight:sum": 8.0,
                "ratio:mean": float(seq_id),
                "ratio:max": 1.0 / seq_id,
            },
        )
        for seq_id in range(1, 8)
    ]
    records = [*passes, operation(run, 8, 1, since), operation(run, 9, None, since), operation(run, 10, 2, since)]
    await server.services.store.results.put((), records)
    monkeypatch.setattr(operation_table, "_MAX_READ", 2)

    async def found() -> dict[str, list[float]]:
        training = (await get(server, run, "metrics"))["training"]
        assert training["steps"] == [1, 2]
        return training["metrics"]

    metrics = await found()
    assert metrics["loss:sum"] == [56.0, 2.0] and metrics["loss:mean"] == [1.0, 0.25]
    assert metrics["tokens"] == [280.0, 10.0] and metrics["queued_seconds"] == [1.0, 0.5]
    assert metrics["step_seconds"] == pytest.approx([8.0, 2.0], abs=1e-5)
    assert metrics["ratio:max"] == [1.0, None]
    assert metrics["ratio:mean"][0] == pytest.approx(5.0)  # weighted by tokens: sum of squares / sum; plain: 4

    monkeypatch.setattr(history, "_BLOCK", 1)
    monkeypatch.setattr(history, "_KEPT_OPERATIONS", 1)
    await server.services.history.tidy_up([run.model_id])
    kept = (await get(server, run, "operations"))["operations"]
    assert [one["seq_id"] for one in kept] == [10, 9, 8]
    assert await found() == metrics


async def test_old_operations_are_merged_into_their_steps(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await with_steps(server, 2100)
    before = (await get(server, run, "metrics", points=2000, limit=100_000))["training"]
    monkeypatch.setattr(history, "_KEPT_OPERATIONS", 100)
    for _ in range(2):
        await server.services.history.tidy_up([run.model_id])
    after = (await get(server, run, "metrics", points=2000, limit=100_000))["training"]
    assert after == before
    operations = (await get(server, run, "operations", limit=1000))["operations"]
    passes = [one["seq_id"] for one in operations if "step" not in one]
    # Blocks of 1,000 steps are shortened; the last 100 steps have three operations each.
    assert (len(passes), min(passes)) == (200, 6001)


async def test_a_window_that_has_not_ended_is_shortened_without_losing_metrics(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of different sizes, between operations that are none, before and after a step."""
    run, now = await server.create_run(), time.time() - 5000
    await operations_of(server, run, 1)
    done = [operation(run, seq_id, 1 if seq_id == 700 else None, now + seq_id) for seq_id in range(1, 6001)]
    done = [one if one.seq_id % 3 or one.step else replace(one, kind="forward", metrics={}) for one in done]
    done = [replace(one, num_tokens=one.seq_id % 7 + 1) for one in done]

    for first in range(0, len(done), 300):
        await server.services.store.results.put((), done[first : first + 300])

    async def stepped() -> Any:
        """The metrics of a step that ends the window now, which is taken back."""
        step = operation(run, 7000, 2, now + 7000)
        await server.services.store.results.put((), [step])
        found = (await get(server, run, "metrics"))["training"]
        await server.services.store.results.put((), [replace(step, kind="forward", step=None, metrics={})])
        return found

    whole = await stepped()
    for kept in (3000, 2000):
        monkeypatch.setattr(history, "_KEPT_OPERATIONS", kept)
        await server.services.history.tidy_up([run.model_id])
    old = (await get(server, run, "operations", before=5001, limit=1000))["operations"]
    assert [one["seq_id"] for one in old] == [5000, 700], "the last one's entry has the passes before it"
    again = await stepped()
    assert again["steps"] == [1, 2] == whole["steps"]
    for name, values in whole["metrics"].items():
        assert again["metrics"][name] == pytest.approx(values, rel=1e-9), name
    assert whole["metrics"]["tokens"][1] > 5 * whole["metrics"]["tokens"][0]


async def test_a_run_without_steps_is_shortened(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await server.create_run()
    await operations_of(server, run, 1)
    passes = [operation(run, seq_id, None, time.time()) for seq_id in range(1, 2001)]
    for first in range(0, len(passes), 300):
        await server.services.store.results.put((), passes[first : first + 300])
    monkeypatch.setattr(history, "_KEPT_OPERATIONS", 100)
    await server.services.history.tidy_up([run.model_id])
    found = (await get(server, run, "operations", limit=1000))["operations"]
    assert [one["seq_id"] for one in found] == list(range(2000, 1899, -1))
    assert found[-1]["num_tokens"] == sum(one.num_tokens for one in passes[:1900]), "the last is all before, merged"


async def test_history_expires(server: Server) -> None:
    run = await with_steps(server, 2, since=1000.0)
    await log(server, run, [entry(1, reward=1.0)])
    await server.services.history.tidy_up([])
    found = await get(server, run, "metrics")
    assert found["training"]["steps"] == [] and found["logged"]["steps"] == [1]


@pytest.fixture
async def gated(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> AsyncIterator[Server]:
    """A server whose passes wait while the file $GATE exists."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    headers = {"X-API-Key": ALICE}
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path / "state", module=GATED) as live:
        async with httpx.AsyncClient(base_url=f"{live.url}/api/v1/", headers=headers, timeout=60) as client:
            yield Server(cast(Any, None), {ALICE: client}, cast(Any, None))


async def waited(run: Run, request_ids: Iterable[str]) -> dict[int, float]:
    for request_id in request_ids:
        assert "error" not in await run.server.result(request_id)
    return {one["seq_id"]: one["queued_seconds"] for one in (await get(run.server, run, "operations"))["operations"]}


async def test_an_operation_waits_for_others_but_not_for_those_before_it_in_its_run(gated: Server) -> None:
    gate, seconds = Path(os.environ["GATE"]), 4.0
    first, second = [await gated.create_run() for _ in range(2)]
    client = gated.clients[ALICE]
    metrics = str(client.base_url).removesuffix("api/v1/") + "metrics"

    async def send_pass(run: Run) -> str:
        submitted = (await run.send(run.encode(batch(), next(run.numbers)))).json()["request_id"]
        while 'activity="pass",group="tiny/qwen3"} 1.0' not in (await client.get(metrics)).text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return submitted

    gate.touch()  # noqa: ASYNC240
    began_at = time.monotonic()
    sent = [await send_pass(first), await send_pass(first), (await first.submit("optim_step"))["request_id"]]
    sent.append((await first.submit("save_weights", path="a"))["request_id"])
    behind = await send_pass(second)
    await asyncio.sleep(seconds)
    gate.unlink()  # noqa: ASYNC240
    of_first, of_second = await waited(first, sent), await waited(second, [behind])
    not_gated = time.monotonic() - began_at - seconds
    assert max(of_first.values()) <= not_gated and seconds <= of_second[1]
    training = (await get(gated, first, "metrics"))["training"]["metrics"]
    assert training["queued_seconds"][0] <= not_gated and seconds <= training["step_seconds"][0]


def test_an_operation_is_ready_when_all_before_it_have_arrived_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now, turns = [10.0], WaitClock()
    monkeypatch.setattr("trainhouse.server.operations.operation.time", SimpleNamespace(monotonic=lambda: now[0]))
    calls = [CallSize(1, 1) for _ in range(3)]
    assert [turns.queue(at) for at in (3.0, 1.0, 4.0)] == [3.0, 3.0, 4.0], "after a gap in the numbers"
    assert turns.begin(1, calls[0]) == turns.begin(2, calls[0]) == 0.0, "in one call, as soon as they arrived"
    now[0] = 20.0
    assert turns.begin(2, calls[1]) == turns.begin(3, calls[1]) == 20.0, "the second one had a part in both calls"
    for seq_id, ended_at in enumerate((21.0, 22.0, 23.0), 1):
        now[0] = ended_at
        turns.end(seq_id)
    now[0] = 30.0
    assert turns.begin(4, calls[2]) == 23.0 and turns.begin(4, None) == 23.0
