"""Runs the real application over a real store and real files, with a clock that the test sets and without workers."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from trainhouse.schemas.models import LoraConfig
from trainhouse.server.checkpoints.checkpoints import Checkpoints
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.journal.futures import Futures
from trainhouse.server.routes.services import found_files
from trainhouse.server.serving.app import create_app
from trainhouse.server.store import (
    DATABASE_NAME,
    STORES,
    CheckpointKind,
    CheckpointRecord,
    RunRecord,
    SessionRecord,
)
from trainhouse.server.telemetry.telemetry import Telemetry
from trainhouse.server.tenants.auth import Auth, Tenant
from trainhouse.server.tenants.browser_sessions import BrowserSessions
from trainhouse.server.tenants.sessions import Sessions
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.calls import ModelInfo
from trainhouse.workers.protocol.plugins import plugin_rows
from trainhouse.workers.protocol.worker_config import ServedModel

MODEL = "tiny/qwen3"
ALICE, BOB = "tml-alice", "tml-bob"
OPENAI = plugin_rows("server.openai.paths", "SCOPES")
"""The routes of OpenAI's API: none where its folder was taken away."""
needs_openai = pytest.mark.skipif(not OPENAI, reason="without server/openai")
DRAFTS = plugin_rows("server.drafts.verbs", "VERBS")
"""The verbs of drafts: none where their folders were taken away."""
needs_drafts = pytest.mark.skipif(not DRAFTS, reason="without server/drafts")
LORA = LoraConfig(rank=8, seed=1, train_unembed=False)


class Clock:
    """A clock, in seconds, that advances only when the test sets `now`."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Api:
    app: FastAPI
    services: SimpleNamespace
    clock: Clock
    stack: AsyncExitStack

    async def client(self, key: str | None = ALICE) -> httpx.AsyncClient:
        headers = {"X-API-Key": key} if key else {}
        transport = httpx.ASGITransport(self.app)
        client = httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers, timeout=20)
        return await self.stack.enter_async_context(client)

    async def tenant(self, key: str = ALICE) -> Tenant:
        return await self.services.auth.authenticate(key)

    async def session(self, key: str = ALICE) -> str:
        body = {"sdk_version": "0.38.0", "tags": []}
        return (await (await self.client(key)).post("/api/v1/create_session", json=body)).json()["session_id"]

    async def run(self, key: str = ALICE, at: float = 1_700_000_000.0) -> RunRecord:
        """Inserts a run as create_model records it."""
        session_id = await self.session(key)
        tenant = await self.tenant(key)
        run = RunRecord(f"{session_id}:train:0", session_id, tenant.id, MODEL, LORA, at, at, {"purpose": "test"})
        await self.services.store.runs.insert(run)
        return run

    async def save(
        self, run: RunRecord, name: str = "a", kind: CheckpointKind = "weights", content: bytes = b"weights", **options
    ) -> CheckpointRecord:
        async with self.services.checkpoints.writing(run, kind, name, options.pop("overwrite", False), **options) as at:
            (at / "adapter_model.safetensors").write_bytes(content)
            (at / "adapter_config.json").write_bytes(b"{}")
        record = await self.services.store.checkpoints.get(run.run_id, kind, name)
        assert record is not None
        return record


@asynccontextmanager
async def running_api(
    state_dir: Path,
    source: Path | str = "tiny/source",
    host: str = "127.0.0.1",
    storage: CheckpointStorageConfig = CheckpointStorageConfig(),  # noqa: B008
) -> AsyncIterator[Api]:
    """Runs the API; entering it again with the same `state_dir` is a restart."""
    clock = Clock()
    config = ServerConfig.of(base_models=(ServedModel(MODEL, source),), host=host, state_dir=state_dir)
    dispatch = WorkerDispatch(config.dispatch_config())
    dispatch.models = {MODEL: MODEL_INFO}
    store = STORES["sqlite"](state_dir / DATABASE_NAME)
    auth = Auth(store, config.is_loopback)
    services = SimpleNamespace(
        config=config,
        dispatch=dispatch,
        store=store,
        auth=auth,
        browsers=BrowserSessions(),
        sessions=Sessions(store, config.sessions.session_expiry_seconds, clock),
        checkpoints=Checkpoints(store, auth, state_dir, clock, storage),
        telemetry=Telemetry(dispatch, 60.0),
        futures=Futures(state_dir / "results", store, 3600.0),
        model_files=found_files(config),
        started_at=time.time(),
    )
    app = create_app(config, dispatch)
    app.state.services = services
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        for part in (services.sessions, services.checkpoints):
            await part.start()
            stack.push_async_callback(part.close)
        await services.futures.open()
        stack.push_async_callback(services.futures.close)
        yield Api(app, services, clock, stack)


MODEL_INFO = ModelInfo(MODEL, "Qwen3ForCausalLM", "float32", "cpu", 512, 1024, 1000, (2,))


def session_record(session_id: str, tenant_id: str, at: float = 1.0, **values) -> SessionRecord:
    return SessionRecord(session_id, tenant_id, at, at, **values)
