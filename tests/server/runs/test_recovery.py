"""A run whose worker crashes is rebuilt, and its queued operations continue in order, each applied once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from trainhouse.schemas.checkpoints import SaveWeightsRequest
from trainhouse.schemas.errors import OperationError, RequestError
from trainhouse.schemas.futures import Pending
from trainhouse.schemas.training import OptimStepRequest
from trainhouse.server.http.bodies import UNLIMITED, Body
from trainhouse.server.journal.futures import Result
from trainhouse.server.journal.journal import Header, request_id_of
from trainhouse.server.journal.restore_marker import RestoreMarker, mark_copy
from trainhouse.server.journal.strikes import STRIKE
from trainhouse.server.operations.loading import CreateRun, LoadWeights
from trainhouse.server.operations.operation import Outcome, RefusedOperation
from trainhouse.server.runs.recovery import EarlierOperation, JournaledRun
from trainhouse.server.runs.run import Run
from trainhouse.server.store import RunRecord
from trainhouse.workers.protocol.calls import WorkerLost

from ..bench import FORWARD_BACKWARD, RUN_ID, Bench, MakeBench

pytestmark = pytest.mark.anyio

SAVE = Body(SaveWeightsRequest(model_id=RUN_ID, path="a", seq_id=2).model_dump_json().encode(), UNLIMITED)


class CrashingOperations:
    """Makes the given operations fail `times` times as if the worker had crashed."""

    def __init__(self, bench: Bench, seq_ids: tuple[int, ...], times: int = 1, alone: bool = False) -> None:
        self.left = dict.fromkeys(seq_ids, times)
        perform = bench.operations.perform

        async def dying(run, operation, seq_id):
            if self.left.get(seq_id, 0) > 0 and "create" not in bench.operations.performed[-1:]:
                self.left[seq_id] -= 1
                await asyncio.sleep(0)
                raise WorkerLost("the worker died", alone=alone)
            return await perform(run, operation, seq_id)

        bench.operations.perform = dying  # pyright: ignore[reportAttributeAccessIssue]


def performed_since_rebuild(bench: Bench) -> list:
    """Returns what the workers have done since the last rebuild began."""
    performed = bench.operations.performed
    return performed[len(performed) - 1 - performed[::-1].index("create") :]


async def test_a_lost_run_is_rebuilt_from_its_beginning_and_continues(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    await bench.optim_step(2)
    await bench.result(2)
    CrashingOperations(bench, (3, 4))
    await bench.forward_backward(3)
    await bench.optim_step(4)
    assert await bench.result(3) == {"seq_id": 3} and await bench.result(4) == {"seq_id": 4}
    assert performed_since_rebuild(bench) == ["create", 1, 2, 3, 4]
    await bench.forward_backward(5)
    assert await bench.result(5) == {"seq_id": 5}


async def test_operations_covered_by_a_snapshot_are_not_repeated(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 3):
        await bench.forward_backward(seq_id)
        await bench.optim_step(seq_id + 1)
        await bench.result(seq_id + 1)
        await wait_for_snapshot(bench, seq_id + 1)
    CrashingOperations(bench, (5,))
    await bench.forward_backward(5)
    await bench.result(5)
    assert performed_since_rebuild(bench) == ["create", "restore 4", 5]


async def test_recovery_falls_back_from_a_damaged_snapshot_to_the_one_before(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 2, 3):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await wait_for_snapshot(bench, seq_id)
    (bench.snapshots / "3" / "state").write_bytes(b"STATE")
    CrashingOperations(bench, (4,))
    await bench.optim_step(4)
    await bench.result(4)
    assert performed_since_rebuild(bench)[:4] == ["create", "restore 2", 3, 4]


async def test_an_operation_that_crashes_workers_fails_at_the_third_crash(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    CrashingOperations(bench, (2,), times=10, alone=True)
    await bench.forward_backward(2)
    failed = await bench.result(2)
    assert "died 3 times" in failed["error"] and failed["category"] == "user"
    await bench.optim_step(3)
    assert "not taken" in (await bench.result(3))["error"]
    await bench.forward_backward(4)
    assert await bench.result(4) == {"seq_id": 4}


async def test_operations_are_repeated_in_order_however_long_a_strike_takes_to_write(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    await bench.result(1)
    CrashingOperations(bench, (2,), alone=True)
    CrashingOperations(bench, (3,))
    journal = bench.services.journal
    append = journal.append

    async def written_late(header: Header, received: bytes) -> object:
        await asyncio.sleep(0.2)
        return await append(header, received)

    def appended(header: Header, received: bytes = b"") -> object:
        return written_late(header, received) if header.kind == STRIKE else append(header, received)

    monkeypatch.setattr(journal, "append", appended)
    await asyncio.gather(bench.forward_backward(2), bench.forward_backward(3))
    await bench.result(3)
    assert performed_since_rebuild(bench) == ["create", 1, 2, 3]


async def test_an_operation_that_the_workers_answered_before_they_died_is_repeated_by_the_rebuild(
    make_bench: MakeBench,
) -> None:
    """The result is still being encoded, or published, when a later operation finds that the run is lost."""
    bench = await make_bench()
    await bench.result(0)
    CrashingOperations(bench, (2,))
    perform, may_end = bench.operations.perform, asyncio.Event()

    async def ending_late(run: RunRecord, operation: object, seq_id: int) -> Result:
        result = await perform(run, operation, seq_id)
        if seq_id == 1:
            await may_end.wait()
        return result

    bench.operations.perform = ending_late  # pyright: ignore[reportAttributeAccessIssue]
    await asyncio.gather(bench.forward_backward(1), bench.forward_backward(2))
    await asyncio.sleep(0.1)
    assert "create" not in bench.operations.performed
    may_end.set()
    await bench.result(2)
    assert performed_since_rebuild(bench) == ["create", 1, 2]


async def test_an_operation_says_whether_its_workers_restart_or_its_run_is_rebuilt(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    await bench.result(1)
    CrashingOperations(bench, (2,))
    bench.operations.may_proceed.clear()
    await bench.forward_backward(2)
    for is_running, reason in ((False, "busy"), (True, "being rebuilt")):
        bench.operations.is_running = is_running
        waiting = await bench.futures.wait(request_id_of(bench.run.record.run_id, 2), "alice", 0.1)
        assert isinstance(waiting, Pending) and reason in (waiting.queue_state_reason or "")
    bench.operations.may_proceed.set()
    assert await bench.result(2) == {"seq_id": 2}


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_load_clears_the_failures_before_it_and_none_behind_it(
    make_bench: MakeBench, fails: bool, is_refused: bool
) -> None:
    """Refused operations end at once, also while a load before them is in progress."""
    bench = await make_bench()
    await bench.result(0)
    await bench.run.refuse(1, RefusedOperation("forward_backward", "bad", taints=True))
    if fails:
        bench.operations.failing[2] = OperationError("no such checkpoint")
    bench.operations.may_proceed.clear()
    await bench.submit(2, LoadWeights("tinker://a/weights/b", optimizer=False))
    await wait_until(bench, lambda: bench.operations.begun[-1:] == [2])
    if is_refused:
        await bench.run.refuse(3, RefusedOperation("forward_backward", "bad", taints=True))
    bench.operations.may_proceed.set()
    await bench.optim_step(3 + is_refused)
    answer = await bench.result(3 + is_refused)
    assert ("not taken" in str(answer)) == (fails or is_refused), answer


async def test_a_run_with_only_damaged_snapshots_fails(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 2):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await wait_for_snapshot(bench, seq_id)
    await wait_until(bench, lambda: not any(entry.seq_id <= 1 for entry in bench.logged))
    for seq_id in (1, 2):
        (bench.snapshots / str(seq_id) / "state").write_bytes(b"STATE")
    CrashingOperations(bench, (3,))
    await bench.optim_step(3)
    assert "snapshots are damaged" in (await bench.result(3))["error"]


async def test_a_step_that_crashes_workers_is_not_repeated(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    CrashingOperations(bench, (2,), times=3, alone=True)
    await bench.optim_step(2)
    assert "died 3 times" in (await bench.result(2))["error"]
    await bench.forward_backward(3)
    assert await bench.result(3) == {"seq_id": 3}
    assert performed_since_rebuild(bench) == ["create", 1, "clear", 3]


async def test_gradients_that_a_given_up_step_cannot_clear_are_not_applied_by_the_next(make_bench: MakeBench) -> None:
    bench = await make_bench()
    clear = bench.operations.clear_gradients

    async def failing(run: RunRecord, seq_id: int) -> None:
        if seq_id == 2:
            raise OperationError("out of memory", "server")
        await clear(run, seq_id)

    bench.operations.clear_gradients = failing  # pyright: ignore[reportAttributeAccessIssue]
    await bench.forward_backward(1)
    await bench.result(1)
    bench.operations.may_proceed.clear()
    await bench.optim_step(2)
    for _ in range(3):
        await bench.append_to_journal(STRIKE, 2)
    await bench.restart()
    bench.operations.may_proceed.set()
    assert "out of memory" in (await bench.result(2))["error"]
    await bench.forward_backward(3)
    await bench.optim_step(4)
    assert "could not be cleared (out of memory)" in (await bench.result(4))["error"]
    await bench.optim_step(5)
    assert await bench.result(5) == {"seq_id": 5}
    assert performed_since_rebuild(bench) == ["create", 1, 3, "clear", 5]
    CrashingOperations(bench, (6,))
    await bench.forward_backward(6)
    assert await bench.result(6) == {"seq_id": 6}
    assert performed_since_rebuild(bench) == ["create", 1, 3, "clear", 5, 6]


async def test_an_operation_is_answered_even_if_its_metrics_cannot_be_recorded(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench()
    await bench.result(0)
    ended: list[str | None] = []

    def failing(*arguments: object) -> None:
        ended.append(str(arguments[-1]))
        raise ValueError("a label is wrong")

    monkeypatch.setattr(bench.services.telemetry, "operation_ended", failing)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_exception_handler", lambda context: None)  # else the error fails this test
    await bench.forward_backward(1)
    assert await bench.result(1) == {"seq_id": 1}
    CrashingOperations(bench, (2,), times=10, alone=True)
    await bench.forward_backward(2)
    assert "died 3 times" in (await bench.result(2))["error"]
    assert len(ended) == 2


async def test_a_refused_step_is_not_repeated_and_keeps_the_window(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.run.refuse(1, RefusedOperation("forward_backward", "bad", taints=True))
    await bench.run.refuse(2, RefusedOperation("optim_step", "bad", taints=False))
    await bench.forward_backward(3)
    await bench.optim_step(4)
    assert "not taken" in (await bench.result(4))["error"]
    CrashingOperations(bench, (5,))
    await bench.forward_backward(5)
    assert await bench.result(5) == {"seq_id": 5}
    assert performed_since_rebuild(bench) == ["create", 3, "clear", 5]


async def test_a_restart_repeats_nothing_that_a_snapshot_covers(make_bench: MakeBench) -> None:
    """Even if its result is no longer stored."""
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 2):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await wait_for_snapshot(bench, seq_id)
    place = await bench.services.journal.append(Header("optim_step", "alice", RUN_ID, 2, f"{RUN_ID}:2"))
    num_performed = len(bench.operations.performed)
    async with resumed(bench, {2: EarlierOperation("optim_step", place)}):
        await bench.optim_step(3)
        assert await bench.result(3) == {"seq_id": 3}
    assert bench.operations.performed[num_performed:][:4] == ["drop_run", "create", "restore 2", 3]


async def test_a_save_that_was_answered_is_not_published_again(make_bench: MakeBench) -> None:
    """Even if the operation before it has lost its answer and is repeated."""
    bench = await make_bench()
    await bench.result(0)
    contents = {
        1: OptimStepRequest(model_id=RUN_ID, seq_id=1),
        2: SaveWeightsRequest(model_id=RUN_ID, path="a", seq_id=2),
        3: SaveWeightsRequest(model_id=RUN_ID, path="b", seq_id=3),
    }
    found = {
        0: EarlierOperation("create_model", await bench.append_to_journal("create_model", 0), outcome=Outcome.DONE)
    }
    for seq_id, content in contents.items():
        place = await bench.append_to_journal(content.type, seq_id, content.model_dump_json().encode())
        found[seq_id] = EarlierOperation(content.type, place, outcome=Outcome.DONE if seq_id == 2 else None)
    async with resumed(bench, found):
        assert await bench.result(3) == {"seq_id": 3}
    assert bench.operations.performed == [0, "drop_run", "create", 1, 3]


async def test_a_gap_in_a_damaged_journal_stops_recovery(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    kinds = {0: "create_model", 1: "forward_backward", 3: "optim_step"}
    found = {
        seq_id: EarlierOperation(kind, await bench.append_to_journal(kind, 1), outcome=Outcome.DONE)
        for seq_id, kind in kinds.items()
    }
    async with resumed(bench, found):
        assert bench.run.queue.position_of(0).num_operations == 0
    bench.services.journal.unreadable.add(found[3].place.segment)
    with pytest.raises(ValueError, match="operation 2 may be in the damaged part"):
        async with resumed(bench, found):
            pass


async def test_a_run_can_end_just_before_its_rebuild(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    ending: list[asyncio.Task[None]] = []

    async def dying(*_: object) -> None:
        await asyncio.sleep(0)
        # This task runs before the one that rebuilds the run.
        ending.append(asyncio.create_task(bench.run.end("the session has ended")))
        raise WorkerLost("the worker died")

    bench.operations.perform = dying  # pyright: ignore[reportAttributeAccessIssue]
    await bench.forward_backward(1)
    assert "the session has ended" in (await bench.result(1))["error"]
    await asyncio.wait_for(ending[0], 30)
    assert not bench.run.is_busy


async def test_an_operation_waits_until_the_database_is_available_again(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainhouse.server.runs.run_state.OUTAGE_RETRY_SECONDS", 0.2)
    bench = await make_bench(hold=True)
    bench.operations.failing[0] = OperationalError("insert", {}, Exception("database or disk is full"))
    bench.operations.may_proceed.set()
    await wait_until(bench, lambda: bench.operations.performed == [0])
    pending = await bench.futures.wait(request_id_of(bench.run.record.run_id, 0), "alice", 0)
    assert isinstance(pending, Pending) and "database or disk is full" in (pending.queue_state_reason or "")
    await bench.forward_backward(1)
    del bench.operations.failing[0]
    assert await bench.result(0) == {"seq_id": 0} and await bench.result(1) == {"seq_id": 1}
    assert bench.operations.performed == [0, 0, 1]


async def test_a_gap_before_a_refused_operation_is_still_waited_for(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    bad = RefusedOperation("forward_backward", "bad", taints=True)
    found = {
        0: EarlierOperation("create_model", await bench.append_to_journal("create_model", 0), outcome=Outcome.DONE),
        2: EarlierOperation(
            "forward_backward", await bench.append_to_journal("forward_backward", 2), bad, Outcome.FAILED
        ),
    }
    async with resumed(bench, found):
        await bench.forward_backward(1)
        assert await bench.result(1) == {"seq_id": 1}


async def test_a_run_that_cannot_be_recovered_leaves_no_futures(make_bench: MakeBench) -> None:
    bench = await make_bench()
    found = {
        0: EarlierOperation("create_model", await bench.append_to_journal("create_model", 0), outcome=Outcome.DONE)
    }
    step = OptimStepRequest(model_id=RUN_ID).model_dump_json().encode()
    for seq_id in range(1, 100):
        body = step if seq_id < 99 else b"not JSON"
        found[seq_id] = EarlierOperation("optim_step", await bench.append_to_journal("optim_step", seq_id, body))
    with pytest.raises(RequestError):
        async with resumed(bench, found):
            pass
    with pytest.raises(RequestError, match="is unknown"):
        await bench.futures.wait(request_id_of(bench.run.record.run_id, 1), "alice", 0)


async def test_a_run_is_not_rebuilt_from_its_beginning_across_a_hole(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 2):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await wait_for_snapshot(bench, seq_id)
    (bench.snapshots / "1" / "manifest.json").unlink()
    (bench.snapshots / "2" / "state").write_bytes(b"STATE")
    found = {
        0: EarlierOperation("create_model", await bench.append_to_journal("create_model", 0), outcome=Outcome.DONE)
    }
    async with resumed(bench, found):
        await bench.optim_step(3)
        assert "snapshots are damaged" in (await bench.result(3))["error"]


# --- Snapshots at other places than after steps ---


async def test_without_steps_snapshots_are_taken_after_enough_bytes(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_bytes=100)
    for seq_id in range(1, 8):
        await bench.forward_backward(seq_id)
        await bench.result(seq_id)
        await asyncio.sleep(0.1)
    await wait_until(bench, lambda: len(list(bench.snapshots.glob("[0-9]*"))) == 2)
    CrashingOperations(bench, (8,))
    await bench.forward_backward(8)
    await bench.result(8)
    restored = performed_since_rebuild(bench)
    assert restored[1].startswith("restore ") and len(restored) < 8


async def test_a_load_is_snapshotted_at_once_while_another_snapshot_is_written(
    make_bench: MakeBench,
) -> None:
    """Otherwise the operations after it would be applied twice."""
    bench = await make_bench(snapshot_steps=1)
    is_written, take = asyncio.Event(), bench.operations.snapshot_run

    async def snapshot(run_id: str, directory: Path) -> None:
        await take(run_id, directory)
        (directory / "state").write_text(str(bench.operations.performed))
        await is_written.wait()

    bench.operations.snapshot_run = snapshot  # pyright: ignore[reportAttributeAccessIssue]
    await bench.optim_step(1)
    await bench.submit(2, LoadWeights("tinker://a/weights/b", optimizer=False))
    for seq_id in (3, 4):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
    is_written.set()
    await wait_until(bench, lambda: (bench.snapshots / "2" / "manifest.json").exists())
    assert (bench.snapshots / "2" / "state").read_text() == "[0, 1, 'snapshot', 2, 'snapshot']"


async def test_a_snapshot_whose_writing_kills_the_worker_each_time_is_given_up(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(snapshot_steps=1)
    deaths = [False, True, True, True]

    async def snapshot(run_id: str, directory: Path) -> None:
        raise WorkerLost("the worker died", alone=deaths.pop(0))

    bench.operations.snapshot_run = snapshot  # pyright: ignore[reportAttributeAccessIssue]
    for seq_id in range(1, 12):
        await bench.optim_step(seq_id)
        assert await bench.result(seq_id) == {"seq_id": seq_id}
        await wait_for_snapshots(bench)
    assert not deaths
    assert "takes no more snapshots" in caplog.text


async def test_rebuilds_of_a_run_without_snapshots_do_not_add_up_their_strikes(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the next snapshot would forget them, and it takes no more."""
    bench = await make_bench(snapshot_steps=1)

    async def snapshot(run_id: str, directory: Path) -> None:
        raise WorkerLost("the worker died", alone=True)

    bench.operations.snapshot_run = snapshot  # pyright: ignore[reportAttributeAccessIssue]
    for seq_id in range(1, 7):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await wait_until(bench, lambda: not bench.run._snapshots._tasks)
    make, fails = bench.operations.create_in_workers, [True]

    async def dying(run: RunRecord, operation: CreateRun, *, is_rebuild: bool) -> None:
        fails[0] = not fails[0]
        if not fails[0]:
            raise WorkerLost("the worker died", alone=True)
        await make(run, operation, is_rebuild=is_rebuild)

    bench.operations.create_in_workers = dying  # pyright: ignore[reportAttributeAccessIssue]
    for seq_id in range(7, 12):  # each rebuild is tried twice
        CrashingOperations(bench, (seq_id,))
        await bench.optim_step(seq_id)
        assert await bench.result(seq_id) == {"seq_id": seq_id}


