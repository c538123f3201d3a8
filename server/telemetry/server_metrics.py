"""The server's metrics for Prometheus.

Counts and durations are recorded where something ends; everything else is read when Prometheus asks. Labels are names
that the configuration or the code fixes (base models, routes, kinds of operations), never those that clients choose.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ...schemas.sampling import GuessCounts
from ...workers.dispatch import WorkerDispatch
from ...workers.scheduler.calls import ACTIVITIES, EndedCall
from ...workers.scheduler.rank_group import RankGroup
from ..store import OperationRecord

logger = logging.getLogger(__name__)

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = tuple(2.0**power for power in range(6, 21, 2))
_OPERATIONS = tuple(2.0**power for power in range(8))
_MEMORY_SECONDS = 2.0
"""An answer waits this long for reports of the ranks' memory; if they are in a long pass, it has their last report."""

_OF_GROUPS: Mapping[str, tuple[str, Callable[[RankGroup], float]]] = {
    "trainhouse_waiting_works": ("Work that waits for a group's ranks", lambda group: group.scheduler.queue.num_works),
    "trainhouse_waiting_tokens": ("Tokens that wait for a pass", lambda group: group.scheduler.queue.num_tokens),
    "trainhouse_sampling_jobs": ("Sampling jobs that wait or run", lambda group: len(group.scheduler.cohorts)),
}


@dataclass(frozen=True, slots=True)
class EndedSample:
    """A sampling request that has ended, without its tokens.

    num_tokens: that were sampled; None if it failed or was cancelled.
    guesses: of its draft; None without one.
    ended_at: in seconds since 1970.
    reason: why it failed; None if it did not.
    """

    base_model: str
    prompt_tokens: int
    num_tokens: int | None
    guesses: GuessCounts | None
    seconds: float
    ended_at: float
    reason: str | None


@dataclass(frozen=True)
class Gauge:
    """A number that is read when Prometheus asks."""

    name: str
    help: str
    read: Callable[[], float]


