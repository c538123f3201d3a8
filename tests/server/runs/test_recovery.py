"""A run whose worker dies: it is made again, and what was under way goes on in its order, once."""

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
from trainhouse.server.http.bodies import Received
from trainhouse.server.journal.futures import Result
from trainhouse.server.journal.journal import Header
from trainhouse.server.journal.restore_marker import Copied, mark_copy
from trainhouse.server.runs.operations import CreateRun, LoadWeights
from trainhouse.server.runs.queued import Refused
from trainhouse.server.runs.recovery import Earlier, Inherited
from trainhouse.server.runs.replay_log import Outcome
from trainhouse.server.runs.run import Run
from trainhouse.server.store import RunRecord
from trainhouse.workers.protocol.verbs import WorkerLost

from ..bench import FORWARD_BACKWARD, RUN_ID, Bench, MakeBench

pytestmark = pytest.mark.anyio


class Dying:
    """Fails as a worker's death does, so many times; `failing` asks anew at each try."""

    def __init__(self, bench: Bench, seq_ids: tuple[int, ...], times: int = 1, alone: bool = False) -> None:
        self.left = dict.fromkeys(seq_ids, times)
        perform = bench.operations.perform

        async def dying(run, operation, seq_id):
            if self.left.get(seq_id, 0) > 0 and "make" not in bench.operations.performed[-1:]:
                self.left[seq_id] -= 1
                await asyncio.sleep(0)
                raise WorkerLost("the worker died", alone=alone)
            return await perform(run, operation, seq_id)

        bench.operations.perform = dying  # pyright: ignore[reportAttributeAccessIssue]


def trained(bench: Bench) -> list:
    """What the workers did since they lost the run."""
    performed = bench.operations.performed
    return performed[len(performed) - 1 - performed[::-1].index("make") :]


