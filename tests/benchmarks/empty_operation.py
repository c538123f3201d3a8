"""Where the time of an empty operation (a `forward` of one 8-token sequence) goes, layer by layer."""

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import tinker
import uvloop
from trainhouse.schemas.codec import PROTOBUF, encode_forward_backward_request
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.protocol.config import ServedModel, WorkerConfig
from trainhouse.workers.protocol.verbs import Part, Pass, RunSpec

from .child import child
from .timed_worker import TIMED
from .workload import MODEL, RANK, datum

EMPTY = datum(list(range(3, 12)))
_PER_ROUND, _WARMUP = 50, 10
_PAUSE_SECONDS = 0.01
_LORA = LoraConfig(rank=RANK, seed=0, train_unembed=False)

Measure = Callable[[int], list[float]]
"""Seconds of each of so many operations, one after the other."""


def layers(model: Path, url: str, threads: int, rounds: int) -> dict[str, float]:
    """Layer -> median milliseconds of the whole operation as called at that layer; the layers take turns.

    worker: the model's own time. sdk alone: against a server that does nothing.
    """
    with _measures(WorkerConfig(ServedModel(MODEL, str(model)), threads=threads), url) as measures:
        times: dict[str, list[float]] = {layer: [] for layer in measures}
        for _ in range(rounds):
            for layer, measure in measures.items():
                times[layer] += measure(_WARMUP + _PER_ROUND)[_WARMUP:]
    return {layer: 1e3 * statistics.median(seconds) for layer, seconds in times.items()}


@contextmanager
def _measures(config: WorkerConfig, url: str) -> Iterator[dict[str, Measure]]:
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        pool = LocalPool(PoolSpec(TIMED, (config,), config.threads or 1))
        dispatch = WorkerDispatch(DispatchConfig(models=(config,), worker=TIMED))
        stack.callback(lambda: runner.run(pool.close()))
        stack.callback(lambda: runner.run(dispatch.close()))
        runner.run(_start(pool, dispatch))
        work = Pass((Part(0, request("run")),))

        def of_worker(pause_seconds: float) -> Measure:
            return lambda num: runner.run(pool.call("time_passes", work, num, pause_seconds))[0]

        def awaited(call: Callable[[], Coroutine[object, object, object]]) -> Measure:
            return lambda num: runner.run(_awaited(call, num))

        yield {
            "worker": of_worker(0.0),
            "worker, with pauses": of_worker(_PAUSE_SECONDS),
            "pool": awaited(lambda: pool.call("run_pass", work)),
            "dispatch": awaited(lambda: dispatch.forward_backward(request("run"))),
            "http": called(stack.enter_context(_exchange(url))),
            "sdk": called(stack.enter_context(sdk(url))),
            "sdk alone": called(stack.enter_context(_sdk_alone())),
        }


async def _start(pool: LocalPool, dispatch: WorkerDispatch) -> None:
    await pool.start()
    await pool.call("create_run", RunSpec("run", _LORA))
    await dispatch.start(lambda message: None)
    await dispatch.create_run(MODEL, RunSpec("run", _LORA), "tenant")


async def _awaited(call: Callable[[], Coroutine[object, object, object]], num: int) -> list[float]:
    times = []
    for _ in range(num):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return times


def called(call: Callable[[], object]) -> Measure:
    def timed() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return lambda num: [timed() for _ in range(num)]


def request(run_id: str) -> ForwardBackwardRequest:
    """seq_id 0: the server numbers it."""
    tokens = np.arange(3, 11, dtype=np.int32)
    inputs = {"target_tokens": tokens.astype(np.int64) + 1, "weights": np.ones(8, np.float32)}
    return ForwardBackwardRequest(run_id, 0, (Datum(tokens, inputs),), "cross_entropy", forward_only=True)


@contextmanager
def _exchange(url: str) -> Iterator[Callable[[], object]]:
    """Submit and result in one exchange (`Prefer: wait`), protobuf both ways, on one connection."""
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-bench", "Prefer": "wait=30"}) as http:
        run_id = create_run(http)
        content = encode_forward_backward_request(request(run_id))
        headers = {"Content-Type": PROTOBUF, "Accept": PROTOBUF}
        yield lambda: http.post("forward_backward", content=content, headers=headers).raise_for_status()


def create_run(http: httpx.Client) -> str:
    """Its id, once it is there. http: with the address, a key, and `Prefer: wait`."""

    def post(path: str, body: dict[str, object]) -> dict[str, str]:
        return http.post(path, json=body).raise_for_status().json()

    session = post("create_session", {"sdk_version": tinker.__version__})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": _LORA.model_dump()}
    return post("create_model", body)["model_id"]


@contextmanager
def sdk(url: str) -> Iterator[Callable[[], object]]:
    """The operation through the official SDK."""
    with tinker.ServiceClient(base_url=url, api_key="tml-bench") as service:
        client = service.create_lora_training_client(MODEL, rank=RANK, seed=0, train_unembed=False).result(60)
        yield lambda: client.forward([EMPTY], "cross_entropy").result(60)


@contextmanager
def _sdk_alone() -> Iterator[Callable[[], object]]:
    with child("null_server") as server, sdk(f"http://127.0.0.1:{server.receive()}") as operation:
        yield operation


@dataclass(frozen=True)
class ProcessorTime:
    """Milliseconds of processor time an operation, of all of a process's threads."""

    client: float
    server: float
    workers: float


def processor_time(server_pid: int, url: str, num: int = 200) -> ProcessorTime:
    """Of the operation through the SDK."""
    with sdk(url) as operation:
        called(operation)(_WARMUP)
        server = psutil.Process(server_pid)
        before = _seconds(server)
        called(operation)(num)
        spent = [1e3 * (after - at_first) / num for at_first, after in zip(before, _seconds(server), strict=True)]
    return ProcessorTime(*spent)


def _seconds(server: psutil.Process) -> tuple[float, float, float]:
    workers = (child.cpu_times() for child in server.children(recursive=True))
    of_server = server.cpu_times()
    return time.process_time(), of_server.user + of_server.system, sum(one.user + one.system for one in workers)
