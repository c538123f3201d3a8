"""Sampler groups: workers that only sample, each group with its own base model.

The server copies an adapter from the training worker once. A group loads it when a request first needs it there, loads
newer versions as soon as they exist, and reloads what it still needs after its worker crashed.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse
from ..protocol.calls import AdapterWeights, SampleJob, WorkerLost
from ..protocol.methods import EXPORT_ADAPTER, LOAD_DRAFT, MEMORY, READ_ADAPTER
from ..scheduler.quarantine import MAX_STRIKES
from ..scheduler.rank_group import RankGroup
from ..scheduler.work import MethodWork, OnProgress
from .adapter_versions import AdapterCopy, GroupAdapter
from .engine import Engine
from .in_flight import InFlightRequests, StreamDeduplicator
from .weights import WeightStore, WeightTransferStats, drop_weights, load_weights


class SamplerGroups(Engine):
    """Sends each request to the group with the fewest tokens in flight, and retries it if the worker crashes."""

    def __init__(self, training: RankGroup, groups: Sequence[RankGroup], directory: Path | None) -> None:
        """directory: for copies of adapters, see WeightStore."""
        self._training = training
        self._copies = WeightStore(AdapterCopy, directory)
        self._workers = [_SamplerWorker(group, self._copies) for group in groups]
        self._in_flight = InFlightRequests()
        self.groups = groups

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))
        await self._copies.close()

    async def copy_adapter(self, run_id: str, tenant_id: str, adapter_id: str) -> None:
        weights = await self._training.submit(MethodWork(run_id, tenant_id, EXPORT_ADAPTER, (run_id,)))
        await self._keep(adapter_id, weights)

    async def load_adapter(self, adapter_id: str, directory: Path) -> None:
        await self._keep(
            adapter_id, await self._training.submit(MethodWork(adapter_id, "", READ_ADAPTER, (str(directory),)))
        )

    def has_weights(self, weights_id: str) -> bool:
        return weights_id in self._copies or not self._without_draft(weights_id)

    async def drop_adapter(self, adapter_id: str) -> None:
        self._copies.drop(adapter_id)
        await asyncio.gather(*(worker.drop(adapter_id) for worker in self._workers))

    async def load_draft(self, draft_id: str, directory: Path) -> None:
        """Loads the draft into each running group. A group that restarts loads it at the next request."""
        lacking = self._without_draft(draft_id)
        await asyncio.gather(*(load_weights(group, LOAD_DRAFT, draft_id, directory) for group in lacking))

    async def drop_draft(self, draft_id: str) -> None:
        await asyncio.gather(*(drop_weights(group, draft_id) for group in self.groups))

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        return await self._in_flight.run(job.job_id, self._sample(job, StreamDeduplicator(on_progress)))

    def cancel(self, job_id: str) -> None:
        self._in_flight.cancel(job_id)

    async def memory(self) -> dict[str, dict[str, int]]:
        """Like Engine.memory; adds the transfers of fully trained weights to each group."""
        workers = [worker for worker in self._workers if not worker.group.supervisor.is_restarting]
        answers = await asyncio.gather(*(worker.group.ask(MEMORY) for worker in workers))
        return {
            worker.group.name: answer | worker.pushes.memory()
            for worker, answer in zip(workers, answers, strict=True)
            if answer is not None
        }

    async def _keep(self, adapter_id: str, weights: AdapterWeights) -> None:
        await self._copies.put(adapter_id, lambda copy: copy.write(weights))
        await asyncio.gather(*(worker.update_adapter(adapter_id) for worker in self._workers))

    async def _sample(self, job: SampleJob, streamed: StreamDeduplicator) -> SampleResponse:
        request = _Request(job, streamed)
        while request.num_strikes < MAX_STRIKES:
            try:
                worker = min(self._workers, key=lambda one: (one.group.supervisor.is_restarting, one.num_tokens))
                return await streamed.run(partial(worker.sample, request))
            except _RetryElsewhere:
                continue
        raise OperationError(
            f"{MAX_STRIKES} sampler workers crashed during sampling request {job.job_id} with no other running: see"
            " the server's log; a shorter prompt or fewer samples need less memory",
            "server",
        )

    def _without_draft(self, draft_id: str) -> list[RankGroup]:
        up = [group for group in self.groups if not group.supervisor.is_restarting] or self.groups
        return [group for group in up if draft_id not in group.scheduler.held]


class _RetryElsewhere(Exception):
    """The worker crashed while it had the request, because of it or not."""


@dataclass
class _Request:
    """A request and its attempts.

    num_strikes: crashes of workers that had no other request.
    weights: what the last attempt began with, if these stay unchanged; else None.
    """

    job: SampleJob
    streamed: StreamDeduplicator
    num_strikes: int = 0
    weights: AdapterCopy | None = None

    def check_weights(self, copy: AdapterCopy | None) -> None:
        """Raises OperationError if the tokens already streamed would continue with other weights."""
        if self.streamed.has_streamed and self.weights not in (None, copy):
            raise OperationError(
                f"sampling request {self.job.job_id} began with weights that a worker's crash has lost, and its stream"
                " cannot continue with newer ones: send the request again",
                "server",
            )
        self.weights = copy if copy is not None and copy.is_full else None


class _SamplerWorker:
    """One sampler worker: a group and its adapters. num_tokens: upper bound on the tokens in flight and waiting."""

    def __init__(self, group: RankGroup, copies: WeightStore[AdapterCopy]) -> None:
        self.group = group
        self.num_tokens = 0
        self.pushes = WeightTransferStats()
        self._copies = copies
        self._adapters: dict[str, GroupAdapter] = {}

    async def close(self) -> None:
        await self.group.close()
        await asyncio.gather(*(held.close() for held in self._adapters.values()))

    async def sample(self, request: _Request, on_progress: OnProgress | None) -> SampleResponse:
        """Raises _RetryElsewhere if the worker crashes, after counting the strike, and OperationError."""
        num_deaths = self.group.supervisor.num_deaths
        with self._counted(request.job):
            try:
                async with self._ready(request) as job:
                    return await self.group.sample(job, on_progress)
            except OperationError as error:
                if self.group.supervisor.num_deaths == num_deaths:
                    raise
                request.num_strikes += isinstance(error, WorkerLost) and error.alone
                raise _RetryElsewhere from None

    async def update_adapter(self, adapter_id: str) -> None:
        if adapter_id in self._adapters:
            await self._adapters[adapter_id].update()

    async def drop(self, adapter_id: str) -> None:
        if adapter_id in self._adapters:
            await self._adapters[adapter_id].drop()
            self._adapters.pop(adapter_id, None)

    @asynccontextmanager
    async def _ready(self, request: _Request) -> AsyncIterator[SampleJob]:
        """Yields the job with the worker's adapter id. The adapter stays in the group until the end of the block.

        Raises OperationError.
        """
        job, adapter_id = request.job, request.job.adapter_id
        if adapter_id is None:
            yield job
            return
        self._copies.get(adapter_id)  # raises, so that no entry is kept for an adapter that is gone
        if adapter_id not in self._adapters:
            self._adapters[adapter_id] = GroupAdapter(adapter_id, self.group, self._copies, self.pushes)
        async with self._adapters[adapter_id].in_use() as version:
            request.check_weights(version.copy)
            yield replace(job, adapter_id=version.worker_id)

    @contextmanager
    def _counted(self, job: SampleJob) -> Iterator[None]:
        self.num_tokens += job.most_tokens
        try:
            yield
        finally:
            self.num_tokens -= job.most_tokens