async def test_it_is_made_again_from_its_beginning_and_goes_on(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    await bench.optim_step(2)
    await bench.result(2)
    Dying(bench, (3, 4))
    await bench.forward_backward(3)
    await bench.optim_step(4)
    assert await bench.result(3) == {"seq_id": 3} and await bench.result(4) == {"seq_id": 4}
    assert trained(bench) == ["make", 1, 2, 3, 4]
    await bench.forward_backward(5)
    assert await bench.result(5) == {"seq_id": 5}


async def test_what_a_snapshot_holds_is_not_repeated(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 3):
        await bench.forward_backward(seq_id)
        await bench.optim_step(seq_id + 1)
        await bench.result(seq_id + 1)
        await snapshotted(bench, seq_id + 1)
    Dying(bench, (5,))
    await bench.forward_backward(5)
    await bench.result(5)
    assert trained(bench) == ["make", "restore 4", 5]


async def test_a_damaged_snapshot_falls_back_to_the_one_before(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 2, 3):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await snapshotted(bench, seq_id)
    (bench.snapshots / "3" / "state").write_bytes(b"STATE")
    Dying(bench, (4,))
    await bench.optim_step(4)
    await bench.result(4)
    assert trained(bench)[:4] == ["make", "restore 2", 3, 4]


async def test_an_operation_that_workers_die_of_fails_at_the_third_time(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    Dying(bench, (2,), times=10, alone=True)
    await bench.forward_backward(2)
    failed = await bench.result(2)
    assert "died 3 times" in failed["error"] and failed["category"] == "user"
    await bench.optim_step(3)
    assert "not taken" in (await bench.result(3))["error"]
    await bench.forward_backward(4)
    assert await bench.result(4) == {"seq_id": 4}


async def test_without_a_whole_snapshot_it_does_not_begin_anew_in_silence(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 2):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await snapshotted(bench, seq_id)
    await until(bench, lambda: not any(past.seq_id <= 1 for past in bench.run._state.history._pasts))
    for seq_id in (1, 2):
        (bench.snapshots / str(seq_id) / "state").write_bytes(b"STATE")
    Dying(bench, (3,))
    await bench.optim_step(3)
    assert "snapshots are damaged" in (await bench.result(3))["error"]


async def test_a_step_that_workers_die_of_is_not_repeated(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    Dying(bench, (2,), times=3, alone=True)
    await bench.optim_step(2)
    assert "died 3 times" in (await bench.result(2))["error"]
    await bench.forward_backward(3)
    assert await bench.result(3) == {"seq_id": 3}
    assert trained(bench) == ["make", 1, "clear", 3]


async def test_a_refused_step_is_nothing_to_repeat_and_leaves_the_window_as_it_is(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.run.refuse(1, Refused("forward_backward", "bad", taints=True))
    await bench.run.refuse(2, Refused("optim_step", "bad", taints=False))
    await bench.forward_backward(3)
    await bench.optim_step(4)
    assert "not taken" in (await bench.result(4))["error"]
    Dying(bench, (5,))
    await bench.forward_backward(5)
    assert await bench.result(5) == {"seq_id": 5}
    assert trained(bench) == ["make", 3, "clear", 5]


async def test_after_a_restart_nothing_is_done_again_that_a_snapshot_holds(make_bench: MakeBench) -> None:
    """Although nobody has its result any more."""
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 2):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await snapshotted(bench, seq_id)
    place = await bench.services.journal.append(Header("optim_step", "alice", RUN_ID, 2, f"{RUN_ID}:2"))
    num_performed = len(bench.operations.performed)
    async with resumed(bench, {2: Earlier("optim_step", place)}):
        await bench.optim_step(3)
        assert await bench.result(3) == {"seq_id": 3}
    assert bench.operations.performed[num_performed:][:4] == ["discard", "make", "restore 2", 3]


async def test_a_save_that_was_answered_is_not_published_again(make_bench: MakeBench) -> None:
    """Although what came before it has no answer any more, and is done once more."""
    bench = await make_bench()
    await bench.result(0)
    contents = {
        1: OptimStepRequest(model_id=RUN_ID, seq_id=1),
        2: SaveWeightsRequest(model_id=RUN_ID, path="a", seq_id=2),
        3: SaveWeightsRequest(model_id=RUN_ID, path="b", seq_id=3),
    }
    found = {0: Earlier("create_model", await bench.journaled("create_model", 0), outcome=Outcome.DONE)}
    for seq_id, content in contents.items():
        place = await bench.journaled(content.type, seq_id, content.model_dump_json().encode())
        found[seq_id] = Earlier(content.type, place, outcome=Outcome.DONE if seq_id == 2 else None)
    async with resumed(bench, found):
        assert await bench.result(3) == {"seq_id": 3}
    assert bench.operations.performed == [0, "discard", "make", 1, 3]


async def test_a_gap_where_the_journal_is_damaged_is_not_taken_for_what_changed_nothing(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    kinds = {0: "create_model", 1: "forward_backward", 3: "optim_step"}
    found = {
        seq_id: Earlier(kind, await bench.journaled(kind, 1), outcome=Outcome.DONE) for seq_id, kind in kinds.items()
    }
    async with resumed(bench, found):
        assert bench.run.standing(0).num_operations == 0
    bench.services.journal.unreadable.add(found[3].place.segment)
    with pytest.raises(ValueError, match="operation 2 may be what is damaged"):
        async with resumed(bench, found):
            pass


async def test_a_run_ends_that_is_just_about_to_be_made_again(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    ending: list[asyncio.Task[None]] = []

    async def dying(*_: object) -> None:
        await asyncio.sleep(0)
        # Its first step comes before that of the task that is to make the run again.
        ending.append(asyncio.create_task(bench.run.end("the session has ended")))
        raise WorkerLost("the worker died")

    bench.operations.perform = dying  # pyright: ignore[reportAttributeAccessIssue]
    await bench.forward_backward(1)
    assert "the session has ended" in (await bench.result(1))["error"]
    await asyncio.wait_for(ending[0], 30)
    assert not bench.run.is_busy


async def test_an_operation_waits_until_the_database_can_be_used_again(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainhouse.server.runs.run._OUTAGE_SECONDS", 0.2)
    bench = await make_bench(hold=True)
    bench.operations.failing[0] = OperationalError("insert", {}, Exception("database or disk is full"))
    bench.operations.may_go_on.set()
    await until(bench, lambda: bench.operations.performed == [0])
    pending = await bench.futures.wait(bench.run.request_id(0), "alice", 0)
    assert isinstance(pending, Pending) and "database or disk is full" in (pending.queue_state_reason or "")
    await bench.forward_backward(1)
    del bench.operations.failing[0]
    assert await bench.result(0) == {"seq_id": 0} and await bench.result(1) == {"seq_id": 1}
    assert bench.operations.performed == [0, 0, 1]


async def test_a_gap_behind_which_something_was_refused_is_still_waited_for(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    bad = Refused("forward_backward", "bad", taints=True)
    found = {
        0: Earlier("create_model", await bench.journaled("create_model", 0), outcome=Outcome.DONE),
        2: Earlier("forward_backward", await bench.journaled("forward_backward", 2), bad, Outcome.FAILED),
    }
    async with resumed(bench, found):
        await bench.forward_backward(1)
        assert await bench.result(1) == {"seq_id": 1}


async def test_a_run_that_cannot_be_taken_up_leaves_no_future_behind(make_bench: MakeBench) -> None:
    bench = await make_bench()
    found = {0: Earlier("create_model", await bench.journaled("create_model", 0), outcome=Outcome.DONE)}
    step = OptimStepRequest(model_id=RUN_ID).model_dump_json().encode()
    for seq_id in range(1, 100):
        body = step if seq_id < 99 else b"not JSON"
        found[seq_id] = Earlier("optim_step", await bench.journaled("optim_step", seq_id, body))
    with pytest.raises(RequestError):
        async with resumed(bench, found):
            pass
    with pytest.raises(RequestError, match="is unknown"):
        await bench.futures.wait(bench.run.request_id(1), "alice", 0)


async def test_a_beginning_with_a_hole_behind_it_is_no_beginning(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_steps=1)
    for seq_id in (1, 2):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
        await snapshotted(bench, seq_id)
    (bench.snapshots / "1" / "manifest.json").unlink()
    (bench.snapshots / "2" / "state").write_bytes(b"STATE")
    found = {0: Earlier("create_model", await bench.journaled("create_model", 0), outcome=Outcome.DONE)}
    async with resumed(bench, found):
        await bench.optim_step(3)
        assert "snapshots are damaged" in (await bench.result(3))["error"]


# --- Snapshots elsewhere than behind steps ---


async def test_where_no_step_comes_a_snapshot_holds_what_waits_for_it(make_bench: MakeBench) -> None:
    bench = await make_bench(snapshot_bytes=100)
    for seq_id in range(1, 8):
        await bench.forward_backward(seq_id)
        await bench.result(seq_id)
        await asyncio.sleep(0.1)
    await until(bench, lambda: len(list(bench.snapshots.glob("[0-9]*"))) == 2)
    Dying(bench, (8,))
    await bench.forward_backward(8)
    await bench.result(8)
    restored = trained(bench)
    assert restored[1].startswith("restore ") and len(restored) < 8


async def test_what_was_loaded_is_in_a_snapshot_of_that_moment_although_another_is_being_written(
    make_bench: MakeBench,
) -> None:
    """Else what came behind it would be repeated upon itself."""
    bench = await make_bench(snapshot_steps=1)
    is_written, take = asyncio.Event(), bench.operations.snapshot

    async def snapshot(run, directory: Path) -> None:
        await take(run, directory)
        (directory / "state").write_text(str(bench.operations.performed))
        await is_written.wait()

    bench.operations.snapshot = snapshot  # pyright: ignore[reportAttributeAccessIssue]
    await bench.optim_step(1)
    await bench.submit(2, LoadWeights("tinker://a/weights/b", optimizer=False))
    for seq_id in (3, 4):
        await bench.optim_step(seq_id)
        await bench.result(seq_id)
    is_written.set()
    await until(bench, lambda: (bench.snapshots / "2" / "manifest.json").exists())
    assert (bench.snapshots / "2" / "state").read_text() == "[0, 1, 'snapshot', 2, 'snapshot']"


async def test_snapshots_that_are_done_while_a_run_is_made_again_take_nothing_from_it(make_bench: MakeBench) -> None:
    """What they hold is not needed any more, but by who began with an earlier state."""
    bench = await make_bench()
    is_written, take, make = asyncio.Event(), bench.operations.snapshot, bench.operations.make

    async def snapshot(run, directory: Path) -> None:
        await take(run, directory)
        await is_written.wait()

    def are_published() -> bool:
        return len(bench.run._state._kept) == 2

    async def make_meanwhile(run, operation, *, again: bool) -> None:
        await make(run, operation, again=again)
        is_written.set()
        with contextlib.suppress(TimeoutError):  # they may not be yet
            async with asyncio.timeout(1):
                await until(bench, are_published)

    bench.operations.snapshot = snapshot  # pyright: ignore[reportAttributeAccessIssue]
    bench.operations.make = make_meanwhile  # pyright: ignore[reportAttributeAccessIssue]
    body = Received(b'{"model_id": "session:train:0", "path": "tinker://a/weights/b"}')
    for seq_id in (1, 2):
        await bench.submit(seq_id, LoadWeights("tinker://a/weights/b", optimizer=False), body)
        await bench.result(seq_id)
    Dying(bench, (3,))
    await bench.optim_step(3)
    await bench.result(3)
    assert trained(bench) == ["make", 1, 2, 3]
    await until(bench, are_published)


async def test_a_run_that_rests_needs_nothing_of_the_journal_once_it_is_settled(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    await bench.run.refuse(2, Refused("forward_backward", "bad", taints=True))
    await bench.result(1)
    await bench.run.settle(held_seconds=100)
    assert not bench.snapshots.exists(), "nothing is that old"
    await until(bench, lambda: len(bench.run._state.history._pasts) == 3)
    await bench.run.settle(held_seconds=0)
    assert {path.name for path in bench.snapshots.iterdir()} == {"2", "2-copy"}
    assert not bench.run._state.history._pasts
    (bench.snapshots / "2" / "state").write_bytes(b"STATE")
    # The step over the window of which a part was refused is refused, also by who knows the snapshot alone.
    async with resumed(bench, {}):
        await bench.optim_step(3)
        assert "(bad)" in (await bench.result(3))["error"]
        await bench.forward_backward(4)
        await bench.optim_step(5)
        assert await bench.result(5) == {"seq_id": 5}
    assert trained(bench) == ["make", "restore 2-copy", "clear", 4, 5]


@pytest.mark.parametrize("kind", ["strike", "rebuild_strike"])
async def test_a_run_that_rests_is_settled_whatever_struck_it(make_bench: MakeBench, kind: str) -> None:
    bench = await make_bench()
    await bench.optim_step(1)
    await bench.result(1)
    await bench.journaled(kind, 1)
    await bench._all_stored()
    await bench.run.settle(held_seconds=0)
    await bench.restart()
    bench.operations.performed.clear()
    await bench.run.settle(held_seconds=0)
    assert bench.operations.performed == []
    is_held = kind == "rebuild_strike"  # it counts until there is another snapshot
    assert any(bench.services.journal._held.values()) == is_held


async def test_a_run_that_is_at_work_is_settled_behind_its_next_operation(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    bench.operations.may_go_on.clear()
    await bench.forward_backward(1)
    await until(bench, lambda: bench.operations.begun == [0, 1])
    await bench.run.settle(held_seconds=0)
    await bench.forward_backward(2)
    bench.operations.may_go_on.set()
    await until(bench, lambda: (bench.snapshots / "2" / "manifest.json").exists())


async def test_a_run_that_rests_since_a_restart_is_made_again_to_be_settled(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    found = {0: Earlier("create_model", await bench.journaled("create_model", 0), outcome=Outcome.DONE)}
    async with resumed(bench, found):
        await bench.run.settle(held_seconds=0)
        assert (bench.snapshots / "0-copy" / "manifest.json").exists()
    assert bench.operations.performed == [0, "discard", "make", "snapshot"]


async def test_a_run_that_rests_when_its_worker_dies_is_rebuilt_to_be_settled_and_nobody_is_alarmed(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench()
    await bench.optim_step(1)
    await bench.result(1)
    await until(bench, lambda: len(bench.run._state.history._pasts) == 2)
    snapshot, bench.operations.performed = bench.operations.snapshot, []

    async def lost(run: RunRecord, directory: Path) -> None:
        if "make" not in bench.operations.performed:
            raise WorkerLost(f"{run.run_id} was lost when the worker died: create it anew")
        await snapshot(run, directory)

    bench.operations.snapshot = lost  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(2):
        await bench.run.settle(held_seconds=0)
    assert bench.operations.performed == ["discard", "make", 1, "snapshot"]
    assert (bench.snapshots / "1-copy" / "manifest.json").exists()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@asynccontextmanager
async def resumed(bench: Bench, found: dict[int, Earlier]) -> AsyncIterator[None]:
    """The bench's run as another process takes it up."""
    bench.run = Run(bench.run.record, bench.services)
    await bench.run.resume(Inherited(found))
    try:
        yield
    finally:
        await bench.run.stop()


@pytest.mark.parametrize("num_strikes", [2, 3])
async def test_what_was_struck_out_before_a_restart_is_not_tried_again(make_bench: MakeBench, num_strikes: int) -> None:
    """Although nobody was answered yet."""
    bench = await make_bench()
    await bench.result(0)
    await bench.run.stop()
    step = OptimStepRequest(model_id=RUN_ID).model_dump_json().encode()
    await bench.journaled("optim_step", 1, step)
    for _ in range(num_strikes):
        await bench.journaled("strike", 1)
    await bench.restart()
    assert ("died 3 times" in str(await bench.result(1))) == (num_strikes == 3)
    assert (1 in bench.operations.performed) == (num_strikes < 3)


class Once:
    """Until the end of this process the second operation does not end, and those in `breaking` fail at once."""

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


async def test_what_has_failed_before_a_restart_does_not_count_behind_it(make_bench: MakeBench) -> None:
    """Although what comes before it is done again, and it could be done now."""
    bench = await make_bench()
    once = Once(bench, breaking=(3,))
    for seq_id in (1, 2, 3):
        await bench.forward_backward(seq_id)
    failed = await bench.result(3)
    assert "internal error" in failed["error"]
    await once.restart()
    assert await bench.result(2) == {"seq_id": 2} and await bench.result(3) == failed
    await bench.optim_step(4)
    assert "forward_backward with seq_id 3 failed" in (await bench.result(4))["error"]
    assert trained(bench) == ["make", 1, 2, "clear"]
    await bench.optim_step(5)
    assert await bench.result(5) == {"seq_id": 5}


async def test_a_step_that_has_failed_before_a_restart_leaves_the_gradients_as_they_are(make_bench: MakeBench) -> None:
    bench = await make_bench()
    once = Once(bench, breaking=(3,))
    await bench.forward_backward(1)
    await bench.forward_backward(2)
    await bench.optim_step(3)
    assert "internal error" in (await bench.result(3))["error"]
    await once.restart()
    await bench.optim_step(4)
    assert await bench.result(4) == {"seq_id": 4}
    assert trained(bench) == ["make", 1, 2, 4]


async def test_a_step_that_was_struck_out_before_a_restart_takes_the_gradients_along(make_bench: MakeBench) -> None:
    """As it has where it is struck out in one process: they are not those of the next step."""
    bench = await make_bench()
    await bench.result(0)
    await bench.run.stop()
    await bench.journaled("forward_backward", 1, FORWARD_BACKWARD)
    await bench.journaled("optim_step", 2, OptimStepRequest(model_id=RUN_ID).model_dump_json().encode())
    for _ in range(3):
        await bench.journaled("strike", 2)
    await bench.restart()
    assert "died 3 times" in (await bench.result(2))["error"]
    await bench.forward_backward(3)
    assert await bench.result(3) == {"seq_id": 3}
    assert trained(bench) == ["make", 1, "clear", 3]


async def test_one_that_was_not_alone_is_tried_as_often_as_it_takes(make_bench: MakeBench) -> None:
    bench = await make_bench()
    Dying(bench, (1,), times=4)
    await bench.forward_backward(1)
    assert await bench.result(1) == {"seq_id": 1}


async def test_a_run_that_cannot_be_made_again_says_so(make_bench: MakeBench) -> None:
    bench = await make_bench()
    Dying(bench, (1,))

    async def make(run, operation, *, again: bool) -> None:
        raise OperationError("no memory", "server")

    bench.operations.make = make  # pyright: ignore[reportAttributeAccessIssue]
    await bench.forward_backward(1)
    assert "cannot be made again: no memory" in (await bench.result(1))["error"]


# --- Making it again kills the worker ---


class Killing:
    """Tries to make the run again kill the worker, `left` times; the next one waits until it may go on."""

    def __init__(self, bench: Bench) -> None:
        self.num_tries = self.left = 0
        self.may_go_on = asyncio.Event()
        make = bench.operations.make

        async def killing(run: RunRecord, operation: CreateRun, *, again: bool) -> None:
            self.num_tries += 1
            if self.left > 0:
                self.left -= 1
                raise WorkerLost("the worker died", alone=True)
            await self.may_go_on.wait()
            await make(run, operation, again=again)

        bench.operations.make = killing  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_run_whose_rebuild_kills_workers_is_given_up_at_the_third_time_in_all_processes_together(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench()
    await bench.result(0)
    killing = Killing(bench)
    killing.left = 2
    await bench.restart()
    asking = asyncio.create_task(bench.run.info())
    await until(bench, lambda: killing.num_tries == 3)
    killing.left = 100
    await bench.restart()
    await asyncio.gather(asking, return_exceptions=True)
    for seq_id in (1, 2):
        await bench.forward_backward(seq_id)
        assert "cannot be made again: the worker died 3 times" in (await bench.result(seq_id))["error"]
        await bench.restart()
    assert killing.num_tries == 4, "the third process has not even tried"


async def test_strikes_against_making_a_run_again_are_forgotten_with_the_next_snapshot(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    killing = Killing(bench)
    killing.may_go_on.set()
    for seq_id in (1, 3):
        killing.left = 2
        await bench.restart()
        await bench.forward_backward(seq_id)
        assert await bench.result(seq_id) == {"seq_id": seq_id}
        await bench.forward_backward(seq_id + 1)
        await snapshotted(bench, seq_id + 1)
    assert killing.num_tries == 6
    killing.left = 1
    await bench.restart()
    await bench.forward_backward(5)
    assert await bench.result(5) == {"seq_id": 5}


async def until(bench: Bench, condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def snapshotted(bench: Bench, seq_id: int) -> None:
    state = bench.run._state
    await until(bench, lambda: state.covers(seq_id) and not state._snapshotting)


# Put back


async def restarted_on_a_copy(bench: Bench) -> None:
    """As by a server that starts on a directory that `backup` has made."""
    mark_copy(bench.journal_directory.parent, bench.journal_directory.parent, 0.0)
    await restarted_again(bench)


async def restarted_again(bench: Bench) -> None:
    bench.services = replace(bench.services, copied=Copied(bench.journal_directory.parent))
    bench.services.copied.begin([RUN_ID])
    await bench.restart()


async def test_a_run_of_a_copy_whose_client_is_ahead_is_refused_for_good(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(gap_seconds=0.1)
    await bench.forward_backward(1)
    await bench.optim_step(2)
    await bench.result(2)
    await restarted_on_a_copy(bench)
    await bench.forward_backward(5)
    await bench.optim_step(6)
    for seq_id in (5, 6):
        error = (await bench.result(seq_id))["error"]
        assert "put back to a copy of its state of 1970-01-01 00:00:00 UTC" in error and "create a new run" in error
    assert 5 not in bench.operations.performed and "seq_id 3 did not arrive within 0.1 s" in caplog.text
    for _ in range(2):
        with pytest.raises(RequestError, match="is over: the server was put back") as refused:
            await bench.forward_backward(7)
        assert refused.value.status == 410
        await restarted_again(bench)


async def test_a_run_of_a_copy_that_goes_on_without_a_gap_is_as_any_other(make_bench: MakeBench) -> None:
    bench = await make_bench(gap_seconds=0.1)
    await bench.result(0)
    await restarted_on_a_copy(bench)
    await restarted_again(bench)
    await bench.forward_backward(2)
    await bench.forward_backward(1)
    assert await bench.result(2) == {"seq_id": 2}
    assert not list(bench.journal_directory.parent.glob("copied.json"))
    await bench.forward_backward(4)
    assert await bench.result(4) == {"seq_id": 4}


async def test_without_a_mark_the_refusal_says_that_the_state_may_be_older(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(gap_seconds=0.1)
    await bench.result(0)
    await bench.restart()
    for first, doubts in ((3, True), (7, False)):
        await bench.forward_backward(first)
        await bench.optim_step(first + 1)
        error = (await bench.result(first + 1))["error"]
        assert ("if it was put back to an older state, steps are missing" in error) == doubts
        await bench.forward_backward(first + 2)
    assert "seq_id 1 to 2 given up: they did not arrive within 0.1 s, nor" in caplog.text
    assert "seq_id 6 given up: it did not arrive within 0.1 s\n" in caplog.text