async def test_snapshots_published_during_a_rebuild_do_not_cut_its_operations(make_bench: MakeBench) -> None:
    """The rebuild began with an earlier state, so it still needs the operations that they cover."""
    bench = await make_bench()
    is_written, take, make = asyncio.Event(), bench.operations.snapshot_run, bench.operations.create_in_workers

    async def snapshot(run_id: str, directory: Path) -> None:
        await take(run_id, directory)
        await is_written.wait()

    def are_published() -> bool:
        return len(bench.run._snapshots._kept) == 2

    async def make_meanwhile(run, operation, *, is_rebuild: bool) -> None:
        await make(run, operation, is_rebuild=is_rebuild)
        is_written.set()
        with contextlib.suppress(TimeoutError):  # they need not be published yet
            async with asyncio.timeout(1):
                await wait_until(bench, are_published)

    bench.operations.snapshot_run = snapshot  # pyright: ignore[reportAttributeAccessIssue]
    bench.operations.create_in_workers = make_meanwhile  # pyright: ignore[reportAttributeAccessIssue]
    body = Body(b'{"model_id": "session:train:0", "path": "tinker://a/weights/b"}', UNLIMITED)
    for seq_id in (1, 2):
        await bench.submit(seq_id, LoadWeights("tinker://a/weights/b", optimizer=False), body)
        await bench.result(seq_id)
    CrashingOperations(bench, (3,))
    await bench.optim_step(3)
    await bench.result(3)
    assert performed_since_rebuild(bench) == ["create", 1, 2, 3]
    await wait_until(bench, are_published)


