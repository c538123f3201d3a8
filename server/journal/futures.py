"""Futures: the results of accepted operations, which are created, resolved or failed, awaited, and kept for a TTL.

A result is written to a file before any client receives it, so kill -9 cannot take it back; while the file cannot be
written, it is answered from memory. Its location is written to the store later, in batches; after that the result may
be evicted from memory.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, cast

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.errors import Category, RequestError
from ...schemas.futures import Pending, RequestFailed
from ..files.segment import MAX_BODY_BYTES
from ..files.segment_log import Guard, RecordPosition, SegmentLog
from ..http.digests import Fingerprint
from ..logs.repeated_errors import RepeatedErrorLog
from ..store import OperationRecord, ResultRecord, Store
from .journal import Header
from .stored_results import ENDED, FINGERPRINT, MAX_PER_WRITE, store_unstored, stored_fingerprint
from .strikes import STRIKES

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 64 << 20
_MEMORY_BYTES = 64 << 20
_BYTES_BESIDE_BODY = 2048
"""Approximate memory of a future without its body: lookup entries and the objects that wait for it."""
_RETRY_SECONDS = 1.0
_LINGER_SECONDS = 0.25
"""Results that arrive within this time of the first one go to the store in the same batch."""

_RECORD_BYTES = 512
"""Approximate disk space of a kept result without its body: its header, and its row in the store."""
_SUM_SHARE = 0.02
"""Maximum share of time that summing up kept results may occupy the database."""

Encoding = Literal["json", "forward_backward", "sample", "user_error", "server_error"]

_ERRORS = ("user_error", "server_error")


@dataclass(frozen=True, slots=True)
class Result:
    """A result's encoded body.

    encoding: "json" and the two error encodings are JSON that is sent unchanged; the others are protobuf, which can be
    sent as protobuf or converted to JSON.
    """

    body: bytes
    encoding: Encoding = "json"

    @property
    def is_error(self) -> bool:
        return self.encoding in _ERRORS

    @property
    def is_json(self) -> bool:
        return self.encoding in ("json", *_ERRORS)


def failure(message: str, category: Category) -> Result:
    encoding = "server_error" if category == "server" else "user_error"
    return Result(RequestFailed(error=message, category=category).model_dump_json().encode(), encoding)


@dataclass(frozen=True, slots=True)
class ResultSummary:
    """A summary of a result without its body; num_bytes is the size of the body."""

    request_id: str
    is_error: bool
    num_bytes: int


@dataclass(eq=False, slots=True)
class Future:
    """One accepted operation's result, or the placeholder for it.

    pending: says why there is no result yet. on_stored: called as soon as the store has the result's place.
    num_bytes: size of the result's body.
    ended: of a run's operation, what its history keeps.
    fingerprint: of the request; None if an earlier version accepted it.
    """

    request_id: str
    tenant_id: str
    pending: Callable[[], Pending]
    on_stored: Callable[[], None]
    fingerprint: Fingerprint | None = None
    result: Result | None = None
    num_bytes: int = 0
    place: RecordPosition | None = None
    resolved_at: float = 0.0
    ended: OperationRecord | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self) -> dict[str, object]:
        """Returns what the file records of the result in addition to its body."""
        assert self.result is not None
        header: dict[str, object] = {
            "request_id": self.request_id,
            "tenant_id": self.tenant_id,
            "encoding": self.result.encoding,
            "created_at": self.resolved_at,
        }
        if self.fingerprint is not None:
            header[FINGERPRINT] = self.fingerprint
        if self.ended is not None:
            header[ENDED] = vars(self.ended)
        return header

    def record(self) -> ResultRecord:
        """Returns what the store records of a result that is in the file."""
        assert self.result is not None
        place, encoding = str(self.place), self.result.encoding
        return ResultRecord(self.request_id, self.tenant_id, place, self.num_bytes, encoding, self.resolved_at)

    def end(self) -> None:
        """Calls `on_stored`, and drops the references to the operation, which no callback needs any more."""
        self.on_stored()
        self.pending, self.on_stored = Pending, lambda: None


class LongPolls:
    """The waits in progress, which a server that stops ends early."""

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """True if the event was set within `seconds`."""
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                await event.wait()
        except TimeoutError:
            return False
        finally:
            self._deadlines.discard(deadline)
        return True

    def stop(self) -> None:
        """Ends all waits as if they had timed out."""
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)


class KeptBytes:
    """Counts the bytes that each tenant's results take on disk. Adds new results at once; `recount` takes expired ones
    off."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_tenant: Counter[str] = Counter()
        self._sum_again_at = 0.0

    def of(self, tenant_id: str) -> int:
        """Returns about how many bytes the tenant's results take on disk."""
        return self._by_tenant[tenant_id]

    def add(self, tenant_id: str, body_bytes: int) -> None:
        self._by_tenant[tenant_id] += body_bytes + _RECORD_BYTES

    async def recount(self, not_stored: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Sums up all results, unless that would occupy the database too often.

        Args:
            not_stored: returns tenant and size of the body of each result that the store lacks.
        """
        began_at = time.monotonic()
        if began_at < self._sum_again_at:
            return
        sums = await self._store.results.sum_by_tenant()
        self._by_tenant = Counter({tenant_id: num * _RECORD_BYTES + size for tenant_id, (num, size) in sums.items()})
        for tenant_id, body_bytes in not_stored():
            self.add(tenant_id, body_bytes)
        now = time.monotonic()
        self._sum_again_at = now + (now - began_at) / _SUM_SHARE


class Futures:
    """Holds the futures by request id. Call `open` before anything else; `close` writes what is still unwritten."""

    def __init__(
        self,
        directory: Path,
        store: Store,
        ttl_seconds: float,
        memory_bytes: int = _MEMORY_BYTES,
        sync: bool = False,
        guard: Guard = lambda: None,
        on_operations: Callable[[set[str]], None] = lambda run_ids: None,
    ) -> None:
        """on_operations: called with the runs of which ended operations were stored."""
        self._segments = SegmentLog(directory, _SEGMENT_BYTES, sync, guard)
        self._store = store
        self._on_operations = on_operations
        self._ttl_seconds = ttl_seconds
        self._memory_bytes = memory_bytes
        self._live: dict[str, Future] = {}
        self._stored: OrderedDict[str, Future] = OrderedDict()
        self._stored_bytes = 0
        self._appending: set[Future] = set()  # being written to the file
        self._unstored: list[Future] = []  # in the file, in file order, but not in the store yet
        self._has_unstored = asyncio.Event()
        self._flush_requested = asyncio.Event()
        self._num_stored, self._batch_stored = 0, asyncio.Condition()
        self.long_polls, self.kept_bytes = LongPolls(), KeptBytes(store)
        # Held while a large result is encoded or decoded, since each step of that blocks the event loop for a moment.
        self.large_result_lock = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._write_errors = RepeatedErrorLog(logger, f"writing results to {directory}")
        self._store_errors = RepeatedErrorLog(logger, "storing the places of results")

    async def open(self) -> None:
        await store_unstored(self._segments, self._store)
        await self.kept_bytes.recount(self._sizes_not_stored)
        self._writer = asyncio.create_task(self._write_behind())

    async def fail_lost(self, headers: Iterable[Header]) -> None:
        """Fails operations that an earlier process accepted and that will not be resumed."""
        waited_for = [one for one in headers if one.refused is None and one.kind not in STRIKES]
        by_id = {header.request_id: header for header in waited_for if header.request_id not in self._live}
        answered = await self.find_encodings(list(by_id))
        for request_id, header in by_id.items():
            if request_id not in answered:
                future = self.create(request_id, header.tenant_id, fingerprint=header.fingerprint)
                self.fail(future, _lost(header), "server")

    async def has_result(self, request_id: str) -> bool:
        """True if the store has a result of this request; requests in progress are not considered."""
        return await self._store.results.get(request_id) is not None

    async def find_encodings(self, request_ids: Sequence[str]) -> dict[str, Encoding]:
        """Returns the encoding of the result, by request id, for those requests whose result is in the store."""
        return {one.request_id: cast(Encoding, one.encoding) for one in await self._store.results.get_many(request_ids)}

    async def list_summaries(self, prefix: str) -> list[ResultSummary]:
        """Returns the requests with this id prefix that have a result, including those of earlier processes."""
        here = [future for request_id, future in self._live.items() if request_id.startswith(prefix) and future.result]
        stored = await self._store.results.list_by_prefix(prefix)
        found = [ResultSummary(one.request_id, one.encoding in _ERRORS, one.size_bytes) for one in stored]
        found += [ResultSummary(one.request_id, one.result.is_error, one.num_bytes) for one in here if one.result]
        return list({one.request_id: one for one in found}.values())

    def create(
        self,
        request_id: str,
        tenant_id: str,
        pending: Callable[[], Pending] = Pending,
        on_stored: Callable[[], None] = lambda: None,
        fingerprint: Fingerprint | None = None,
    ) -> Future:
        assert request_id not in self._live, f"{request_id} already exists"
        future = self._live[request_id] = Future(request_id, tenant_id, pending, on_stored, fingerprint)
        return future

    async def find_fingerprint(self, request_id: str) -> Fingerprint | None:
        """Returns the fingerprint of an accepted request; None if it has none, as its result is lost or an earlier
        version accepted it. Raises KeyError if nothing is known of the request."""
        if (future := self._live.get(request_id)) is not None:
            return future.fingerprint
        if (stored := await self._store.results.get(request_id)) is None:
            raise KeyError(request_id)
        return await stored_fingerprint(self._segments, stored)

    def resolve(self, future: Future, result: Result, ended: OperationRecord | None = None) -> None:
        """Sets the result, unless there is one. `ended`: what the run's history keeps of the operation."""
        if future.result is not None:
            return
        future.ended = ended
        if len(result.body) > MAX_BODY_BYTES:
            words = f"the result has {len(result.body)} bytes, and at most {MAX_BODY_BYTES} can be stored: request less"
            result = failure(words, "user")
        future.result, future.num_bytes, future.resolved_at = result, len(result.body), time.time()
        self.kept_bytes.add(future.tenant_id, future.num_bytes)
        self._append(future)

    def fail(self, future: Future, message: str, category: Category, ended: OperationRecord | None = None) -> None:
        self.resolve(future, failure(message, category), ended)

    def forget(self, future: Future) -> None:
        """Removes a future whose operation was not accepted after all."""
        del self._live[future.request_id]

    async def require(self, request_id: str, tenant_id: str) -> None:
        """Raises RequestError 404 unless the request exists and belongs to the tenant."""
        future = self._live.get(request_id) or await self._store.results.get(request_id)
        if future is None or future.tenant_id != tenant_id:
            raise _unknown(request_id)

    async def wait(
        self, request_id: str, tenant_id: str, seconds: float, claim: Callable[[int], None] = lambda num_bytes: None
    ) -> Result | Pending:
        """Returns the result, or after `seconds` without one, the reason why it is pending.

        Args:
            claim: called with the result's size in bytes before it is read; raises RequestError if there is no room for
                it.
        Raises:
            RequestError: 404, the request is unknown or belongs to another tenant.
        """
        future = self._live.get(request_id)
        if future is None:
            return await self._load(request_id, tenant_id, claim)
        if future.tenant_id != tenant_id:
            raise _unknown(request_id)
        if not await self.long_polls.wait(future.done, seconds):
            return future.pending()
        assert future.result is not None
        claim(future.num_bytes)
        return future.result

    async def expire(self) -> None:
        """Deletes results that are older than the TTL."""
        oldest = time.time() - self._ttl_seconds
        await self._store.results.delete(oldest)
        await asyncio.to_thread(self._segments.delete_older_than, self._ttl_seconds)
        while self._stored and next(iter(self._stored.values())).resolved_at < oldest:
            self._evict_oldest()
        await self.kept_bytes.recount(self._sizes_not_stored)

    @property
    def num_unstored(self) -> int:
        """Returns the number of results whose place the store does not have yet."""
        return len(self._unstored) + len(self._appending)

    def _sizes_not_stored(self) -> list[tuple[str, int]]:
        return [(future.tenant_id, future.num_bytes) for future in (*self._unstored, *self._appending)]

    async def store_now(self) -> None:
        """Waits until the store has the results that are in the file now, or cannot take them at present."""
        if not self._unstored:
            return
        wanted = self._num_stored + len(self._unstored)
        self._flush_requested.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_SECONDS), self._batch_stored:
                await self._batch_stored.wait_for(lambda: self._num_stored >= wanted)

    async def close(self) -> None:
        self._closing.set()
        self._has_unstored.set()
        self._flush_requested.set()
        try:
            if self._writer is not None:
                await self._writer
        finally:
            await self._segments.close()

    async def _load(self, request_id: str, tenant_id: str, claim: Callable[[int], None]) -> Result:
        record = await self._store.results.get(request_id)
        if record is None or record.tenant_id != tenant_id:
            raise _unknown(request_id)
        claim(record.size_bytes)
        try:
            stored = await self._segments.read(RecordPosition.parse(record.place))
        except FileNotFoundError:
            raise _unknown(request_id) from None
        except ValueError as error:
            logger.error("the result of %s is lost: %s", request_id, error)
            return failure(f"the result of {request_id} is damaged on the server's disk", "server")
        return Result(stored.body, cast(Encoding, record.encoding))

    def _append(self, future: Future) -> None:
        assert future.result is not None
        self._appending.add(future)
        written = self._segments.append(future.header(), future.result.body)
        if written.done():
            self._appended(future, written)
        else:
            written.add_done_callback(partial(self._appended, future))

    def _appended(self, future: Future, written: "asyncio.Future[RecordPosition]") -> None:
        future.done.set()
        if error := written.exception():
            # Nothing is lost while this process lives: the result stays in memory, and the write is retried.
            if not self._closing.is_set():
                self._write_errors.failed(cast(Exception, error))
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._append, future)
                return
            logger.error("result %s cannot be written (%s)", future.request_id, error)
        else:
            self._write_errors.succeeded()
            future.place = written.result()
            self._unstored.append(future)
        self._appending.discard(future)
        self._has_unstored.set()

    async def _write_behind(self) -> None:
        while self._unstored or self._appending or not self._closing.is_set():
            if not self._unstored:
                self._has_unstored.clear()
                await self._has_unstored.wait()
                await _wait(self._flush_requested, _LINGER_SECONDS)
                continue
            batch = self._unstored[:MAX_PER_WRITE]
            if not self._closing.is_set():
                self._flush_requested.clear()
            try:
                ended = [one.ended for one in batch if one.ended is not None]
                await self._store.results.put([one.record() for one in batch], ended)
            except SQLAlchemyError as error:
                if self._closing.is_set():
                    raise
                self._store_errors.failed(error)
                await _wait(self._closing, _RETRY_SECONDS)
                continue
            self._store_errors.succeeded()
            del self._unstored[: len(batch)]
            self._on_operations({one.run_id for one in ended})
            for future in batch:
                future.end()
                self._stored[future.request_id] = future
                self._stored_bytes += future.num_bytes + _BYTES_BESIDE_BODY
            while self._stored_bytes > self._memory_bytes:
                self._evict_oldest()
            self._num_stored += len(batch)
            async with self._batch_stored:
                self._batch_stored.notify_all()

    def _evict_oldest(self) -> None:
        request_id, future = self._stored.popitem(last=False)
        self._stored_bytes -= future.num_bytes + _BYTES_BESIDE_BODY
        del self._live[request_id]


async def check_same(futures: Futures, request_id: str, number: str, again: Fingerprint, remedy: str) -> None:
    """Checks that a request with the number of an accepted one is a retry of that.

    Args:
        number: names the number in messages.
        remedy: of another request with the number.
    Raises:
        RequestError: 400 and not 409, which clients retry, if it is another request, or nothing is known of the
            accepted one any more.
    """
    try:
        known = await futures.find_fingerprint(request_id)
    except KeyError:
        raise RequestError(
            f"{number} was used before, and its result is no longer kept: poll earlier, or continue with the next "
            "number"
        ) from None
    if known is not None and known != again:
        raise RequestError(f"{number} {again.words(known)}: {remedy}")


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _lost(header: Header) -> str:
    remedy = "send it again"
    if header.kind != "sample":
        remedy = "create a new client from the last saved checkpoint and continue from there"
    return f"the server restarted before {header.kind} {header.request_id} was done: {remedy}"


def _unknown(request_id: str) -> RequestError:
    return RequestError(
        f"request {request_id} is unknown: it was never accepted for this API key, or its result is no longer kept", 404
    )
