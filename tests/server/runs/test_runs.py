"""Run: the order of operations, duplicates, refusals, gaps and the end, over a real journal and real futures.

The operations only record that they were performed, and fail if the test says so.
"""

import asyncio
import gc
import time
import weakref

import numpy as np
import pytest
from trainhouse.schemas.checkpoints import SaveWeightsRequest
from trainhouse.schemas.errors import OperationError, RequestError
from trainhouse.schemas.futures import Pending
from trainhouse.schemas.training import Datum, ForwardBackwardRequest, OptimStepRequest
from trainhouse.server.journal.journal import read_journal
from trainhouse.server.operations.loading import LoadWeights
from trainhouse.server.operations.operation import RefusedOperation
from trainhouse.server.runs.operation_queue import MAX_AHEAD

from ..bench import CREATION, RUN_ID, MakeBench

pytestmark = pytest.mark.anyio


async def test_out_of_order_submits_run_in_order(make_bench: MakeBench) -> None:
    bench = await make_bench()
    for seq_id in (3, 2, 5, 4, 1):
        assert await bench.forward_backward(seq_id) == f"{RUN_ID}:{seq_id}"
    assert await bench.result(5) == {"seq_id": 5}
    assert bench.operations.performed == [0, 1, 2, 3, 4, 5]


async def test_a_submit_is_answered_before_its_turn(make_bench: MakeBench) -> None:
    """Protocol rule 6: the SDK sends chunk 1 only after the later ones were answered."""
    bench = await make_bench(hold=True)
    async with asyncio.timeout(30):
        await bench.forward_backward(2)
        await bench.forward_backward(1)
    assert bench.operations.performed == []
    bench.operations.may_proceed.set()
    assert await bench.result(2) == {"seq_id": 2}


async def test_a_repeated_submit_runs_once_while_waiting_and_after(make_bench: MakeBench) -> None:
    bench = await make_bench(hold=True)
    assert len({await bench.optim_step(1) for _ in range(3)}) == 1
    assert len(set(await asyncio.gather(*(bench.optim_step(2) for _ in range(5))))) == 1
    bench.operations.may_proceed.set()
    await bench.result(2)
    assert await bench.optim_step(1) == f"{RUN_ID}:1"
    assert await bench.forward_backward(2) == f"{RUN_ID}:2", "body differences are ignored"
    await bench.optim_step(3)
    await bench.result(3)
    assert bench.operations.performed == [0, 1, 2, 3]


async def test_the_operation_is_journaled_as_received_before_the_answer(make_bench: MakeBench) -> None:
    bench = await make_bench(hold=True)
    await bench.submit(2, OptimStepRequest(model_id=RUN_ID, seq_id=2))
    await bench.run.refuse(1, RefusedOperation("forward_backward", "not protobuf", taints=True))
    (segment,) = bench.journal_directory.glob("*.segment")
    entries = list(read_journal(segment))
    assert [(entry.header.kind, entry.header.seq_id, entry.header.refused, entry.body) for entry in entries] == [
        ("create_model", 0, None, CREATION.received),
        ("optim_step", 2, None, b"as received"),
        ("forward_backward", 1, "not protobuf", b""),
    ]


