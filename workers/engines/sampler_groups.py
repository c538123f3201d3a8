"""Sampler groups: workers that only sample, each with a base of its own, which the server gives the adapters.

An adapter leaves the training worker once, for the server's copy. A group gets it when a request first wants it there,
a newer version as soon as there is one, and all that it still needs again after its worker died.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse
from ..group import Group, OnProgress
from ..verbs import AdapterWeights, SampleJob
from ..work import Verb
from .company import MOST_STRIKES, Company, Standing
from .copies import AdapterCopies
from .underway import Told, Underway

logger = logging.getLogger(__name__)


class SamplerGroups:
    """Requests go to the group with the fewest tokens in flight; one whose worker died is run again."""

    def __init__(self, training: Group, groups: Sequence[Group], copies: AdapterCopies) -> None:
        self._training = training
        self._replicas = [_Replica(group, copies) for group in groups]
        self._copies = copies
        self._underway = Underway()

    async def start(self, on_progress: Callable[[str], None]) -> None:
        for replica in self._replicas:
            await replica.group.start(on_progress)

    async def close(self) -> None:
        await asyncio.gather(*(replica.group.close() for replica in self._replicas))
        self._copies.close()

    def status(self) -> str | None:
        return next((status for replica in self._replicas if (status := replica.group.status())), None)

    def pids(self) -> list[int]:
        return [pid for replica in self._replicas for pid in replica.group.pids()]

    async def copy_adapter(self, run_id: str, tenant_id: str, adapter_id: str) -> None:
        weights = await self._training.submit(run_id, tenant_id, Verb("export_adapter", (run_id,)))
        await self._keep(adapter_id, weights)

    async def load_adapter(self, adapter_id: str, directory: Path) -> None:
        await self._keep(
            adapter_id, await self._training.submit(adapter_id, "", Verb("read_adapter", (str(directory),)))
        )

    async def drop_adapter(self, adapter_id: str) -> None:
        self._copies.drop(adapter_id)
        await asyncio.gather(*(replica.drop(adapter_id) for replica in self._replicas))

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        return await self._underway.run(job.job_id, self._sample(job, Told(on_progress)))

    def cancel(self, job_id: str) -> None:
        self._underway.cancel(job_id)

    async def memory(self) -> dict[str, dict[str, int]]:
        groups = [replica.group for replica in self._replicas if not replica.group.restarting]
        answers = await asyncio.gather(*(group.submit("memory", "", Verb("memory")) for group in groups))
        return {group.name: answer for group, answer in zip(groups, answers, strict=True)}

    async def _keep(self, adapter_id: str, weights: AdapterWeights) -> None:
        await self._copies.put(adapter_id, weights)
        await asyncio.gather(*(replica.move_forward(adapter_id) for replica in self._replicas))

    async def _sample(self, job: SampleJob, told: Told) -> SampleResponse:
        standing = Standing()
        while standing.num_strikes < MOST_STRIKES:
            try:
                return await told.run(partial(self._next_replica().sample, job, standing))
            except _WorkerDied:
                continue
        raise OperationError(
            f"{MOST_STRIKES} sampler workers died of sampling request {job.job_id} while they had no other: see the"
            " server's log; a shorter prompt or fewer samples need less memory",
            "server",
        )

    def _next_replica(self) -> "_Replica":
        return min(self._replicas, key=lambda replica: (replica.group.restarting, replica.num_tokens))


class _WorkerDied(Exception):
    """Over the request, or beside it."""


class _Replica:
    """One sampler group and the adapters that it has. num_tokens: that it has or that wait for it, as far as known."""

    def __init__(self, group: Group, copies: AdapterCopies) -> None:
        self.group = group
        self.num_tokens = 0
        self._copies = copies
        self._company = Company()
        # Adapter id -> the worker (by the deaths before it) that got it, and its version.
        self._held: dict[str, tuple[int, int]] = {}
        self._bringing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def sample(self, job: SampleJob, standing: Standing, on_progress: OnProgress | None) -> SampleResponse:
        """Raises _WorkerDied, having said so of its standing, and OperationError."""
        with self._counted(job):
            async with self._company.joined(standing):
                num_deaths = self.group.num_deaths
                try:
                    if job.adapter_id is not None:
                        await self._bring(job.adapter_id)
                    return await self.group.sample(job, on_progress)
                except OperationError:
                    if self.group.num_deaths == num_deaths:
                        raise
                    self._company.died(standing)
                    raise _WorkerDied from None

    async def move_forward(self, adapter_id: str) -> None:
        """The newest version replaces one that is held. Where that fails, it is tried again when it is next wanted."""
        try:
            await self._bring(adapter_id, only_if_held=True)
        except OperationError as error:
            logger.warning("%s did not take the newest version of adapter %s: %s", self.group.name, adapter_id, error)

    async def drop(self, adapter_id: str) -> None:
        async with self._bringing[adapter_id]:
            if self._holds(adapter_id):
                await self.group.submit(adapter_id, "", Verb("drop_adapter", (adapter_id,), drops=adapter_id))
            self._held.pop(adapter_id, None)
            self.group.forget_lost(adapter_id)
        self._bringing.pop(adapter_id, None)

    async def _bring(self, adapter_id: str, only_if_held: bool = False) -> None:
        """Raises OperationError."""
        self._copies.get(adapter_id)  # no lock is kept for one that is gone
        async with self._bringing[adapter_id]:
            if only_if_held and not self._holds(adapter_id):
                return
            copy, num_deaths = self._copies.get(adapter_id), self.group.num_deaths
            if self._held.get(adapter_id) == (num_deaths, copy.version):
                return
            verb = Verb("import_adapter", (adapter_id, copy.read()), creates=adapter_id)
            await self.group.submit(adapter_id, "", verb)
            self._held[adapter_id] = (num_deaths, copy.version)

    def _holds(self, adapter_id: str) -> bool:
        num_deaths, _ = self._held.get(adapter_id, (-1, 0))
        return num_deaths == self.group.num_deaths

    @contextmanager
    def _counted(self, job: SampleJob) -> Iterator[None]:
        room = max(1, self.group.info.max_context_length - len(job.prompt))
        num_tokens = len(job.prompt) + job.num_samples * min(job.params.max_tokens or room, room)
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_tokens -= num_tokens
