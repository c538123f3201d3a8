"""Whether futures that wait slow anybody down: an empty operation alone, and beside 2,000 open long polls.

Run as a process of its own, this file is those who wait: on one connection each, for the operations of runs whose
first operation was never sent, so that all the others wait for it.
"""

import asyncio
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx
import psutil
import uvloop
from trainhouse.schemas.codec import JSON, PROTOBUF, encode_forward_backward_request
from trainhouse.server.serving.process import allow_many_connections

from .child import child
from .empty_operation import called, create_run, request

NUM_WAITING = 2000
_PER_RUN = 250
_PER_ROUND, _WARMUP = 100, 20
_SETTLE_SECONDS = 1.5


@dataclass(frozen=True)
class Beside:
    """Median milliseconds of the operation, and bytes of the server's memory for each future that waits."""

    alone: float
    beside_waiting: float
    bytes_per_waiting: float


def beside_waiting(url: str, server_pid: int, operation: Callable[[], object], rounds: int) -> Beside:
    """Alone, beside them, alone again, ... At the end the missing operations are sent, and everybody is answered."""
    alone: list[float] = []
    beside: list[float] = []
    grown = 0
    server = psutil.Process(server_pid)
    with child("waiting_futures", url) as waiting:
        waiting.receive()
        memory = server.memory_info().rss
        for _ in range(rounds):
            alone += called(operation)(_WARMUP + _PER_ROUND)[_WARMUP:]
            waiting.ask("wait")
            grown = max(grown, server.memory_info().rss - memory)
            beside += called(operation)(_WARMUP + _PER_ROUND)[_WARMUP:]
            waiting.ask("leave")
        num_answered = waiting.ask("finish")
    assert num_answered == NUM_WAITING, f"{num_answered} of {NUM_WAITING} were answered"
    return Beside(1e3 * statistics.median(alone), 1e3 * statistics.median(beside), grown / NUM_WAITING)


# Those who wait


@dataclass(frozen=True)
class _Run:
    """Operation 1 is missing until `submit(1)`."""

    http: httpx.AsyncClient
    key: str
    run_id: str

    async def submit(self, seq_id: int) -> None:
        content = encode_forward_backward_request(replace(request(self.run_id), seq_id=seq_id))
        response = await self.http.post("forward_backward", content=content, headers={"Content-Type": PROTOBUF})
        response.raise_for_status()


async def main(url: str) -> None:
    allow_many_connections()
    keys = [f"tml-waits-{number}" for number in range(NUM_WAITING // _PER_RUN)]
    async with contextlib.AsyncExitStack() as stack:
        runs = [await _waiting_run(stack, url, key) for key in keys]
        print(json.dumps("ready"), flush=True)
        polls: list[asyncio.Task[int]] = []
        while line := await asyncio.to_thread(sys.stdin.readline):
            match json.loads(line):
                case "wait":
                    polls = await _poll_all(url, runs)
                    answer = len(polls)
                case "leave":
                    answer = await _leave(polls)
                case _:
                    polls = await _poll_all(url, runs)
                    for run in runs:
                        await run.submit(1)
                    answer = sum(await asyncio.gather(*polls))
            print(json.dumps(answer), flush=True)


async def _waiting_run(stack: contextlib.AsyncExitStack, url: str, key: str) -> _Run:
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key, "Prefer": "wait=30"}) as http:
        run_id = create_run(http)
    client = httpx.AsyncClient(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
    run = _Run(await stack.enter_async_context(client), key, run_id)
    await asyncio.gather(*(run.submit(seq_id) for seq_id in range(2, 2 + _PER_RUN)))
    return run


async def _poll_all(url: str, runs: list[_Run]) -> list[asyncio.Task[int]]:
    """All of them open, and known to the server."""
    address = urlsplit(url)
    polls = [
        asyncio.create_task(_poll(str(address.hostname), address.port or 80, run.key, f"{run.run_id}:{seq_id}"))
        for run in runs
        for seq_id in range(2, 2 + _PER_RUN)
    ]
    await asyncio.sleep(_SETTLE_SECONDS)
    assert not any(poll.done() for poll in polls), "a future that was to wait has ended"
    return polls


async def _leave(polls: list[asyncio.Task[int]]) -> int:
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    await asyncio.sleep(_SETTLE_SECONDS)
    return len(polls)


async def _poll(host: str, port: int, key: str, request_id: str) -> int:
    """1, once the result is there; polls again, as clients do, when the server says that it is not."""
    body = json.dumps({"request_id": request_id})
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nhost: {host}\r\nx-api-key: {key}\r\ncontent-type: {JSON}\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        while True:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(answer.partition(b"content-length:")[2].split()[0]))
            if answer.split()[1] == b"200":
                return 1
            assert answer.split()[1] == b"408", answer
    finally:
        writer.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