async def test_a_refused_seq_id_counts_as_done(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.run.refuse(1, RefusedOperation("optim_step", "learning_rate is -1", taints=False))
    await bench.forward_backward(2)
    assert await bench.result(2) == {"seq_id": 2}
    with pytest.raises(RequestError, match=r"learning_rate is -1.*next seq_id"):
        await bench.optim_step(1)
    await bench.run.refuse(2, RefusedOperation("forward_backward", "late", taints=True))
    await bench.optim_step(3)
    assert await bench.result(3) == {"seq_id": 3}, "an accepted operation cannot be refused afterwards"


async def test_a_failure_does_not_block_the_next_operations(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench()
    bench.operations.failing = {
        1: OperationError("token 900 is not in the vocabulary"),
        2: RequestError("there is no checkpoint", 404),
        3: RuntimeError("a bug"),
    }
    for seq_id in (1, 2, 3):
        await bench.forward_backward(seq_id, forward_only=True)
    await bench.optim_step(4)
    assert await bench.result(1) == {"error": "token 900 is not in the vocabulary", "category": "user"}
    assert await bench.result(2) == {"error": "there is no checkpoint", "category": "user"}
    internal = await bench.result(3)
    assert internal["category"] == "server" and "a bug" not in internal["error"]
    assert "a bug" in caplog.text
    assert await bench.result(4) == {"seq_id": 4}


@pytest.mark.parametrize("how", ["failed", "refused"])
async def test_a_step_over_an_incomplete_window_fails_and_clears_it(make_bench: MakeBench, how: str) -> None:
    bench = await make_bench()
    await bench.forward_backward(1)
    if how == "failed":
        bench.operations.failing = {2: OperationError("loss is NaN")}
        await bench.forward_backward(2)
        await bench.result(2)  # a step dispatched before the failure would be refused by the worker
    else:
        await bench.run.refuse(2, RefusedOperation("forward_backward", "loss is NaN", taints=True))
    await bench.optim_step(3)
    failed = await bench.result(3)
    assert failed["category"] == "user"
    assert "forward_backward with seq_id 2" in failed["error"] and "loss is NaN" in failed["error"]
    assert bench.operations.performed[-1] == "clear"
    await bench.forward_backward(4)
    await bench.optim_step(5)
    assert await bench.result(5) == {"seq_id": 5}


async def test_the_worker_refuses_a_step_dispatched_before_its_batch_failed(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench()
    await bench.result(0)
    bench.operations.may_proceed.clear()
    bench.operations.failing = {1: OperationError("loss is NaN"), 2: OperationError("the window is incomplete")}
    await bench.forward_backward(1)
    await bench.optim_step(2)
    await bench.forward_backward(3)
    await bench.optim_step(4)
    await asyncio.sleep(0.05)
    assert bench.operations.begun == [0, 1, 2, 3, 4]
    bench.operations.may_proceed.set()
    failed = await bench.result(2)
    assert "forward_backward with seq_id 1 failed (loss is NaN)" in failed["error"] and failed["category"] == "user"
    assert await bench.result(4) == {"seq_id": 4}
    await bench.optim_step(5)
    assert await bench.result(5) == {"seq_id": 5}
    assert bench.operations.performed == [0, 1, 2, 3, 4, 5], "the worker has cleared the window already"


async def test_failed_forwards_and_saves_do_not_taint_and_a_load_clears_the_taint(make_bench: MakeBench) -> None:
    bench = await make_bench()
    bench.operations.failing = {number: OperationError("no") for number in (1, 2, 4)}
    await bench.forward_backward(1, forward_only=True)
    await bench.submit(2, SaveWeightsRequest(model_id=RUN_ID, seq_id=2, path="a"))
    await bench.optim_step(3)
    assert await bench.result(3) == {"seq_id": 3}
    await bench.forward_backward(4)
    await bench.submit(5, LoadWeights("tinker://a/weights/b", optimizer=False))
    await bench.optim_step(6)
    assert await bench.result(6) == {"seq_id": 6}


def batch(seq_id: int, loss_fn: str = "cross_entropy", num_tokens: int = 1) -> ForwardBackwardRequest:
    return ForwardBackwardRequest(RUN_ID, seq_id, (Datum(np.broadcast_to(np.int32(1), num_tokens)),), loss_fn)


async def test_training_is_dispatched_ahead_and_other_operations_run_alone(make_bench: MakeBench) -> None:
    bench = await make_bench(hold=True)
    operations = [
        batch(1),
        OptimStepRequest(model_id=RUN_ID, seq_id=2),
        batch(3),
        SaveWeightsRequest(model_id=RUN_ID, seq_id=4, path="a"),
        OptimStepRequest(model_id=RUN_ID, seq_id=5),
        batch(6, "stable_reinforce"),
        batch(7),
    ]
    for seq_id, operation in enumerate(operations, 1):
        await bench.submit(seq_id, operation)
    begun = []
    while len(bench.operations.performed) < 8:
        await asyncio.sleep(0.02)
        begun.append(bench.operations.begun[len(bench.operations.performed) :])
        bench.operations.may_proceed.set()
        await asyncio.sleep(0)
        bench.operations.may_proceed.clear()
    assert begun == [[0], [1, 2, 3], [4], [5], [6], [7]]
    assert bench.operations.performed == list(range(8))


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 64), (3 << 20, 5), (17 << 20, 1)])
async def test_operations_dispatched_ahead_are_bounded_in_number_and_bytes(
    make_bench: MakeBench, num_tokens: int, most: int
) -> None:
    """At most 64 operations and 64 MiB; a larger operation is dispatched alone."""
    bench = await make_bench()
    await bench.result(0)
    bench.operations.may_proceed.clear()
    for seq_id in range(1, 71):
        await bench.submit(seq_id, batch(seq_id, num_tokens=num_tokens))
    await asyncio.sleep(0.05)
    assert bench.operations.begun == list(range(most + 1))
    bench.operations.may_proceed.set()
    await bench.result(70)
    assert bench.operations.performed == list(range(71))


