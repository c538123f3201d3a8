"""A tenant whose requests cost the server much, or are many: the load next to another tenant's steps.

neighbours.py URL: fills a run's metrics. Each further line starts a load by its name (see `LOADS`), and the next line,
"stop", ends it; the answer counts the requests by how they ended.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import httpx
import uvloop

from ..harness import MODEL, create_run, reply, rest

CALLERS = 32
CONSTRAINED = 2
"""Constrained samples in flight; each is of another tenant, since a tenant's next one waits after a costly one."""

_KEY = "tml-neighbour"
_TIMEOUT_SECONDS = 180
_BLOCK_STEPS = 1000

Send = Callable[[int], Awaitable[str]]
"""Sends the request of that number and returns how it ended."""


def grammar(number: int, num_rules: int = 5000) -> dict[str, Any]:
    """Chained rules; each number's have other names, so that none is known from before."""
    rules = "".join(f'r{number}_{i}: "a" r{number}_{i + 1}\n' for i in range(num_rules))
    return {"grammar": f'start: r{number}_0\n{rules}r{number}_{num_rules}: "b"\n'}


def patterns(number: int) -> dict[str, Any]:
    each = [{"type": "string", "pattern": f"(a|b|{chr(97 + i)})*{chr(97 + i)}.{{{i + 1}}}"} for i in range(20)]
    return {"type": "string", "description": str(number), "allOf": each}


def properties(number: int) -> dict[str, Any]:
    named = {f"property_{number}_{i}": {"type": "string"} for i in range(5000)}
    return {"type": "object", "properties": named, "additionalProperties": False}


class Neighbour:
    """Sends the loads. run_id: of a run whose metrics take all the room that there is."""

    def __init__(self, url: str, http: httpx.AsyncClient, run_id: str) -> None:
        self._url, self._http, self._run_id = url, http, run_id

    async def post(self, path: str, body: object, key: str = _KEY) -> httpx.Response:
        return await self._http.post(f"{self._url}/{path}", json=body, headers={"X-API-Key": key})

    async def fill(self) -> None:
        """Logs less and less at a time, until the run has no room."""
        step, num_steps = 0, _BLOCK_STEPS
        while num_steps:
            if (answer := await self._log(range(step, step + num_steps))).status_code == 413:
                num_steps //= 4
            else:
                answer.raise_for_status()
                step += num_steps

    async def _log(self, steps: range) -> httpx.Response:
        entries = [{"step": step, "metrics": {f"metric/{i}": step + i / 7 for i in range(20)}} for step in steps]
        return await self.post(f"api/v1/training_runs/{self._run_id}/metrics", {"entries": entries})

    async def log(self, number: int) -> str:
        return str((await self._log(range(10_000_000 + number, 10_000_001 + number))).status_code)

    async def read(self, number: int) -> str:
        return str((await self.post("api/v1/get_info", {"model_id": self._run_id})).status_code)

    def sampling(self, constraint: Callable[[int], dict[str, Any]]) -> Send:
        """Samples with the constraint of each number."""

        async def sample(number: int) -> str:
            body = {
                "base_model": MODEL,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [7, 8, 9]}]},
                "sampling_params": {"max_tokens": 8, "constraint": constraint(number)},
            }
            key = f"{_KEY}-{number}"
            answer = await self.post("api/v1/asample", body, key)
            if answer.status_code != 200:
                return str(answer.status_code)
            poll = {"request_id": answer.json()["request_id"]}
            while (polled := await self.post("api/v1/retrieve_future", poll, key)).status_code == 408:
                pass
            return "refused" if "error" in polled.json() else "sampled"

        return sample

    def answering(self, schema: Callable[[int], dict[str, Any]]) -> Send:
        """Completes a text in the schema of each number, by OpenAI's endpoint."""

        async def complete(number: int) -> str:
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema(number)}}
            body = {"model": MODEL, "prompt": "Name one:", "max_tokens": 8, "response_format": wanted}
            headers = {"Authorization": f"Bearer {_KEY}-{number}"}
            answer = await self._http.post(f"{self._url}/v1/completions", json=body, headers=headers)
            return "sampled" if answer.status_code == 200 else "refused" if answer.status_code == 400 else answer.text

        return complete

    def loads(self) -> dict[str, tuple[Send, int]]:
        """Returns each load's requests, and how many are in flight."""

        def native(schema: Callable[[int], dict[str, Any]]) -> Send:
            return self.sampling(lambda number: {"json_schema": schema(number)})

        return {
            "a grammar of 5,000 rules": (self.sampling(grammar), CONSTRAINED),
            "allOf of 20 patterns": (native(patterns), CONSTRAINED),
            "5,000 properties": (native(properties), CONSTRAINED),
            "allOf, response_format": (self.answering(patterns), CONSTRAINED),
            "properties, response_format": (self.answering(properties), CONSTRAINED),
            "32 callers log to a full run": (self.log, CALLERS),
            "32 callers read": (self.read, CALLERS),
        }


async def _send_until(stopped: asyncio.Event, send: Send, numbers: Iterator[int], ends: Counter[str]) -> None:
    while not stopped.is_set():
        try:
            ends[await send(next(numbers))] += 1
        except httpx.HTTPError as error:
            ends[type(error).__name__] += 1


async def main(url: str) -> None:
    with rest(url, _KEY) as http:
        run_id = create_run(http)
    async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, limits=httpx.Limits(max_connections=None)) as http:
        neighbour = Neighbour(url, http, run_id)
        await neighbour.fill()
        loads, numbers = neighbour.loads(), count()
        reply(list(loads))
        while name := await _next_line():
            stopped, ends = asyncio.Event(), Counter[str]()
            send, callers = loads[name]
            sending = [asyncio.create_task(_send_until(stopped, send, numbers, ends)) for _ in range(callers)]
            reply("started")
            await _next_line()
            stopped.set()
            await asyncio.gather(*sending)
            reply(ends)


async def _next_line() -> str | None:
    line = await asyncio.to_thread(sys.stdin.readline)
    return json.loads(line) if line else None


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
