"""Leases decide which of several servers on one database and one state directory does the work, and until when.

A lease is a row per base model, plus one, LIVE_STATE, for the shared live state in the state directory. A server takes
the leases of all its base models or none. Its tenure lasts until another server takes them, and it may only act while
the lease is certainly its own. Late actions are fenced off three times: the server's own clock says that the lease has
expired, the database refuses its writes, and the directory that it writes to has been renamed.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Collection
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from ..files.directories import remove_tree, sync_directory
from ..files.segment import SEGMENT_DIRECTORIES
from ..files.segment_log import fence_off_writer
from ..files.state_lock import epoch_directory, live_epochs
from ..store import LIVE_STATE, LeaseLost, LeaseRecord, Store
from ..store.database.database_errors import driver_message

logger = logging.getLogger(__name__)

_RENEWALS = 3
"""Renewals per duration of a lease."""
_MARGIN = 0.1
"""The share of the duration by which clocks may drift apart."""
_LOOK_SECONDS = 0.5
_SILENT_SECONDS = 2.0
"""A renewal that takes longer is reported."""


def boottime_seconds() -> float:
    """Returns a clock that no one can set, and that also advances while the process or the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LeaseExpired(OSError):
    """Raised if this server must no longer write, since another server may have the lease."""


class Lease:
    """A server's claim to do the work.

    base_models: those that this server serves.
    url: where other servers reach this one.
    seconds: without a renewal, until others may take the lease.
    holder_url: of the current holder, if that is another server.
    """

    def __init__(self, store: Store, base_models: Collection[str], url: str, seconds: float) -> None:
        self._store = store
        self._names = (LIVE_STATE, *base_models)
        self._url = url
        self.seconds = seconds
        self._holder = secrets.token_hex(8)
        self.holder_url: str | None = None
        # The holder's latest expiry, by the database's clock; and when it was first seen, by ours.
        self._expires_at = 0.0
        self._seen_at = -math.inf
        self._rests_until = -math.inf

    async def prepare(self, state_dir: Path) -> None:
        """Prepares the state directory before the first attempt. If no server has ever had the lease, the live state is
        empty.

        Raises:
            OSError: the directory cannot be used.
            ValueError: its live state belongs to another database, or is missing.
        """
        # In this order, since a server takes the lease before the live state.
        found = max(live_epochs(state_dir), default=0)
        if any(lease.base_model == LIVE_STATE for lease in await self._store.leases.list_all()):
            if found == 0 and not live_epochs(state_dir):  # looked twice: a server may be renaming it right now
                raise _no_live_state(state_dir)
            return
        if found > 0:
            raise ValueError(
                f"state directory {state_dir} has live state of epoch {found}, but no server has ever used this "
                "database: it belongs to another database; give a matching --state-dir and "
                "--database-url"
            )
        epoch_directory(state_dir, 0).mkdir(mode=0o700, exist_ok=True)

    async def acquire(self) -> "Tenure":
        """Waits until the lease is free (released or expired), then takes it."""
        may_be_free = True
        while True:
            try:
                is_resting = boottime_seconds() < self._rests_until
                if may_be_free and not is_resting and (tenure := await self._try()) is not None:
                    return tenure
                may_be_free = await self._look()
            except SQLAlchemyError as error:
                logger.error("the lease cannot be requested: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def renew(self, record: LeaseRecord) -> bool:
        """Renews the lease. True if no other server has had it since `record`."""
        if await self._store.leases.renew(self._holder, time.time(), self.seconds):
            return True
        again = await self._store.leases.acquire(self._names, self._holder, self._url, time.time(), self.seconds)
        return again is not None and again[0].epoch == record.epoch

    async def release(self) -> None:
        """Lets other servers take the lease at once. Raises SQLAlchemyError."""
        await self._store.leases.release(self._holder)

    async def release_and_rest(self, seconds: float) -> None:
        """Releases a lease that this server cannot use, and waits `seconds` before the next attempt, so that others can
        be first.
        """
        self._rests_until = boottime_seconds() + seconds
        await self.release()

    async def _try(self) -> "Tenure | None":
        sent_at = boottime_seconds()
        taken = await self._store.leases.acquire(self._names, self._holder, self._url, time.time(), self.seconds)
        if taken is None:
            return None
        self.holder_url = None
        return Tenure(self, taken[0], sent_at)

    async def _look(self) -> bool:
        """Updates what is known of the holder. True if the lease may be free."""
        named = [lease for lease in await self._store.leases.list_all() if lease.base_model in self._names]
        held = [lease for lease in named if lease.expires_at > 0 and lease.holder != self._holder]
        self.holder_url = held[0].url if held else None
        newest = max((lease.expires_at for lease in held), default=0.0)
        if newest != self._expires_at:
            self._expires_at, self._seen_at = newest, boottime_seconds()
        return not held or boottime_seconds() - self._seen_at >= self.seconds


class Tenure:
    """The time from when a server takes the lease until another one does.

    record: of LIVE_STATE; every holder has a higher epoch.
    """

    def __init__(self, lease: Lease, record: LeaseRecord, sent_at: float) -> None:
        self._lease = lease
        self.record = record
        self._outage: str | None = None
        self._extend(sent_at)

    @property
    def is_valid(self) -> bool:
        """True while no other server can have the lease. May be called in any thread."""
        return boottime_seconds() < self._valid_until

    @property
    def renewal_error(self) -> str | None:
        """Says why the lease cannot be renewed now, or is None."""
        return self._outage and f"the server's database does not answer ({self._outage})"

    def check(self) -> None:
        """Serves as the guard of segments. Raises LeaseExpired if the lease may have expired."""
        if not self.is_valid:
            raise LeaseExpired(f"the lease of epoch {self.record.epoch} has run out: another server may have it now")

    async def keep_renewing(self) -> None:
        """Renews the lease until another server has taken it, then returns.

        If the database is unreachable the lease expires; it becomes valid again if no other server has taken it
        meanwhile.
        """
        while True:
            await asyncio.sleep(self._lease.seconds / _RENEWALS if self.is_valid else 0)
            sent_at = boottime_seconds()
            try:
                if not await self._renewed():
                    break
            except SQLAlchemyError as error:
                self._report_outage(driver_message(error))
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                self._extend(sent_at)
                if self._outage is not None:
                    logger.warning("the database answers again, and the lease is renewed")
                    self._outage = None
        self._valid_until = -math.inf
        logger.error("the lease of epoch %d is lost: another server has taken it", self.record.epoch)

    async def _renewed(self) -> bool:
        """Renews the lease. If the database does not answer, waits for it and reports that."""
        renewing = asyncio.create_task(self._lease.renew(self.record))
        try:
            done, _ = await asyncio.wait({renewing}, timeout=_SILENT_SECONDS)
            if not done:
                self._report_outage(f"not for {_SILENT_SECONDS:g} s")
            return await renewing
        finally:
            renewing.cancel()

    def _report_outage(self, words: str) -> None:
        """Logs the outage when it begins."""
        if self._outage is None:
            logger.error("the lease cannot be renewed: the database does not answer (%s)", words)
        self._outage = words

    def take_live_state(self, state_dir: Path) -> Path:
        """Takes over the directory of live runs and results by renaming it, so that a former holder no longer finds it.
        Blocking.

        Writes of a former holder to files that it has open reach no reader.

        Raises:
            LeaseLost: the lease expired or another server was faster.
            ValueError: the live state is missing or belongs to another database.
            OSError: the directory cannot be renamed.
        """
        epoch = self.record.epoch
        found = sorted(live_epochs(state_dir))
        if not self.is_valid:
            raise LeaseLost(f"the lease of epoch {epoch} expired before the live state was taken")
        if not found:
            raise _no_live_state(state_dir)
        if found[-1] > epoch:
            raise ValueError(
                f"state directory {state_dir} has live state of epoch {found[-1]}, but the database is at {epoch}: it "
                "belongs to another database; give a matching --state-dir and --database-url"
            )
        directory = epoch_directory(state_dir, epoch)
        try:
            epoch_directory(state_dir, found[-1]).rename(directory)
        except FileNotFoundError:
            raise LeaseLost(f"the live state of epoch {found[-1]} has just been taken by another server") from None
        sync_directory(state_dir)
        for name in SEGMENT_DIRECTORIES:
            try:
                fence_off_writer(directory / name)
            except OSError as error:  # a full disk does not stop the takeover: late records were never acknowledged
                where = directory / name
                logger.error("a former server may still write to the last segment of %s: %s", where, error)
        for older in found[:-1]:  # a former holder may have created it before it noticed its loss
            remove_tree(epoch_directory(state_dir, older), ignore_errors=True)
        return directory

    def _extend(self, sent_at: float) -> None:
        self._valid_until = sent_at + (1 - _MARGIN) * self._lease.seconds


def _no_live_state(state_dir: Path) -> ValueError:
    return ValueError(
        f"state directory {state_dir} has no live state, but the database has a record of one: give --state-dir the "
        "directory that all servers on this database share, and mount it first"
    )
