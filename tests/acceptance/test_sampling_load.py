"""Five hundred samples in flight through the official SDK with a cache for thirty; a fifth of them is abandoned."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
import uvicorn
from tinker import types
from trainhouse.server.serving.app import create_app
from trainhouse.server.serving.connections import HttpConnection
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from ..official import official_service
from ..server.real import MODEL, server_config, started_dispatch

# The SDK leaves connections to its interpreter's end.
pytestmark = [
    pytest.mark.full,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

# 2 layers, 2 key/value heads of 16 float32 numbers, keys and values.
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
NUM_REQUESTS, NUM_THAT_FIT = 500, 30
# Expected peak of running samples: the first may have ended when the last arrive.
NUM_UNDER_WAY = 200
# Length of abandoned samples, which would run for a minute.
ENDLESS = 600


@dataclass(frozen=True)
class Request:
    """patience: seconds after which it is abandoned, or None. cancels: by cancelling it, not by a timeout."""

    prompt: list[int]
    max_tokens: int
    patience: float | None = None
    cancels: bool = False

    async def sampled(self, sampler: tinker.SamplingClient) -> types.SampleResponse | None:
        """Returns None if it was abandoned."""
        params = types.SamplingParams(max_tokens=self.max_tokens, temperature=1.0, stop=[])
        answer = sampler.sample(types.ModelInput.from_ints(self.prompt), 1, params)
        if self.patience is None:
            return await answer
        if not self.cancels:
            with suppress(TimeoutError):
                return await answer.result_async(timeout=self.patience)
            return None
        await asyncio.sleep(self.patience)
        answer.future().cancel()
        with suppress(asyncio.CancelledError):
            return await answer
        return None


def requests() -> list[Request]:
    """Prompts of 4 to 120 tokens and 2 to 60 new ones, in equal logarithmic steps; every fifth is abandoned."""
    random = np.random.default_rng(3)
    prompts = random.permutation(np.geomspace(4, 120, NUM_REQUESTS).astype(int))
    lengths = random.permutation(np.geomspace(2, 60, NUM_REQUESTS).astype(int))
    made = []
    for i in range(NUM_REQUESTS):
        tokens = random.integers(3, 512, prompts[i]).tolist()
        if i % 5:
            made.append(Request(tokens, int(lengths[i])))
        else:
            made.append(Request(tokens, ENDLESS, patience=float(random.uniform(0.5, 3)), cancels=i % 2 == 0))
    return made


def sample_all(url: str, made: list[Request]) -> list[types.SampleResponse | None]:
    async def together(sampler: tinker.SamplingClient) -> list[types.SampleResponse | None]:
        return await asyncio.gather(*(each.sampled(sampler) for each in made))

    with official_service(url, "tml-load") as service:
        return asyncio.run(together(service.create_sampling_client(base_model=MODEL).result(60)))


def budget_of(made: list[Request]) -> int:
    lengths = [len(each.prompt) + each.max_tokens for each in made if each.patience is None]
    return round(NUM_THAT_FIT * float(np.mean(lengths))) * BYTES_PER_TOKEN


@dataclass
class Watched:
    """Peaks observed in the worker while the requests run."""

    dispatch: WorkerDispatch
    most_bytes: int = 0
    most_under_way: int = 0

    async def watch(self, answered: asyncio.Event) -> None:
        """Watches until all are answered and nothing is running."""
        while True:
            self.most_bytes = max(self.most_bytes, (await self.dispatch.memory())[MODEL]["kv_cache"])
            status = self.dispatch.status(MODEL)
            if status is None and answered.is_set():
                return
            self.most_under_way = max(self.most_under_way, int((status or "0").split()[0]))
            await asyncio.sleep(0.05)


@asynccontextmanager
async def served(model: Path, state_dir: Path, **options: object) -> AsyncIterator[tuple[str, WorkerDispatch]]:
    """Runs a server in this process; yields its URL, and the dispatch, which reports the worker's memory."""
    config = server_config(model, state_dir, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    async with started_dispatch(config) as dispatch:
        app = create_app(config, dispatch)
        settings = uvicorn.Config(
            app,
            http=HttpConnection,
            lifespan="off",
            log_config=None,
            ws="none",
            timeout_graceful_shutdown=3,
        )
        async with app.router.lifespan_context(app):
            server = uvicorn.Server(settings)
            serving = asyncio.create_task(server.serve([listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", dispatch
            finally:
                server.should_exit = True
                await serving


@pytest.mark.parametrize(("polling", "layout"), [("each", "single"), ("together", "single"), ("each", "tp=2")])
async def test_kept_requests_complete_within_the_memory_budget(
    tiny_models: dict[str, Path], tmp_path: Path, polling: str, layout: str
) -> None:
    made = requests()
    budget = budget_of(made)
    options = {"kv_cache_bytes": budget, "sdk_sample_polling": polling, "parallel": ParallelSpec.parse(layout)}
    async with served(tiny_models["qwen3"], tmp_path, **options) as (url, dispatch):
        watched, answered = Watched(dispatch), asyncio.Event()
        watching = asyncio.create_task(watched.watch(answered))
        # The SDK blocks while it creates a session, so it must not run in the server's loop.
        responses = await asyncio.to_thread(sample_all, url, made)
        answered.set()
        async with asyncio.timeout(60):
            await watching
    for each, response in zip(made, responses, strict=True):
        if each.patience is None:
            assert response is not None
            assert [len(sequence.tokens) for sequence in response.sequences] == [each.max_tokens]
    # The first of the abandoned ones may have ended.
    assert responses.count(None) > 0.8 * NUM_REQUESTS / 5
    assert watched.most_under_way >= NUM_UNDER_WAY
    assert budget / 2 < watched.most_bytes <= budget
