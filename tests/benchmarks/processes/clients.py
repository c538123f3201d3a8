"""Client processes of a benchmark, and how it uses the official SDK.

clients.py tenants: reads {"url", "keys"} and creates a run for each key. Each further line lists the work of the runs,
    all done at once: {"work": the name of a function below, and its arguments}; the answer is their `Times`.
clients.py waiting URL: futures that wait, each polled on a connection of its own. They are of operations whose run
    lacks its first one. Lines are "wait" (opens the polls), "leave" (drops them) and "finish" (sends what lacks).
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import numpy as np
import tinker
import uvloop
from tinker import types
from trainhouse.schemas.codec import JSON, PROTOBUF, encode_forward_backward_request
from trainhouse.server.serving.server_process import allow_many_connections

from ..harness import KEY, MODEL, RANK, answer_lines, create_run, reply, request, rest, rows

ADAM = types.AdamParams(learning_rate=1e-4)
EMPTY_ROW = list(range(3, 12))
NUM_WAITING, WAITING_PER_RUN = 2000, 250
SETTLE_SECONDS = 1.5

Times = list[list[float]]
"""[submitted, answered] of each operation, in seconds of the clock that all processes of a machine share."""


def connect(url: str, key: str = KEY) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key=key)


def new_run(service: tinker.ServiceClient, seed: int = 0) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=RANK, seed=seed, train_unembed=False).result(60)


def datum(row: list[int]) -> types.Datum:
    inputs = {"target_tokens": np.asarray(row[1:], np.int64), "weights": np.ones(len(row) - 1, np.float32)}
    return sdk_datum(row[:-1], inputs)


def sdk_datum(tokens: list[int], inputs: dict[str, np.ndarray]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


# Tenants


def tenants() -> None:
    setup = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        runs = [new_run(stack.enter_context(connect(setup["url"], key))) for key in setup["keys"]]
        reply("ready")
        answer_lines(lambda works: asyncio.run(_do(runs, works)))


async def _do(runs: list[tinker.TrainingClient], works: list[dict]) -> list[Times]:
    functions = {"train": train, "steps": steps, "ragged": ragged, "stream": stream, "forwards": forwards}
    return await asyncio.gather(
        *(functions[work.pop("work")](run, **work) for run, work in zip(runs, works, strict=True))
    )


async def train(run: tinker.TrainingClient, lengths: list[int], steps: int, in_flight: int) -> Times:
    data, times = _data(lengths), []
    await _pipelined((_step(run, data, times) for _ in range(steps)), in_flight)
    return times


async def steps(run: tinker.TrainingClient, lengths: list[int], seconds: float) -> Times:
    """One step at a time; each is timed to the end of its optim_step."""
    data, times = _data(lengths), []
    for _ in _until(seconds):
        await _timed(_step(run, data, []), times)
    return times


async def ragged(run: tinker.TrainingClient, shortest: int, longest: int, seconds: float, seed: int) -> Times:
    """Steps of one to eight rows, each of another length."""
    drawn, times = random.Random(seed), []

    def batch() -> list[types.Datum]:
        lengths = [drawn.randint(shortest, longest) for _ in range(drawn.randint(1, 8))]
        return _data(lengths, drawn.getrandbits(32))

    await _pipelined((_step(run, batch(), times) for _ in _until(seconds)), 1)
    return times


async def stream(run: tinker.TrainingClient, lengths: list[int], seconds: float) -> Times:
    """Passes without optimizer steps."""
    data, times = _data(lengths), []
    await _pipelined((_timed(run.forward_backward(data, "cross_entropy"), times) for _ in _until(seconds)), 2)
    return times


async def forwards(run: tinker.TrainingClient, lengths: list[int], seconds: float, pause: float) -> Times:
    """One forward at a time, with pauses of up to `pause` seconds, so that they arrive at any moment of a pass."""
    data, times = _data(lengths), []
    for _ in _until(seconds):
        await asyncio.sleep(random.uniform(0, pause))
        await _timed(run.forward(data, "cross_entropy"), times)
    return times


def _data(lengths: list[int], seed: int = 0) -> list[types.Datum]:
    return [datum(row) for row in rows(lengths, seed)]


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


async def _pipelined(submits: Iterable[Awaitable[object]], in_flight: int) -> None:
    """Submits `in_flight` of them before the first is answered. submits: each is sent when it is drawn."""
    waiting: deque[asyncio.Future] = deque()
    for submitted in submits:
        waiting.append(asyncio.ensure_future(submitted))
        if len(waiting) == in_flight:
            await waiting.popleft()
    await asyncio.gather(*waiting)


def _step(run: tinker.TrainingClient, data: list[types.Datum], times: Times) -> Awaitable[object]:
    """Sends a forward_backward, which is timed, and an optim_step."""
    passed = asyncio.ensure_future(_timed(run.forward_backward(data, "cross_entropy"), times))
    return asyncio.gather(passed, run.optim_step(ADAM))


async def _timed(future: Awaitable[object], times: Times) -> None:
    started = time.monotonic()
    await future
    times.append([started, time.monotonic()])


# Futures that wait


@dataclass(frozen=True)
class WaitingRun:
    """A run whose operation 1 is missing until `submit(1)`."""

    http: httpx.AsyncClient
    key: str
    run_id: str

    async def submit(self, seq_id: int) -> None:
        content = encode_forward_backward_request(request(self.run_id, [EMPTY_ROW], seq_id, forward_only=True))
        answer = await self.http.post("forward_backward", content=content, headers={"Content-Type": PROTOBUF})
        answer.raise_for_status()


async def waiting(url: str) -> None:
    allow_many_connections()
    async with AsyncExitStack() as stack:
        runs = [await _waiting_run(stack, url, f"tml-waits-{i}") for i in range(NUM_WAITING // WAITING_PER_RUN)]
        reply("ready")
        polls: list[asyncio.Task[None]] = []
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            if asked == "leave":
                await _leave(polls)
            else:
                polls = await _poll_all(url, runs)
            if asked == "finish":
                await asyncio.gather(*(run.submit(1) for run in runs), *polls)
            reply(len(polls))


async def _waiting_run(stack: AsyncExitStack, url: str, key: str) -> WaitingRun:
    with rest(url, key) as http:
        run_id = create_run(http)
    client = httpx.AsyncClient(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
    run = WaitingRun(await stack.enter_async_context(client), key, run_id)
    await asyncio.gather(*(run.submit(seq_id) for seq_id in range(2, 2 + WAITING_PER_RUN)))
    return run


async def _poll_all(url: str, runs: list[WaitingRun]) -> list[asyncio.Task[None]]:
    """Returns when all polls are open and have reached the server."""
    polls = [
        asyncio.create_task(_poll(url, run.key, f"{run.run_id}:{seq_id}"))
        for run in runs
        for seq_id in range(2, 2 + WAITING_PER_RUN)
    ]
    await asyncio.sleep(SETTLE_SECONDS)
    assert not any(poll.done() for poll in polls), "a future that had to wait has ended"
    return polls


async def _leave(polls: list[asyncio.Task[None]]) -> None:
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    await asyncio.sleep(SETTLE_SECONDS)


async def _poll(url: str, key: str, request_id: str) -> None:
    """Polls until the result arrives; an answer of 408 means that it is not ready yet."""
    address, body = urlsplit(url), json.dumps({"request_id": request_id})
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nhost: {address.hostname}\r\nx-api-key: {key}\r\n"
    head += f"content-type: {JSON}\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    with contextlib.closing(writer):
        status = b"408"
        while status == b"408":
            writer.write((head + body).encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(answer.partition(b"content-length:")[2].split()[0]))
            status = answer.split()[1]
        assert status == b"200", answer


if __name__ == "__main__":
    if sys.argv[1] == "tenants":
        tenants()
    else:
        uvloop.run(waiting(sys.argv[2]))
