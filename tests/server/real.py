"""Runs a whole server in this process with a real worker in a separate process, and builds requests to it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from starlette.types import ASGIApp
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.files.state_lock import LiveState
from trainhouse.server.routes.services import Services
from trainhouse.server.serving.app import create_app
from trainhouse.server.telemetry.tracing import Tracing
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel

MODEL = "tiny/qwen3"
VOCAB = 512
PROTOBUF = "application/x-protobuf"
ALICE, BOB = "tml-alice", "tml-bob"
ADAM = {"learning_rate": 1e-2}


def server_config(model: Path, state_dir: Path, **options: Any) -> ServerConfig:
    defaults = {"threads": 1, "max_lora_rank": 16, "max_body_bytes": 200_000, "max_decompressed_bytes": 1_000_000}
    return ServerConfig.of(base_models=(ServedModel(MODEL, str(model)),), state_dir=state_dir, **(defaults | options))


def soon_back(dispatch: WorkerDispatch) -> WorkerDispatch:
    """Shortens the restart backoff, so that a worker that crashes often restarts as fast as one that crashed once."""
    for group in dispatch.groups:
        group.supervisor.backoff.first = 0.01
    return dispatch


@asynccontextmanager
async def started_dispatch(
    config: ServerConfig, change: Callable[[DispatchConfig], DispatchConfig] = lambda same: same
) -> AsyncIterator[WorkerDispatch]:
    dispatch = soon_back(WorkerDispatch(change(config.dispatch_config())))
    await dispatch.start(lambda message: None)
    try:
        yield dispatch
    finally:
        await dispatch.close()


@asynccontextmanager
async def running_server(
    config: ServerConfig,
    dispatch: WorkerDispatch,
    live: LiveState | None = None,
    tracing: Tracing | None = None,
    guarded: Callable[[FastAPI], ASGIApp] = lambda app: app,
) -> AsyncIterator["Server"]:
    """Runs the server; entering it again with the same `config.store.state_dir` is a restart."""
    app = create_app(config, dispatch, live, tracing=tracing)
    async with app.router.lifespan_context(app), AsyncExitStack() as stack:
        transport = httpx.ASGITransport(guarded(app))
        clients = {}
        for key in (ALICE, BOB):
            client = httpx.AsyncClient(
                transport=transport, base_url="http://test/api/v1/", headers={"X-API-Key": key}, timeout=30
            )
            clients[key] = await stack.enter_async_context(client)
        yield Server(app, clients, app.state.services)


@dataclass
class Server:
    app: FastAPI
    clients: dict[str, httpx.AsyncClient]
    services: Services

    async def post(self, path: str, body: object, key: str = ALICE, status: int = 200, **headers: str) -> Any:
        """Posts JSON and returns the JSON answer; asserts that the status is the expected one."""
        response = await self.clients[key].post(path, json=body, headers=headers)
        assert response.status_code == status, response.text
        return response.json() if response.content else None

    async def post_bytes(self, path: str, body: bytes, key: str = ALICE, **headers: str) -> httpx.Response:
        return await self.clients[key].post(path, content=body, headers=headers)

    async def retrieve(self, request_id: str, key: str = ALICE, accept: str = "application/json") -> httpx.Response:
        body = {"request_id": request_id}
        return await self.clients[key].post("retrieve_future", json=body, headers={"Accept": accept})

    async def polled(self, request_id: str, key: str = ALICE, accept: str = "application/json") -> httpx.Response:
        """Returns the answer with a request's result, however often a poll ends without it."""
        async with asyncio.timeout(120):
            while (response := await self.retrieve(request_id, key, accept)).status_code == 408:
                pass
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith(accept), response.text
        return response

    async def result(self, request_id: str, key: str = ALICE) -> Any:
        return (await self.polled(request_id, key)).json()

    async def create_session(self, key: str = ALICE) -> str:
        return (await self.post("create_session", {"sdk_version": "0.38.0", "tags": []}, key))["session_id"]

    async def create_run(self, key: str = ALICE, session_id: str | None = None, number: int = 0, **lora: Any) -> "Run":
        session_id = session_id or await self.create_session(key)
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": MODEL,
            "lora_config": {"rank": 4, "seed": 1} | lora,
        }
        created = await self.result((await self.post("create_model", body, key))["request_id"], key)
        assert created["model_id"] == f"{session_id}:train:{number}" and created["type"] == "create_model"
        return Run(self, created["model_id"], session_id, key)


@dataclass
class Run:
    """A client's view of a run: it numbers its operations as the SDK does, including those that were refused."""

    server: Server
    model_id: str
    session_id: str
    key: str = ALICE

    def __post_init__(self) -> None:
        self.numbers = itertools.count(1)

    async def submit(self, verb: str, /, status: int = 200, seq_id: int | None = None, **fields: Any) -> Any:
        seq_id = next(self.numbers) if seq_id is None else seq_id
        return await self.server.post(verb, {"model_id": self.model_id, "seq_id": seq_id} | fields, self.key, status)

    async def do(self, verb: str, /, **fields: Any) -> Any:
        """Submits an operation and waits for its result."""
        return await self.server.result((await self.submit(verb, **fields))["request_id"], self.key)

    def encode(
        self,
        data: Sequence[types.Datum],
        seq_id: int,
        loss_fn: Any = "cross_entropy",
        config: dict[str, float | str] | None = None,
        forward_only: bool = False,
    ) -> bytes:
        """Encodes a forward_backward request with the SDK's encoder."""
        given = types.ForwardBackwardInput(data=list(data), loss_fn=loss_fn, loss_fn_config=config)
        message = forward_backward_request_to_proto(
            types.ForwardBackwardRequest(model_id=self.model_id, seq_id=seq_id, forward_backward_input=given)
        )
        message.forward_only = forward_only
        return message.SerializeToString()

    async def send(self, body: bytes, path: str = "forward_backward", **headers: str) -> httpx.Response:
        return await self.server.post_bytes(path, body, self.key, **({"Content-Type": PROTOBUF} | headers))

    async def forward_backward(self, data: Sequence[types.Datum], **options: Any) -> types.ForwardBackwardOutput:
        response = await self.send(self.encode(data, next(self.numbers), **options))
        assert response.status_code == 200, response.text
        result = await self.server.polled(response.json()["request_id"], self.key, PROTOBUF)
        return deserialize_forward_backward_output(result.content)

    async def optim_step(self) -> Any:
        return await self.do("optim_step", adam_params=ADAM)

    async def train(self, data: Sequence[types.Datum], num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            losses.append((await self.forward_backward(data)).metrics["loss:sum"])
            assert "error" not in await self.optim_step()
        return losses


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    given = inputs or {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    arrays = {
        name: np.asarray(value, np.int64 if name == "target_tokens" else np.float32) for name, value in given.items()
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in arrays.items()},
    )


def batch(num_datums: int = 3, seed: int = 0) -> list[types.Datum]:
    random = np.random.default_rng(seed)
    return [datum(random.integers(3, VOCAB, random.integers(5, 12)).tolist()) for _ in range(num_datums)]


def sample_body(sampler_id: str, seq_id: int | None = 0, **fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": []},
    }
    return defaults | fields


async def sample(server: Server, body: dict[str, Any], key: str = ALICE) -> types.SampleResponse:
    submitted = await server.post("asample", body, key)
    result = await server.polled(submitted["request_id"], key, PROTOBUF)
    return deserialize_sample_response(result.content)
