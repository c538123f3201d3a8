"""A client process of a benchmark: tenants, each an official SDK client with a key of its own, do what a line asks.

The first line is {"url", "keys"}: one training client is made for each key. Every further line is a list of what each
of them is to do at once: {"work": the name of a function below, and its arguments}. Times are of the clock that all
processes of the machine share.
"""

import asyncio
import json
import random
import sys
import time
from collections import deque
from contextlib import ExitStack

import tinker
from tinker import types

from .workload import MODEL, RANK, datum, rows

ADAM = types.AdamParams(learning_rate=1e-4)
Times = list[list[float]]
"""[submitted, answered] of each operation, in seconds."""


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    with ExitStack() as stack:
        services = [
            stack.enter_context(tinker.ServiceClient(base_url=setup["url"], api_key=key)) for key in setup["keys"]
        ]
        clients = [
            service.create_lora_training_client(MODEL, rank=RANK, seed=0, train_unembed=False).result(60)
            for service in services
        ]
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(asyncio.run(_do(clients, json.loads(line)))), flush=True)


async def _do(clients: list[tinker.TrainingClient], works: list[dict]) -> list[Times]:
    """The times of each client's operations."""
    functions = {"train": train, "ragged": ragged, "stream": stream, "forwards": forwards}
    return await asyncio.gather(
        *(functions[work.pop("work")](client, **work) for client, work in zip(clients, works, strict=True))
    )


async def train(client: tinker.TrainingClient, lengths: list[int], steps: int, in_flight: int) -> Times:
    """Steps of forward_backward and optim_step, `in_flight` of them sent before the first has been answered."""
    data = [datum(row) for row in rows(lengths)]
    times: Times = []
    waiting: deque[asyncio.Future] = deque()
    for _ in range(steps):
        if len(waiting) == in_flight:
            await waiting.popleft()
        passed = asyncio.ensure_future(_timed(client.forward_backward(data, "cross_entropy"), times))
        waiting.append(asyncio.gather(passed, _answer(client.optim_step(ADAM))))
    await asyncio.gather(*waiting)
    return times


async def ragged(client: tinker.TrainingClient, shortest: int, longest: int, seconds: float, seed: int) -> Times:
    """Steps of one to eight rows, each of another length, one after the other, for so long."""
    lengths = random.Random(seed)
    times: Times = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        batch = rows(
            [lengths.randint(shortest, longest) for _ in range(lengths.randint(1, 8))], lengths.getrandbits(32)
        )
        passed = _timed(client.forward_backward([datum(row) for row in batch], "cross_entropy"), times)
        await asyncio.gather(passed, _answer(client.optim_step(ADAM)))
    return times


async def stream(client: tinker.TrainingClient, lengths: list[int], seconds: float, in_flight: int = 2) -> Times:
    """The same batch again and again for so long."""
    data = [datum(row) for row in rows(lengths)]
    times: Times = []
    waiting: deque[asyncio.Future] = deque()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if len(waiting) == in_flight:
            await waiting.popleft()
        waiting.append(asyncio.ensure_future(_timed(client.forward_backward(data, "cross_entropy"), times)))
    await asyncio.gather(*waiting)
    return times


async def forwards(client: tinker.TrainingClient, lengths: list[int], seconds: float, pause: float) -> Times:
    """One forward at a time, for so long, with pauses of up to `pause` seconds: they come at any moment of a pass."""
    data = [datum(row) for row in rows(lengths)]
    times: Times = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(random.uniform(0, pause))
        await _timed(client.forward(data, "cross_entropy"), times)
    return times


async def _timed(future: tinker.APIFuture, times: Times) -> None:
    started = time.monotonic()
    await future
    times.append([started, time.monotonic()])


async def _answer(future: tinker.APIFuture) -> object:
    return await future


if __name__ == "__main__":
    main()