async def test_a_settled_idle_run_needs_nothing_from_the_journal(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    await bench.run.refuse(2, RefusedOperation("forward_backward", "bad", taints=True))
    await bench.result(1)
    await bench.run.snapshot_if_older_than(held_seconds=100)
    assert not bench.snapshots.exists(), "nothing is that old"
    await wait_until(bench, lambda: len(bench.logged) == 3)
    await bench.run.snapshot_if_older_than(held_seconds=0)
    assert {path.name for path in bench.snapshots.iterdir()} == {"2", "2-copy"}
    assert not bench.logged
    (bench.snapshots / "2" / "state").write_bytes(b"STATE")
    # The step over the tainted window is refused even if the run is recovered from the snapshot alone.
    async with resumed(bench, {}):
        await bench.optim_step(3)
        assert "(bad)" in (await bench.result(3))["error"]
        await bench.forward_backward(4)
        await bench.optim_step(5)
        assert await bench.result(5) == {"seq_id": 5}
    assert performed_since_rebuild(bench) == ["create", "restore 2-copy", "clear", 4, 5]


@pytest.mark.parametrize("kind", ["strike", "rebuild_strike"])
async def test_an_idle_run_is_settled_despite_strikes(make_bench: MakeBench, kind: str) -> None:
    bench = await make_bench()
    await bench.optim_step(1)
    await bench.result(1)
    await bench.append_to_journal(kind, 1)
    await bench.wait_until_stored()
    await bench.run.snapshot_if_older_than(held_seconds=0)
    await bench.restart()
    bench.operations.performed.clear()
    await bench.run.snapshot_if_older_than(held_seconds=0)
    assert bench.operations.performed == []
    is_held = kind == "rebuild_strike"  # it counts until the next snapshot
    assert any(bench.services.journal._held.values()) == is_held


async def test_a_busy_run_is_settled_after_its_next_operation(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    bench.operations.may_proceed.clear()
    await bench.forward_backward(1)
    await wait_until(bench, lambda: bench.operations.begun == [0, 1])
    await bench.run.snapshot_if_older_than(held_seconds=0)
    await bench.forward_backward(2)
    bench.operations.may_proceed.set()
    await wait_until(bench, lambda: (bench.snapshots / "2" / "manifest.json").exists())


async def test_an_idle_run_is_rebuilt_after_a_restart_to_be_settled(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    found = {
        0: EarlierOperation("create_model", await bench.append_to_journal("create_model", 0), outcome=Outcome.DONE)
    }
    async with resumed(bench, found):
        await bench.run.snapshot_if_older_than(held_seconds=0)
        assert (bench.snapshots / "0-copy" / "manifest.json").exists()
    assert bench.operations.performed == [0, "drop_run", "create", "snapshot"]


async def test_an_idle_run_lost_in_a_crash_is_rebuilt_to_settle_without_warnings(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench()
    await bench.optim_step(1)
    await bench.result(1)
    await wait_until(bench, lambda: len(bench.logged) == 2)
    snapshot, bench.operations.performed = bench.operations.snapshot_run, []

    async def lost(run_id: str, directory: Path) -> None:
        if "create" not in bench.operations.performed:
            raise WorkerLost(f"{run_id} was lost when the worker died: create it again")
        await snapshot(run_id, directory)

    bench.operations.snapshot_run = lost  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(2):
        await bench.run.snapshot_if_older_than(held_seconds=0)
    assert bench.operations.performed == ["drop_run", "create", 1, "snapshot"]
    assert (bench.snapshots / "1-copy" / "manifest.json").exists()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@asynccontextmanager
async def resumed(bench: Bench, found: dict[int, EarlierOperation]) -> AsyncIterator[None]:
    """Recovers the bench's run as another process would."""
    bench.run = Run(bench.run.record, bench.services)
    await bench.run.resume(JournaledRun(found))
    try:
        yield
    finally:
        await bench.run.stop()


@pytest.mark.parametrize("num_strikes", [2, 3])
async def test_an_operation_given_up_before_a_restart_is_not_retried(make_bench: MakeBench, num_strikes: int) -> None:
    """Even if it was not answered yet."""
    bench = await make_bench()
    await bench.result(0)
    await bench.run.stop()
    step = OptimStepRequest(model_id=RUN_ID).model_dump_json().encode()
    await bench.append_to_journal("optim_step", 1, step)
    for _ in range(num_strikes):
        await bench.append_to_journal("strike", 1)
    await bench.restart()
    assert ("died 3 times" in str(await bench.result(1))) == (num_strikes == 3)
    assert (1 in bench.operations.performed) == (num_strikes < 3)


class HangingOperations:
    """Makes operation 2 hang, and the operations in `breaking` fail at once, until `restart`."""

    def __init__(self, bench: Bench, breaking: tuple[int, ...]) -> None:
        self.bench = bench
        self.perform = bench.operations.perform
        bench.operations.perform = self  # pyright: ignore[reportAttributeAccessIssue]
        self.breaking = breaking

    async def __call__(self, run: RunRecord, operation: object, seq_id: int) -> Result:
        if seq_id in self.breaking:
            raise RuntimeError("the disk is full")
        if seq_id == 2:
            await asyncio.Event().wait()
        return await self.perform(run, operation, seq_id)

    async def restart(self) -> None:
        self.bench.operations.perform = self.perform
        await self.bench.restart()


async def test_a_failure_before_a_restart_stays_a_failure(make_bench: MakeBench) -> None:
    """Even if the operations before it are repeated and it could succeed now."""
    bench = await make_bench()
    hanging = HangingOperations(bench, breaking=(3,))
    for seq_id in (1, 2, 3):
        await bench.forward_backward(seq_id)
    failed = await bench.result(3)
    assert "internal error" in failed["error"]
    await hanging.restart()
    assert await bench.result(2) == {"seq_id": 2} and await bench.result(3) == failed
    await bench.optim_step(4)
    assert "forward_backward with seq_id 3 failed" in (await bench.result(4))["error"]
    assert performed_since_rebuild(bench) == ["create", 1, 2, "clear"]
    await bench.optim_step(5)
    assert await bench.result(5) == {"seq_id": 5}


async def test_a_step_that_failed_before_a_restart_keeps_the_gradients(make_bench: MakeBench) -> None:
    bench = await make_bench()
    hanging = HangingOperations(bench, breaking=(3,))
    await bench.forward_backward(1)
    await bench.forward_backward(2)
    await bench.optim_step(3)
    assert "internal error" in (await bench.result(3))["error"]
    await hanging.restart()
    await bench.optim_step(4)
    assert await bench.result(4) == {"seq_id": 4}
    assert performed_since_rebuild(bench) == ["create", 1, 2, 4]


async def test_a_step_given_up_before_a_restart_clears_the_gradients(make_bench: MakeBench) -> None:
    """A step given up without a restart clears them too: they must not reach the next step."""
    bench = await make_bench()
    await bench.result(0)
    await bench.run.stop()
    await bench.append_to_journal("forward_backward", 1, FORWARD_BACKWARD)
    await bench.append_to_journal("optim_step", 2, OptimStepRequest(model_id=RUN_ID).model_dump_json().encode())
    for _ in range(3):
        await bench.append_to_journal("strike", 2)
    await bench.restart()
    assert "died 3 times" in (await bench.result(2))["error"]
    await bench.forward_backward(3)
    assert await bench.result(3) == {"seq_id": 3}
    assert performed_since_rebuild(bench) == ["create", 1, "clear", 3]


async def test_an_operation_that_was_not_alone_is_retried_without_limit(make_bench: MakeBench) -> None:
    bench = await make_bench()
    CrashingOperations(bench, (1,), times=4)
    await bench.forward_backward(1)
    assert await bench.result(1) == {"seq_id": 1}


async def test_a_failed_rebuild_is_reported(make_bench: MakeBench) -> None:
    bench = await make_bench()
    CrashingOperations(bench, (1,))

    async def make(run, operation, *, is_rebuild: bool) -> None:
        raise OperationError("no memory", "server")

    bench.operations.create_in_workers = make  # pyright: ignore[reportAttributeAccessIssue]
    await bench.forward_backward(1)
    assert "cannot be rebuilt: no memory" in (await bench.result(1))["error"]


# --- Rebuilds that crash the worker ---


class CrashingRebuilds:
    """Makes the next `left` rebuilds crash the worker; the one after them waits for `may_proceed`."""

    def __init__(self, bench: Bench) -> None:
        self.num_tries = self.left = 0
        self.may_proceed = asyncio.Event()
        make = bench.operations.create_in_workers

        async def crashing(run: RunRecord, operation: CreateRun, *, is_rebuild: bool) -> None:
            self.num_tries += 1
            if self.left > 0:
                self.left -= 1
                raise WorkerLost("the worker died", alone=True)
            await self.may_proceed.wait()
            await make(run, operation, is_rebuild=is_rebuild)

        bench.operations.create_in_workers = crashing  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_rebuild_that_crashes_workers_fails_at_the_third_crash_across_processes(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench()
    await bench.result(0)
    crashing = CrashingRebuilds(bench)
    crashing.left = 2
    await bench.restart()
    asking = asyncio.create_task(bench.run.info())
    await wait_until(bench, lambda: crashing.num_tries == 3)
    crashing.left = 100
    await bench.restart()
    await asyncio.gather(asking, return_exceptions=True)
    for seq_id in (1, 2):
        await bench.forward_backward(seq_id)
        assert "cannot be rebuilt: the worker died 3 times" in (await bench.result(seq_id))["error"]
        await bench.restart()
    assert crashing.num_tries == 4, "the third process does not try"


async def test_a_snapshot_clears_the_strikes_of_rebuilds(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    crashing = CrashingRebuilds(bench)
    crashing.may_proceed.set()
    for seq_id in (1, 3):
        crashing.left = 2
        await bench.restart()
        await bench.forward_backward(seq_id)
        assert await bench.result(seq_id) == {"seq_id": seq_id}
        await bench.forward_backward(seq_id + 1)
        await wait_for_snapshot(bench, seq_id + 1)
    assert crashing.num_tries == 6
    crashing.left = 1
    await bench.restart()
    await bench.forward_backward(5)
    assert await bench.result(5) == {"seq_id": 5}


async def wait_until(bench: Bench, condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def wait_for_snapshot(bench: Bench, seq_id: int) -> None:
    await wait_until(bench, lambda: bench.run._snapshots.covers(seq_id))
    await wait_for_snapshots(bench)


async def wait_for_snapshots(bench: Bench) -> None:
    """Waits until none is being taken."""
    await wait_until(bench, lambda: not bench.run._snapshots._tasks)


# Restored from a copy


async def restart_on_a_copy(bench: Bench) -> None:
    """Restarts as a server on a directory that `backup` has made."""
    mark_copy(bench.journal_directory.parent, bench.journal_directory.parent, 0.0)
    await restart_again(bench)


async def restart_again(bench: Bench) -> None:
    bench.services = replace(bench.services, restore_marker=RestoreMarker(bench.journal_directory.parent))
    bench.services.restore_marker.begin([RUN_ID])
    await bench.restart()


async def test_a_restored_run_whose_client_is_ahead_is_refused_permanently(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(gap_seconds=0.1)
    await bench.forward_backward(1)
    await bench.optim_step(2)
    await bench.result(2)
    await restart_on_a_copy(bench)
    await bench.forward_backward(5)
    await bench.optim_step(6)
    for seq_id in (5, 6):
        error = (await bench.result(seq_id))["error"]
        assert "restored from a copy of its state of 1970-01-01 00:00:00 UTC" in error and "create a new run" in error
    assert 5 not in bench.operations.performed and "seq_id 3 did not arrive within 0.1 s" in caplog.text
    for _ in range(2):
        with pytest.raises(RequestError, match="is over: the server was restored") as refused:
            await bench.forward_backward(7)
        assert refused.value.status == 410
        await restart_again(bench)


async def test_a_restored_run_without_a_gap_continues_normally(make_bench: MakeBench) -> None:
    bench = await make_bench(gap_seconds=0.1)
    await bench.result(0)
    await restart_on_a_copy(bench)
    await restart_again(bench)
    await bench.forward_backward(2)
    await bench.forward_backward(1)
    assert await bench.result(2) == {"seq_id": 2}
    assert not list(bench.journal_directory.parent.glob("copied.json"))
    await bench.forward_backward(4)
    assert await bench.result(4) == {"seq_id": 4}


async def test_without_a_restore_marker_the_error_mentions_an_older_state(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(gap_seconds=0.1)
    await bench.result(0)
    await bench.restart()
    for first, doubts in ((3, True), (7, False)):
        await bench.forward_backward(first)
        await bench.optim_step(first + 1)
        error = (await bench.result(first + 1))["error"]
        assert ("If the server was restored from an older copy of its state, steps are missing" in error) == doubts
        await bench.forward_backward(first + 2)
    assert "seq_id 1 to 2 given up: they did not arrive within 0.1 s, nor" in caplog.text
    assert "seq_id 6 given up: it did not arrive within 0.1 s\n" in caplog.text


async def test_operations_that_arrive_as_a_rebuild_ends_do_not_overtake(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    CrashingOperations(bench, (1, 2, 3))
    create, arriving = bench.operations.create_in_workers, []

    async def arrive() -> None:
        for seq_id in range(4, 40):
            await bench.forward_backward(seq_id)
            await asyncio.sleep(0)

    async def creating(*arguments: object, **named: object) -> None:
        arriving.append(asyncio.create_task(arrive()))
        await create(*arguments, **named)  # pyright: ignore[reportArgumentType]

    bench.operations.create_in_workers = creating  # pyright: ignore[reportAttributeAccessIssue]
    for seq_id in (1, 2, 3):
        await bench.forward_backward(seq_id)
    await bench.result(3)
    await arriving[0]
    await bench.result(39)
    assert performed_since_rebuild(bench) == ["create", *range(1, 40)]


async def test_a_submit_repeated_after_a_restart_gets_the_same_response(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    bench.operations.may_proceed.clear()
    await bench.forward_backward(1)
    await bench.submit(2, SaveWeightsRequest(model_id=RUN_ID, path="a", seq_id=2), SAVE)
    await bench.restart()
    bench.operations.may_proceed.set()
    repeated = await bench.submit(2, SaveWeightsRequest(model_id=RUN_ID, path="a", seq_id=2), SAVE)
    assert repeated.request_id == f"{RUN_ID}:2"
    assert await bench.result(2) == {"seq_id": 2}


@pytest.mark.parametrize("is_chained", [False, True])
async def test_gradients_that_could_not_be_cleared_taint_the_next_step_too(
    make_bench: MakeBench, is_chained: bool
) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    await bench.run.refuse(2, RefusedOperation("forward_backward", "bad", taints=True))
    clear, left = bench.operations.clear_gradients, [1]

    async def failing(run: RunRecord, seq_id: int) -> None:
        if left:
            left.pop()
            raise OperationError("there is no memory for the run", "server")
        await clear(run, seq_id)

    bench.operations.clear_gradients = failing  # pyright: ignore[reportAttributeAccessIssue]
    await bench.optim_step(3)
    if not is_chained:
        assert "no memory" in (await bench.result(3))["error"]
    await bench.forward_backward(4)
    await bench.optim_step(5)
    assert "not taken" in (await bench.result(5))["error"]
    await bench.forward_backward(6)
    await bench.optim_step(7)
    assert await bench.result(7) == {"seq_id": 7}
    CrashingOperations(bench, (8,))
    await bench.forward_backward(8)
    assert await bench.result(8) == {"seq_id": 8}
    assert performed_since_rebuild(bench) == ["create", 1, 4, "clear", 6, 7, 8]
