"""The server's own costs: an empty operation layer by layer, alone and next to waiting futures; and large bodies: their
memory, and how long other requests wait meanwhile.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import psutil
import uvloop
from trainhouse.schemas.codec import JSON, PROTOBUF, encode_forward_backward_request
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.protocol.calls import OperationPart, RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig

from ..live import LiveServer
from .harness import (
    LORA,
    MODEL,
    THREADS,
    Line,
    Section,
    Setup,
    child,
    create_run,
    in_turn,
    request,
    rest,
    timed,
)
from .processes.clients import EMPTY_ROW, NUM_WAITING, connect, datum, new_run
from .processes.workers import TIMED
from .training import cpu_seconds

PER_ROUND, WARM_UPS = 50, 10
PAUSE_SECONDS = 0.01

Operation = Callable[[], object]
Measure = Callable[[], list[float]]
"""Returns the seconds of each operation of a round."""


def latency(setup: Setup) -> Section:
    with setup.server("latency") as server:
        medians = _layers(setup, server.url)
        with _sdk(server.url) as operation:
            client_cpu, server_cpu, worker_cpu = _cpu_milliseconds(server, operation)
            alone, beside_waiting, bytes_per_waiting = _beside_waiting(server, operation, setup.rounds)
    table = [{"up to": layer, "median ms": median} for layer, median in medians.items()]
    notes = [
        "worker: the model's own time, in the process that serves it, one pass right after the other; with pauses: one "
        "every 10 ms. sdk alone: against a server that does nothing.",
        f"Processor time of an operation through the SDK, ms: client {client_cpu:.1f}, server {server_cpu:.1f}, "
        f"worker {worker_cpu:.1f}.",
        f"{NUM_WAITING} futures that wait take {bytes_per_waiting / 1024:.0f} KiB of the server's memory each.",
    ]
    lines = [
        Line("median above the model's own time, ms", medians["sdk"] - medians["worker"], "at most", 4),
        Line(f"median beside {NUM_WAITING} waiting futures, of that alone", beside_waiting / alone, "at most", 1.2),
    ]
    return Section("An empty operation: forward of one 8-token sequence", table, lines, notes)


def _layers(setup: Setup, url: str) -> dict[str, float]:
    """Returns the median milliseconds of an operation as called at each layer, from the worker up to the SDK."""
    config = WorkerConfig(ServedModel(MODEL, str(setup.model)), threads=THREADS)
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        pool = LocalPool(PoolSpec(TIMED, (config,), THREADS))
        dispatch = WorkerDispatch(DispatchConfig(models=(config,), worker=TIMED))
        stack.callback(lambda: runner.run(pool.close()))
        stack.callback(lambda: runner.run(dispatch.close()))
        runner.run(_start(pool, dispatch))
        empty = request("run", [EMPTY_ROW], 0, forward_only=True)
        work = (OperationPart(0, empty),)

        def of_worker(pause_seconds: float) -> Measure:
            return lambda: runner.run(pool.broadcast("time_passes", work, WARM_UPS + PER_ROUND, pause_seconds))[0][
                WARM_UPS:
            ]

        null = stack.enter_context(child("servers", "null"))
        sides = {
            "worker": of_worker(0.0),
            "worker, with pauses": of_worker(PAUSE_SECONDS),
            "pool": lambda: runner.run(_awaited(lambda: pool.broadcast("run_pass", work))),
            "dispatch": lambda: runner.run(_awaited(lambda: dispatch.forward_backward(empty))),
            "http": _called(stack.enter_context(_exchange(url))),
            "sdk": _called(stack.enter_context(_sdk(url))),
            "sdk alone": _called(stack.enter_context(_sdk(f"http://127.0.0.1:{null.receive()}"))),
        }
        rounds = in_turn(sides, setup.rounds)
    return {layer: _median_ms(of_layer) for layer, of_layer in rounds.items()}


async def _start(pool: LocalPool, dispatch: WorkerDispatch) -> None:
    await pool.start()
    await pool.broadcast("create_run", RunSpec("run", LORA))
    await dispatch.start(lambda message: None)
    await dispatch.create_run(MODEL, RunSpec("run", LORA), "tenant")


async def _awaited(call: Callable[[], Awaitable[object]]) -> list[float]:
    times = []
    for _ in range(WARM_UPS + PER_ROUND):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return times[WARM_UPS:]


def _called(operation: Operation, num: int = PER_ROUND, warm_ups: int = WARM_UPS) -> Measure:
    return lambda: [timed(operation) for _ in range(warm_ups + num)][warm_ups:]


def _median_ms(rounds: list[list[float]]) -> float:
    return 1000 * statistics.median(seconds for of_round in rounds for seconds in of_round)


@contextmanager
def _exchange(url: str) -> Iterator[Operation]:
    """Submits and gets the result in one exchange (`Prefer: wait`), protobuf both ways, on one connection."""
    with rest(url) as http:
        content = encode_forward_backward_request(request(create_run(http), [EMPTY_ROW], 0, forward_only=True))
        headers = {"Content-Type": PROTOBUF, "Accept": PROTOBUF, "Prefer": "wait=30"}
        yield lambda: http.post("forward_backward", content=content, headers=headers).raise_for_status()


@contextmanager
def _sdk(url: str) -> Iterator[Operation]:
    with connect(url) as service:
        run, data = new_run(service), [datum(EMPTY_ROW)]
        yield lambda: run.forward(data, "cross_entropy").result(60)


def _cpu_milliseconds(server: LiveServer, operation: Operation, num: int = 200) -> list[float]:
    """Returns the processor time of an operation in the client, the server and the workers."""

    def so_far() -> np.ndarray:
        return np.array([time.process_time(), *cpu_seconds(server)])

    _called(operation)()
    before = so_far()
    for _ in range(num):
        operation()
    return (1000 * (so_far() - before) / num).tolist()


def _beside_waiting(server: LiveServer, operation: Operation, rounds: int) -> tuple[float, float, float]:
    """Returns the median milliseconds alone and next to waiting futures, and the server's bytes for each of these.

    At the end the missing operations are sent, and every future is answered.
    """
    process, grown, measure = psutil.Process(server.process.pid), [0], _called(operation, 100, 20)
    with child("clients", "waiting", server.url) as waiting:
        waiting.receive()
        memory = process.memory_info().rss

        def beside() -> list[float]:
            waiting.ask("wait")
            grown.append(process.memory_info().rss - memory)
            times = measure()
            waiting.ask("leave")
            return times

        found = in_turn({"alone": measure, "beside": beside}, rounds)
        num_answered = waiting.ask("finish")
    assert num_answered == NUM_WAITING, f"{num_answered} of {NUM_WAITING} were answered"
    return _median_ms(found["alone"]), _median_ms(found["beside"]), max(grown) / NUM_WAITING


# Large bodies

BODIES_KEY = "tml-large-bodies"
MAX_WAIT_MS = 250
MEBIBYTE = 1 << 20
NUM_POSITIONS = 1000
SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class Case:
    """make: returns the body of about that many bytes, for a run."""

    what: str
    path: str
    has_key: bool
    mebibytes: int
    make: Callable[[str, int], bytes]
    content_type: str = JSON


def large_bodies(setup: Setup) -> Section:
    table = []
    for index, case in enumerate(CASES):
        # A server for each: memory that one has left would hide what the next takes.
        with setup.server(f"large-bodies-{index}", threads=1) as server:
            table.append(_measured(server, case))
    longest = max(row["longest wait ms"] for row in table)
    notes = [
        "A health probe every 30 ms next to one request. Memory: of the server's process and those that it decodes in.",
    ]
    return Section("Large bodies", table, [Line("longest wait, ms", longest, "at most", MAX_WAIT_MS)], notes)


def _measured(server: LiveServer, case: Case) -> dict[str, Any]:
    with rest(server.url, BODIES_KEY) as http:
        body = case.make(create_run(http), case.mebibytes * MEBIBYTE)
    pid = server.process.pid
    before = psutil.Process(pid).memory_info().rss
    with child("probes", "health", server.url) as health, child("probes", "server", str(pid)) as memory:
        time.sleep(0.5)
        health.ask("begin")
        memory.ask("begin")
        started = time.monotonic()
        status = _send(server.url, case, body)
        seconds = time.monotonic() - started
        time.sleep(SETTLE_SECONDS)
        (wait, _), (peak, _) = health.ask("end"), memory.ask("end")
    return {
        "body": f"{case.what}, {case.mebibytes} MiB",
        "key": "yes" if case.has_key else "no",
        "answer": str(status),
        "answered after s": seconds,
        "longest wait ms": wait,
        "server MiB before": before / MEBIBYTE,
        "at most": peak / MEBIBYTE,
    }


def _send(url: str, case: Case, body: bytes) -> int:
    """Returns the status, after the operation has ended if one was accepted; 0 if the connection was closed."""
    with rest(url, BODIES_KEY, timeout=300) as http:
        if not case.has_key:
            del http.headers["X-API-Key"]
        try:
            answer = http.post(case.path, content=body, headers={"Content-Type": case.content_type})
        except httpx.TransportError:
            return 0
        if answer.status_code == 200 and "request_id" in answer.json():
            poll = {"request_id": answer.json()["request_id"]}
            while http.post("retrieve_future", json=poll).status_code == 408:
                pass
        return answer.status_code


def _many_strings(run_id: str, num_bytes: int) -> bytes:
    return b'{"sdk_version": "x", "tags": ["a"' + b',"a"' * (num_bytes // 4) + b"]}"


def _prompt(run_id: str, num_bytes: int) -> bytes:
    head = f'{{"base_model": "{MODEL}", "prompt": {{"chunks": [{{"type": "encoded_text", "tokens": [7'
    return head.encode() + b",77" * (num_bytes // 3) + b"]}]}}"


def _ppo_datum() -> Datum:
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal(NUM_POSITIONS).astype(np.float32) for name in ("logprobs", "advantages")}
    tokens = random.integers(3, 250, NUM_POSITIONS)
    return Datum(tokens.astype(np.int32), {"target_tokens": tokens} | inputs)


def _json_head(run_id: str) -> bytes:
    return f'{{"model_id": "{run_id}", "seq_id": 1, "loss_fn": "ppo", "data": ['.encode()


def _training_json(run_id: str, num_bytes: int) -> bytes:
    datum = _ppo_datum()
    inputs = {name: array.tolist() for name, array in datum.loss_fn_inputs.items()}
    one = json.dumps({"model_input": datum.tokens.tolist(), "loss_fn_inputs": inputs}).encode()
    return _json_head(run_id) + b",".join([one] * (num_bytes // len(one))) + b"]}"


def _empty_objects(run_id: str, num_bytes: int) -> bytes:
    return _json_head(run_id) + b"{}" + b",{}" * (num_bytes // 3) + b"]}"


def _protobuf(run_id: str, *data: Datum) -> bytes:
    return encode_forward_backward_request(ForwardBackwardRequest(run_id, 1, data, "ppo"))


def _training_protobuf(run_id: str, num_bytes: int) -> bytes:
    datum = _ppo_datum()
    return _protobuf(run_id, *(datum,) * (num_bytes // len(_protobuf(run_id, datum))))


def _small_messages(run_id: str, num_bytes: int) -> bytes:
    """Data without tokens, which take a parser the most memory and time."""
    return _protobuf(run_id) + b"\x1a\x00" * (num_bytes // 2)


STRINGS, PASS = "create_session, strings", "forward_backward"
CASES = [
    *(Case(STRINGS, "create_session", False, size, _many_strings) for size in (50, 100)),
    Case(f"{PASS}, JSON", PASS, False, 50, _training_json),
    *(Case(STRINGS, "create_session", True, size, _many_strings) for size in (50, 100)),
    *(Case(f"{PASS}, JSON", PASS, True, size, _training_json) for size in (50, 100)),
    Case(f"{PASS}, JSON, empty objects", PASS, True, 50, _empty_objects),
    *(Case(f"{PASS}, protobuf", PASS, True, size, _training_protobuf, PROTOBUF) for size in (50, 100)),
    *(Case(f"{PASS}, protobuf, empty data", PASS, True, size, _small_messages, PROTOBUF) for size in (15, 100)),
    Case("asample, JSON", "asample", True, 50, _prompt),
]