class ServerMetrics(Collector):
    """Records what ends, and collects the rest from the dispatch and the gauges."""

    def __init__(self, dispatch: WorkerDispatch) -> None:
        self._dispatch = dispatch
        self._registry = CollectorRegistry()
        self._requests = self._seconds(
            "http_request",
            "Time from a request's arrival to the end of its response; polls wait for results",
            *("route", "status"),
        )
        self._queued = self._seconds(
            "operation_queued", "Time that an operation waited for the ranks while others had them", "kind"
        )
        self._busy = self._seconds(
            "operation_busy", "Time from when the workers began an operation until it ended", "kind", "outcome"
        )
        self._samples = self._seconds("sample", "Time of a sampling request", "base_model", "outcome")
        self._calls = self._seconds("call", "Time of a call of a group's ranks", "group", "activity")
        self._trained_tokens = self._tokens("trained", "Tokens of data in ended operations", "kind")
        self._sampled_tokens = self._tokens("sampled", "Tokens that were sampled", "base_model")
        self._prompt_tokens = self._tokens("prompt", "Tokens of prompts that were sampled from", "base_model")
        self._draft_tokens = self._tokens("draft", "Tokens that drafts proposed", "base_model", "outcome")
        self._pass_tokens = self._histogram("pass_tokens", "Tokens in a pass", ("group",), _TOKENS)
        self._pass_operations = self._histogram(
            "pass_operations", "Operations in a pass, of any number of runs", ("group",), _OPERATIONS
        )
        self._idle_tokens = self._tokens(
            "pass_idle", "Tokens by which ranks' shares of passes are shorter than the longest", "group"
        )
        self._journal_writes = self._seconds("journal_write", "Time until an entry of the journal is durable")
        self._gauges: list[Gauge] = []
        self._memory: Mapping[str, Mapping[str, int]] = {}
        self._reading_memory: asyncio.Task[None] | None = None
        self._registry.register(self)

    def _seconds(self, name: str, words: str, *labels: str) -> Histogram:
        return self._histogram(f"{name}_seconds", words, labels, _SECONDS)

    def _histogram(self, name: str, words: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(f"trainhouse_{name}", words, labels, buckets=buckets, registry=self._registry)

    def _tokens(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"trainhouse_{name}_tokens", words, labels, registry=self._registry)

    def add_gauge(self, name: str, words: str, read: Callable[[], float]) -> None:
        self._gauges.append(Gauge(name, words, read))

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, f"{status // 100}xx" if status != 429 else "429").observe(seconds)

    def operation_ended(self, ended: OperationRecord) -> None:
        self._queued.labels(ended.kind).observe(max(ended.queued_seconds, 0.0))
        self._busy.labels(ended.kind, "ok" if ended.error is None else "failed").observe(ended.busy_seconds)
        if ended.error is None:
            self._trained_tokens.labels(ended.kind).inc(ended.num_tokens)

    def sample_ended(self, ended: EndedSample) -> None:
        base_model, num_tokens = ended.base_model, ended.num_tokens
        self._samples.labels(base_model, "failed" if num_tokens is None else "ok").observe(ended.seconds)
        if num_tokens is not None:
            self._prompt_tokens.labels(base_model).inc(ended.prompt_tokens)
            self._sampled_tokens.labels(base_model).inc(num_tokens)
            if (guesses := ended.guesses) is not None:
                self._draft_tokens.labels(base_model, "accepted").inc(guesses.accepted)
                self._draft_tokens.labels(base_model, "rejected").inc(guesses.drafted - guesses.accepted)

    def call_ended(self, ended: EndedCall) -> None:
        group, call = ended.group, ended.call
        self._calls.labels(group, call.activity).observe(ended.seconds)
        if call.activity == "pass":
            self._pass_tokens.labels(group).observe(call.size.tokens)
            self._pass_operations.labels(group).observe(len(call.works))
            self._idle_tokens.labels(group).inc(ended.idle_tokens)

    def journal_written(self, seconds: float) -> None:
        self._journal_writes.observe(seconds)

    async def answer(self, accept: str) -> tuple[bytes, str]:
        """Returns all metrics in a format that `accept`, a request's header, names; and its content type."""
        if self._reading_memory is None or self._reading_memory.done():
            self._reading_memory = asyncio.create_task(self._read_memory())
        await asyncio.wait({self._reading_memory}, timeout=_MEMORY_SECONDS)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    async def _read_memory(self) -> None:
        try:
            self._memory = await self._dispatch.memory()
        except Exception as error:
            logger.debug("the workers' memory is not known: %s", error)

    def collect(self) -> Iterator[Metric]:
        """Yields what is read now; called by the registry."""
        groups = self._dispatch.groups
        for name, (words, read) in _OF_GROUPS.items():
            family = GaugeMetricFamily(name, words, labels=("group",))
            for group in groups:
                family.add_metric((group.name,), read(group))
            yield family
        deaths = CounterMetricFamily("trainhouse_worker_deaths", "Deaths of workers of a group", labels=("group",))
        doing = GaugeMetricFamily(
            "trainhouse_group_activity", "1 for what a group's ranks are doing", labels=("group", "activity")
        )
        for group in groups:
            deaths.add_metric((group.name,), group.supervisor.num_deaths)
            for activity in ACTIVITIES:
                doing.add_metric((group.name, activity), float(group.activity == activity))
        memory = GaugeMetricFamily(
            "trainhouse_memory", "What a group holds, in bytes or as numbers, by purpose", labels=("group", "purpose")
        )
        for name, by_purpose in self._memory.items():
            for purpose, value in by_purpose.items():
                memory.add_metric((name, purpose), value)
        yield from (deaths, doing, memory)
        for gauge in self._gauges:
            yield GaugeMetricFamily(gauge.name, gauge.help, value=gauge.read())
