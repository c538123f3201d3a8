"""Clients that keep a ledger: each operation that they submit, and what it must answer if every one is done once.

All batches are one sentence with a weight of their own, and steps have a learning rate of 0, so the gradient of a
window is its summed weight times that of the sentence: an operation that is lost or done twice changes the norm, the
loss or the number of the steps behind it.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SENTENCE = [5, 6, 7, 8, 9]
BETA = 0.9
_ADAM = {"learning_rate": 0.0, "beta1": BETA}
_MAX_AHEAD = 4
_MAX_PAUSE_SECONDS = 5.0
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Planned:
    """weight: of the sentence, or of a step's window. num_losses: operations in a step's window."""

    kind: str
    weight: int = 0
    num_losses: int = 0


@dataclass
class Entry:
    """seconds: from its first try to its answer."""

    seq_id: int
    planned: Planned
    request_id: str = ""
    answer: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Sentence:
    """Loss and gradient norm of the sentence at weight 1."""

    loss: float
    grad_norm: float


class LedgerClient:
    """A tenant that has one run. tries: number of its requests by outcome."""

    def __init__(self, http: httpx.AsyncClient, number: int, model: str, plan: Sequence[Planned]) -> None:
        self.entries: list[Entry] = []
        self.run_id = ""
        self.tries: Counter[str] = Counter()
        self._http = http
        self._model = model
        self._headers = {"X-API-Key": f"tml-ledger{number}"}
        self._drawn = random.Random(number)
        self._plan = plan
        self._ahead = asyncio.Semaphore(_MAX_AHEAD)

    async def work(self, seconds: float) -> None:
        """Carries out the plan, spread over that time; several operations at once, so that they arrive in any order."""
        began = time.monotonic()
        await self._create()
        times = sorted(self._drawn.uniform(0, seconds) for _ in self._plan)
        async with asyncio.TaskGroup() as group:
            for seq_id, (planned, at) in enumerate(zip(self._plan, times, strict=True), 1):
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                await self._ahead.acquire()
                self.entries.append(Entry(seq_id, planned))
                group.create_task(self._carry_out(self.entries[-1]))

    async def answers_again(self, http: httpx.AsyncClient) -> list[dict[str, Any]]:
        self._http = http
        return await asyncio.gather(*(self._result(entry.request_id) for entry in self.entries))

    async def save(self, http: httpx.AsyncClient) -> None:
        """Saves its state as the checkpoint "end"."""
        self._http = http
        body = {"model_id": self.run_id, "seq_id": len(self.entries) + 1, "path": "end"}
        await self._result((await self._post("save_weights", body))["request_id"])

    async def _create(self) -> None:
        body = {"sdk_version": "0"}
        session = await self._post("create_session", body, {"X-Idempotency-Key": str(uuid.uuid4())})
        run = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": self._model}
        created = await self._post("create_model", run | {"lora_config": {"rank": 1, "seed": 1}})
        self.run_id = (await self._result(created["request_id"]))["model_id"]

    async def _carry_out(self, entry: Entry) -> None:
        began = time.monotonic()
        body = {"model_id": self.run_id, "seq_id": entry.seq_id}
        if entry.planned.kind == "optim_step":
            body |= {"adam_params": _ADAM}
        else:
            inputs = {"target_tokens": SENTENCE[1:], "weights": [float(entry.planned.weight)] * (len(SENTENCE) - 1)}
            body |= {"data": [{"model_input": SENTENCE[:-1], "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}
        entry.request_id = (await self._post(entry.planned.kind, body))["request_id"]
        entry.answer = await self._result(entry.request_id)
        entry.seconds = time.monotonic() - began
        self._ahead.release()

    async def _result(self, request_id: str) -> dict[str, Any]:
        return await self._post("retrieve_future", {"request_id": request_id})

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Retries until the request is answered."""
        pause = 0.1
        while True:
            response = None
            with contextlib.suppress(httpx.TransportError):
                response = await self._http.post(path, json=body, headers=self._headers | (headers or {}))
            self.tries["broken off" if response is None else str(response.status_code)] += 1
            if response is not None and response.status_code != 408 and response.status_code < 500:
                assert response.status_code == 200, f"{path} {body}: {response.status_code} {response.text}"
                return response.json()
            if response is None or response.status_code != 408:
                await asyncio.sleep(pause * self._drawn.uniform(0.5, 1.5))
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)


def plan(drawn: random.Random, num_operations: int) -> list[Planned]:
    """Returns windows of one to three batches and a step, and among them forward passes, which leave no trace."""
    planned: list[Planned] = []
    while len(planned) < num_operations:
        weights = [drawn.randint(1, 99) for _ in range(drawn.randint(1, 3))]
        planned += [Planned("forward_backward", weight) for weight in weights]
        planned += [Planned("forward", drawn.randint(1, 99))] * (drawn.random() < 0.2)
        planned.append(Planned("optim_step", sum(weights), len(weights)))
    return planned[:num_operations]


def check(entries: list[Entry], sentence: Sentence) -> None:
    """Raises AssertionError at an operation that was lost, done twice or out of order, or not answered."""
    assert [entry.seq_id for entry in entries] == list(range(1, len(entries) + 1))
    num_steps = 0
    for entry in entries:
        metrics, weight = entry.answer.get("metrics", {}), entry.planned.weight
        assert metrics, f"{entry} failed"
        if entry.planned.kind != "optim_step":
            expected = {"loss:sum": weight * sentence.loss}
        else:
            num_steps += 1
            expected = {
                "optimizer_step:last": num_steps,
                "unclipped_grad_l2:mean": weight * sentence.grad_norm,
                "loss/cross_entropy": weight * sentence.loss,
                "window_tokens:sum": entry.planned.num_losses * (len(SENTENCE) - 1),
            }
        for name, value in expected.items():
            assert abs(metrics[name] - value) <= _TOLERANCE * value, f"{name} is not {value}: {entry}"


def final_moment(entries: list[Entry]) -> float:
    """Returns AdamW's first moment after these, as a multiple of the sentence's gradient."""
    moment = 0.0
    for entry in entries:
        if entry.planned.kind == "optim_step":
            moment = BETA * moment + (1 - BETA) * entry.planned.weight
    return moment


async def work(url: str, model: str, num_clients: int, num_operations: int, seconds: float) -> list[LedgerClient]:
    """Has each client carry out as many operations; returns when all are answered."""
    async with connected(url) as http:
        plans = [plan(random.Random(number), num_operations) for number in range(num_clients)]
        clients = [LedgerClient(http, number, model, planned) for number, planned in enumerate(plans)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.work(seconds))
        return clients


def connected(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.AsyncClient(base_url=f"{url}/api/v1/", timeout=60, limits=limits)