async def test_ending_a_run_cancels_what_was_dispatched_ahead(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    bench.operations.may_proceed.clear()
    for seq_id in (1, 2, 3):
        await bench.forward_backward(seq_id)
    await asyncio.sleep(0.05)
    ending = asyncio.create_task(bench.run.end("the session has ended"))
    await asyncio.sleep(0.05)
    bench.operations.may_proceed.set()
    await ending
    assert await bench.result(1) == {"seq_id": 1}
    failed = {"error": "the session has ended", "category": "user"}
    assert [await bench.result(seq_id) for seq_id in (2, 3)] == [failed] * 2
    assert bench.operations.performed == [0, 1, "drop"]


async def test_a_gap_is_explained_and_given_up_after_a_timeout(make_bench: MakeBench) -> None:
    bench = await make_bench(gap_seconds=0.5)
    await bench.forward_backward(3)
    await bench.result(0)
    waiting = await bench.futures.wait(f"{RUN_ID}:3", "alice", 0.05)
    assert isinstance(waiting, Pending)
    assert waiting.queue_state == "paused_capacity" and "seq_id 1" in (waiting.queue_state_reason or "")
    assert await bench.result(3) == {"seq_id": 3}
    assert bench.operations.performed == [0, 3]
    with pytest.raises(RequestError, match=r"within 0\.5 s"):
        await bench.forward_backward(1)
    await bench.optim_step(4)
    assert "seq_id 1" in (await bench.result(4))["error"], "the missing operation may have been part of the batch"


async def test_a_gap_filled_in_time_has_no_effect(make_bench: MakeBench) -> None:
    bench = await make_bench(gap_seconds=0.3)
    await bench.forward_backward(2)
    await asyncio.sleep(0.15)
    await bench.forward_backward(1)
    await bench.result(2)
    await asyncio.sleep(0.3)
    await bench.optim_step(3)
    assert await bench.result(3) == {"seq_id": 3}
    assert bench.operations.performed == [0, 1, 2, 3]


async def test_arrivals_do_not_delay_giving_up_a_gap_while_the_journal_fails(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainhouse.server.runs.operation_queue._RETRY_SECONDS", 0.5)
    bench = await make_bench(gap_seconds=0.1)
    await bench.result(0)
    await bench.forward_backward(2)
    with bench.failing_journal():
        async with asyncio.timeout(30):
            while caplog.text.count("seq_id 1 given up") < 3:
                with pytest.raises(RequestError, match="free space"):
                    await bench.forward_backward(3)
                await asyncio.sleep(0.05)
    assert await bench.result(2) == {"seq_id": 2}


async def test_operations_of_a_run_that_ended_while_the_journal_failed_are_answered(make_bench: MakeBench) -> None:
    bench = await make_bench(gap_seconds=0.5)
    await bench.result(0)
    await bench.forward_backward(2)
    with bench.failing_journal():
        await bench.run.end("its session ended")
    assert (await bench.result(2))["error"] == "its session ended"


async def test_an_operation_that_was_not_accepted_starts_no_gap(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(gap_seconds=0.1)
    await bench.result(0)
    with bench.failing_journal(), pytest.raises(RequestError, match="free space"):
        await bench.forward_backward(2)
    await asyncio.sleep(0.2)
    assert "Exception in callback" not in caplog.text
    await bench.forward_backward(2)
    await bench.result(2)
    assert "seq_id 1 given up" in caplog.text


async def test_polls_report_how_many_operations_are_ahead(make_bench: MakeBench) -> None:
    bench = await make_bench(hold=True)
    await bench.forward_backward(1)
    await bench.optim_step(2)
    reasons = ["busy: tiny", "1 operation of this run is ahead", "2 operations of this run are ahead"]
    for seq_id, reason in enumerate(reasons):
        waiting = await bench.futures.wait(f"{RUN_ID}:{seq_id}", "alice", 0.01)
        assert waiting == Pending(queue_state_reason=reason)


async def test_omitted_seq_ids_are_assigned_in_order(make_bench: MakeBench) -> None:
    bench = await make_bench()
    seq_ids = [
        (await bench.submit(0, OptimStepRequest(model_id=RUN_ID))).seq_id,
        (await bench.submit(0, OptimStepRequest(model_id=RUN_ID))).seq_id,
    ]
    assert seq_ids == [1, 2]
    assert "seq_id" in await bench.result(2)


@pytest.mark.parametrize("seq_id", [-1, MAX_AHEAD + 2])
async def test_impossible_seq_ids_are_refused(make_bench: MakeBench, seq_id: int) -> None:
    bench = await make_bench()
    await bench.result(0)
    with pytest.raises(RequestError, match=str(seq_id)):
        await bench.forward_backward(seq_id)
    await bench.run.refuse(seq_id, RefusedOperation("optim_step", "no", taints=False))
    await bench.optim_step(1)
    assert await bench.result(1) == {"seq_id": 1}


async def test_a_run_that_could_not_be_created_keeps_reporting_the_reason(make_bench: MakeBench) -> None:
    bench = await make_bench(hold=True)
    bench.operations.failing = {0: OperationError("no room for rank 4")}
    await bench.optim_step(1)
    bench.operations.may_proceed.set()
    assert (await bench.result(0))["error"] == "no room for rank 4"
    assert "could not be created: no room for rank 4" in (await bench.result(1))["error"]
    with pytest.raises(RequestError, match="no room") as refusal:
        await bench.optim_step(2)
    assert refusal.value.status == 410


async def test_ending_a_run_finishes_the_current_operation_and_fails_queued_ones(make_bench: MakeBench) -> None:
    bench = await make_bench(hold=True)
    await bench.optim_step(1)
    await bench.optim_step(4)
    await asyncio.sleep(0.05)
    ending = asyncio.create_task(bench.run.end("the session has ended"))
    await asyncio.sleep(0.05)
    assert not ending.done()
    bench.operations.may_proceed.set()
    await ending
    assert await bench.result(0) == {"seq_id": 0}
    failed = {"error": "the session has ended", "category": "user"}
    assert [await bench.result(seq_id) for seq_id in (1, 4)] == [failed] * 2
    assert bench.operations.performed == [0, "drop"]


async def test_a_failed_journal_accepts_nothing_and_a_retry_works(make_bench: MakeBench) -> None:
    bench = await make_bench()
    await bench.result(0)
    with bench.failing_journal(), pytest.raises(RequestError, match="free space"):
        await bench.optim_step(1)
    await bench.optim_step(1)
    assert await bench.result(1) == {"seq_id": 1}


async def test_a_finished_operation_is_released_while_its_result_is_kept(make_bench: MakeBench) -> None:
    """Requests are far larger than results."""
    bench = await make_bench()
    operation = OptimStepRequest(model_id=RUN_ID, seq_id=1)
    watched = weakref.ref(operation)
    await bench.submit(1, operation)
    del operation
    await bench.result(1)
    gc.collect()
    assert watched() is None


async def test_a_thousand_operations_are_fast(make_bench: MakeBench) -> None:
    """Each takes half a millisecond on an idle machine; the bound allows for a busy one."""
    bench = await make_bench()
    started = time.perf_counter()
    for seq_id in range(1, 1001):
        await bench.optim_step(seq_id)
    await bench.result(1000)
    assert time.perf_counter() - started < 10


async def test_a_failed_operation_is_undone_and_answered_even_if_undoing_fails(make_bench: MakeBench) -> None:
    bench = await make_bench()
    bench.operations.failing = {1: OperationError("loss is NaN"), 2: RuntimeError("a bug")}
    bench.operations.failing_undo = {1: OperationError("the worker is gone", "server"), 2: RuntimeError("another bug")}
    for seq_id in (1, 2):
        await bench.forward_backward(seq_id, forward_only=True)
    assert (await bench.result(1))["error"] == "loss is NaN"
    assert "internal error" in (await bench.result(2))["error"]
    await bench.forward_backward(3)
    assert await bench.result(3) == {"seq_id": 3}
    assert bench.operations.undone == [1, 2]
