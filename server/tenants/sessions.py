"""Tracks client sessions. A session ends when the client finishes it or its heartbeats stop; its resources are then
released."""

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from pydantic import JsonValue
from sqlalchemy.exc import SQLAlchemyError

from ...schemas.bounds import MAX_METADATA_BYTES, MAX_TEXT
from ...schemas.errors import RequestError
from ...schemas.models import CreateSessionRequest, FinishSessionRequest
from ..logs.repeated_errors import RepeatedErrorLog
from ..store import SessionEnd, SessionRecord, Store, string_metadata
from ..store.database.schema import replace_unstorable
from .auth import Tenant

logger = logging.getLogger(__name__)

_MAX_METADATA_TEXT = 8 * MAX_METADATA_BYTES
"""Characters of JSON, with all escapes, for the largest metadata that a request may have."""

_CROWDED_SECONDS = 120.0
"""An ended session is kept at least this long, however many its tenant has: its resources may not be released yet."""

_FORGOTTEN_AT_ONCE = 500


@dataclass
class _OpenSession:
    """An open session.

    heard_at: monotonic, so that a machine that slept does not end all sessions.
    num_held: running requests whose client cannot send heartbeats.
    """

    record: SessionRecord
    heard_at: float
    num_held: int = 0


class Sessions:
    """Holds the open sessions and ends those whose heartbeats stop; the store has all sessions.

    While the server is down no session expires: at start every open session gets the full time again.

    on_end: called in order with the id of each session that has ended; their exceptions are logged.
    """

    def __init__(
        self,
        store: Store,
        expiry_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        check_room: Callable[[str, int], None] = lambda tenant_id, num_open: None,
    ) -> None:
        """Takes the store and the limits.

        Args:
            check_room: called before a session is created, with the tenant's id and its number of open sessions;
                raises RequestError.
        """
        self._store = store
        self._expiry_seconds = expiry_seconds
        self._clock = clock
        self._check_room = check_room
        self._num_open: Counter[str] = Counter()
        self._open: dict[str, _OpenSession] = {}
        self._saved_at = clock()
        self._watch: asyncio.Task[None] | None = None
        self.on_end: list[Callable[[str], Awaitable[None]]] = []

    async def start(self) -> None:
        now = self._clock()
        await self._store.sessions.truncate_texts(MAX_TEXT, _MAX_METADATA_TEXT)
        self._open = {record.session_id: _OpenSession(record, now) for record in await self._store.sessions.list_open()}
        self._num_open = Counter(known.record.tenant_id for known in self._open.values())

    def start_expiry(self) -> None:
        """Starts to expire sessions without heartbeats."""
        now = self._clock()
        for known in self._open.values():
            known.heard_at = now
        self._watch = asyncio.create_task(self._expire_in_time())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._save_heartbeats()

    async def create(self, tenant: Tenant, request: CreateSessionRequest, idempotency_key: str | None) -> SessionRecord:
        """Creates a session, or returns the one that the tenant created with the same idempotency key.

        Raises RequestError: 429 if the tenant has too many, 400 if the key was used for another request.
        """
        now = time.time()
        new = SessionRecord(
            session_id=secrets.token_hex(8),
            tenant_id=tenant.id,
            created_at=now,
            last_heartbeat_at=now,
            tags=request.tags,
            user_metadata=string_metadata(request.user_metadata),
            sdk_version=request.sdk_version,
            project_id=request.project_id,
            display_name=request.display_name,
            idempotency_key=idempotency_key or None,
        )
        if (known := await self._store.sessions.find(new)) is not None:
            _check_same(known, new)
            return known
        self._check_room(tenant.id, self._num_open[tenant.id])
        # Counted before it is inserted, since others may be created meanwhile.
        self._num_open[tenant.id] += 1
        try:
            record = await self._store.sessions.insert(new)
            if record is not new:
                _check_same(record, new)
            else:
                self._open[new.session_id] = _OpenSession(new, self._clock())
            return record
        finally:
            if new.session_id not in self._open:
                self._num_open[tenant.id] -= 1

    async def get(self, tenant: Tenant, session_id: str) -> SessionRecord:
        """Returns the session, open or ended. Raises RequestError 404, also for another tenant's session."""
        known = self._open.get(session_id)
        record = known.record if known else await self._store.sessions.get(session_id)
        if record is None or record.tenant_id != tenant.id:
            raise RequestError(f"there is no session {session_id}: create one with create_session", status=404)
        return record

    async def require_open(self, tenant: Tenant, session_id: str) -> SessionRecord:
        """Returns the session and counts this as a heartbeat. Raises RequestError 404, or 410 if it has ended."""
        record = await self.get(tenant, session_id)
        if record.finished_at is not None:
            raise RequestError(f"session {session_id} has ended ({record.end}): create a new one", status=410)
        self.touch(session_id)
        return record

    @property
    def open_ids(self) -> tuple[str, ...]:
        return tuple(self._open)

    def num_open(self, tenant_id: str) -> int:
        return self._num_open[tenant_id]

    def is_open(self, session_id: str) -> bool:
        return session_id in self._open

    def touch(self, session_id: str) -> None:
        """Counts any request of a session as a heartbeat. Ignores unknown and ended sessions."""
        if known := self._open.get(session_id):
            known.heard_at = self._clock()

    @contextmanager
    def kept_open(self, session_id: str) -> Iterator[None]:
        """Keeps the session from expiring within the block. Ignores unknown and ended sessions."""
        known = self._open.get(session_id)
        if known is None:
            yield
            return
        known.num_held += 1
        try:
            yield
        finally:
            known.num_held -= 1
            known.heard_at = self._clock()

    async def finish(self, tenant: Tenant, session_id: str, request: FinishSessionRequest) -> None:
        """Ends the session; if it has already ended, the first reason stays. Raises RequestError 404."""
        await self.get(tenant, session_id)
        await self._end(session_id, request.reason.type, request.detail)

    async def set_project(self, tenant: Tenant, session_id: str, project_id: str) -> None:
        """Moves the session to a project. Raises RequestError 404."""
        await self.get(tenant, session_id)
        await self._store.sessions.set_project(session_id, project_id)
        if known := self._open.get(session_id):
            known.record = replace(known.record, project_id=project_id)

    async def expire(self) -> None:
        """Ends the sessions without heartbeats for too long."""
        silent_since = self._clock() - self._expiry_seconds
        for session_id, known in list(self._open.items()):
            if known.heard_at < silent_since and not known.num_held:
                await self._end(session_id, "expired", f"no heartbeat for {self._expiry_seconds:g} s")

    async def delete_ended(self, ttl_seconds: float, most: int, spared: Collection[str]) -> list[str]:
        """Deletes sessions that ended at least `ttl_seconds` ago and saved nothing, with their runs and samplers.

        Returns their ids.

        Args:
            most: of a tenant with more ended sessions than this, the oldest are deleted early.
            spared: ids of sessions that are still being ended.
        """
        now = time.time()
        old = await self._store.sessions.list_deletable(now - ttl_seconds, now - _CROWDED_SECONDS, most)
        forgotten = [session_id for session_id in old if session_id not in spared]
        for first in range(0, len(forgotten), _FORGOTTEN_AT_ONCE):
            await self._store.sessions.delete(forgotten[first : first + _FORGOTTEN_AT_ONCE])
        return forgotten

    async def _end(self, session_id: str, end: SessionEnd, detail: str | None) -> None:
        first = await self._store.sessions.end(session_id, time.time(), end, detail)
        if (known := self._open.pop(session_id, None)) is not None:
            self._num_open[known.record.tenant_id] -= 1
        if not first:
            return
        logger.info("session %s ended: %s", session_id, end)
        for ended in self.on_end:
            try:
                await ended(session_id)
            except Exception:  # the session has ended even if not all its resources could be released
                logger.exception("releasing the resources of session %s failed", session_id)

    async def _expire_in_time(self) -> None:
        period, errors = min(10.0, self._expiry_seconds / 4), RepeatedErrorLog(logger, "expiring sessions")
        while True:
            await asyncio.sleep(period)
            try:
                await self._save_heartbeats()
                await self.expire()
            except SQLAlchemyError as error:  # for example a full disk: the next round may succeed
                errors.failed(error)
            else:
                errors.succeeded()

    async def _save_heartbeats(self) -> None:
        """Stores the last heartbeats, which listings show; expiry does not read them from the store."""
        now, shift = self._clock(), time.time() - self._clock()
        heard = {one: known.heard_at + shift for one, known in self._open.items() if known.heard_at >= self._saved_at}
        if heard:
            await self._store.sessions.touch(heard)
        self._saved_at = now  # not before they are stored, which may fail


_REQUESTED = ("tags", "user_metadata", "sdk_version", "display_name", "project_id")


def _check_same(known: SessionRecord, new: SessionRecord) -> None:
    """Raises RequestError if the idempotency key of a request was used for another one."""
    requested = cast(JsonValue, [getattr(new, name) for name in _REQUESTED])
    stored = cast(JsonValue, [getattr(known, name) for name in _REQUESTED])
    made_otherwise = (known.end_detail or "").startswith("made by ") and known.finished_at == known.created_at
    if made_otherwise or _as_stored(stored) != _as_stored(requested):
        raise RequestError(
            f"X-Idempotency-Key {new.idempotency_key} was used to create session {known.session_id} by a different "
            "request: use a new key for each request"
        )


def _as_stored(value: JsonValue) -> str:
    return json.dumps(replace_unstorable(value), sort_keys=True)
