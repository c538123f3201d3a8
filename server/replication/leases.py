"""Leases: which of several servers on one database and one state directory does the work, and until when it may.

A lease is a row per base model, and one more, LIVE_STATE, for what all of them keep in the state directory: a server
takes those of all its base models, or none. Its tenure is the time from then until another server has them. In it the
server may only do what it can vouch for while the lease is surely its own; what it tries later is fenced off three
times: it knows by its own clock that its time is up, the database refuses its writes, and the directory that it writes
into has another name.
"""

import asyncio
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from ..files.directories import sync_directory
from ..files.wal import shut_out
from ..store import LeaseLost, LeaseRecord, Store
from ..store.outages import words_of

logger = logging.getLogger(__name__)

LIVE_STATE = ""
"""In place of a base model, which has a name."""

_RENEWALS = 3
"""Times that a lease is renewed while it lasts."""
_MARGIN = 0.1
"""The share of it that clocks may differ by."""
_LOOK_SECONDS = 0.5
_SILENT_SECONDS = 2.0
"""For so long a renewal may take before it is told of."""
_SEGMENTED = ("journal", "results", "recordings")


def awake_seconds() -> float:
    """Of a clock that nobody sets, and that goes on while the process or the whole machine is stopped."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class TenureOver(OSError):
    """A server may not do what it was about to, since another one may have the lease."""


class Lease:
    """One server's place in the line.

    base_models: that it serves. url: where other servers reach it. seconds: without a renewal, until others may take
    it. holder_url: of the server that has it now, if that is another one.
    """

    def __init__(self, store: Store, base_models: Collection[str], url: str, seconds: float) -> None:
        self._store = store
        self._names = (LIVE_STATE, *base_models)
        self._url = url
        self.seconds = seconds
        self._holder = secrets.token_hex(8)
        self.holder_url: str | None = None
        # When it was last renewed, as the database says it; and when that was first seen, by our clock.
        self._expires_at = 0.0
        self._seen_at = -math.inf
        self._rests_until = -math.inf

    async def prepare(self, state_dir: Path) -> None:
        """Before it is first tried for: where nobody has ever had it, the live state is empty.

        Raises OSError, and ValueError where there is some of another database.
        """
        # In this order: who takes it has his lease before his live state.
        found = max(_epochs(state_dir), default=0)
        if any(lease.base_model == LIVE_STATE for lease in await self._store.list_leases()):
            if found == 0 and not _epochs(state_dir):  # not what a server takes at this very moment
                raise _no_live_state(state_dir)
            return
        if found > 0:
            raise ValueError(
                f"state directory {state_dir} has live state of epoch {found}, but no server has ever worked on this "
                "database: it is another database's; name those that belong together with --state-dir and "
                "--database-url"
            )
        _directory(state_dir, 0).mkdir(mode=0o700, exist_ok=True)

    async def taken(self) -> "Tenure":
        """As soon as nobody else has it: who has it gives it back, or does not renew it in time."""
        may_be_free = True
        while True:
            try:
                is_resting = awake_seconds() < self._rests_until
                if may_be_free and not is_resting and (tenure := await self._try()) is not None:
                    return tenure
                may_be_free = await self._look()
            except SQLAlchemyError as error:
                logger.error("the lease cannot be asked for: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def renewed(self, record: LeaseRecord) -> bool:
        """Whether nobody else has had it since."""
        if await self._store.renew_leases(self._holder, time.time(), self.seconds):
            return True
        again = await self._store.acquire_leases(self._names, self._holder, self._url, time.time(), self.seconds)
        return again is not None and again[0].epoch == record.epoch

    async def release(self) -> None:
        """Others may take it at once. Raises SQLAlchemyError."""
        await self._store.release_leases(self._holder)

    async def give_up(self, seconds: float) -> None:
        """As `release`, by who cannot use it: not to be tried for meanwhile, so that another server may be faster."""
        self._rests_until = awake_seconds() + seconds
        await self.release()

    async def _try(self) -> "Tenure | None":
        sent_at = awake_seconds()
        taken = await self._store.acquire_leases(self._names, self._holder, self._url, time.time(), self.seconds)
        if taken is None:
            return None
        self.holder_url = None
        return Tenure(self, taken[0], sent_at)

    async def _look(self) -> bool:
        """Whether it may be free."""
        named = [lease for lease in await self._store.list_leases() if lease.base_model in self._names]
        held = [lease for lease in named if lease.expires_at > 0 and lease.holder != self._holder]
        self.holder_url = held[0].url if held else None
        newest = max((lease.expires_at for lease in held), default=0.0)
        if newest != self._expires_at:
            self._expires_at, self._seen_at = newest, awake_seconds()
        return not held or awake_seconds() - self._seen_at >= self.seconds


class Tenure:
    """From when a server has taken the lease until another one has.

    record: of LIVE_STATE; every holder has a higher epoch.
    """

    def __init__(self, lease: Lease, record: LeaseRecord, sent_at: float) -> None:
        self._lease = lease
        self.record = record
        self._trouble: str | None = None
        self._extend(sent_at)

    @property
    def is_valid(self) -> bool:
        """Whether no other server can have the lease yet. In any thread."""
        return awake_seconds() < self._valid_until

    @property
    def trouble(self) -> str | None:
        """Why it cannot be renewed now."""
        return self._trouble and f"the server's database does not answer ({self._trouble})"

    def check(self) -> None:
        """As a guard of segments. Raises TenureOver."""
        if not self.is_valid:
            raise TenureOver(f"the lease of epoch {self.record.epoch} has run out: another server may have it now")

    async def keep(self) -> None:
        """Renews it until another server has it; then returns.

        Where the database is out of reach it runs out, and is valid again if nobody has taken it meanwhile.
        """
        while True:
            await asyncio.sleep(self._lease.seconds / _RENEWALS if self.is_valid else 0)
            sent_at = awake_seconds()
            try:
                if not await self._renewed():
                    break
            except SQLAlchemyError as error:
                self._fails(words_of(error))
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                self._extend(sent_at)
                if self._trouble is not None:
                    logger.warning("the database answers again, and the lease is renewed")
                    self._trouble = None
        self._valid_until = -math.inf
        logger.error("the lease of epoch %d is lost: another server has taken it", self.record.epoch)

    async def _renewed(self) -> bool:
        """As the lease says. A database that is away is waited for there, which somebody should know of."""
        renewing = asyncio.create_task(self._lease.renewed(self.record))
        try:
            done, _ = await asyncio.wait({renewing}, timeout=_SILENT_SECONDS)
            if not done:
                self._fails(f"not for {_SILENT_SECONDS:g} s")
            return await renewing
        finally:
            renewing.cancel()

    def _fails(self, words: str) -> None:
        """Told once, however long it lasts."""
        if self._trouble is None:
            logger.error("the lease cannot be renewed: the database does not answer (%s)", words)
        self._trouble = words

    def take_live_state(self, state_dir: Path) -> Path:
        """The directory of what belongs to live runs and results, blocking; a former holder finds it no more.

        Whoever still has a file open there writes to nobody. Raises LeaseLost, and ValueError where the live state is
        not there, OSError.
        """
        epoch = self.record.epoch
        found = sorted(_epochs(state_dir))
        if not self.is_valid:
            raise LeaseLost(f"the lease of epoch {epoch} ran out before its live state was taken")
        if not found:
            raise _no_live_state(state_dir)
        if found[-1] > epoch:
            raise ValueError(
                f"state directory {state_dir} has live state of epoch {found[-1]}, but the database is at {epoch}: it "
                "is another database's; name those that belong together with --state-dir and --database-url"
            )
        directory = _directory(state_dir, epoch)
        try:
            _directory(state_dir, found[-1]).rename(directory)
        except FileNotFoundError:
            raise LeaseLost(f"the live state of epoch {found[-1]} was taken by another server meanwhile") from None
        sync_directory(state_dir)
        for name in _SEGMENTED:
            _try_to_shut_out(directory / name)
        for older in found[:-1]:  # a former holder may have made it, when it did not know yet
            shutil.rmtree(_directory(state_dir, older), ignore_errors=True)
        return directory

    def _extend(self, sent_at: float) -> None:
        self._valid_until = sent_at + (1 - _MARGIN) * self._lease.seconds


def _no_live_state(state_dir: Path) -> ValueError:
    return ValueError(
        f"state directory {state_dir} has no live state, of which the database knows: name the directory that all "
        "servers on this database share with --state-dir, and mount it before"
    )


def _try_to_shut_out(directory: Path) -> None:
    """A full disk is no reason to do no work. What might be written there now was acknowledged to nobody."""
    try:
        shut_out(directory)
    except OSError as error:
        logger.error("a former server may still write to the last segment of %s: %s", directory, error)


def live_directory(state_dir: Path) -> Path:
    """Where what belongs to live runs and results lies: of the servers on a database of their own, below it."""
    newest = max(_epochs(state_dir), default=None)
    return state_dir if newest is None else _directory(state_dir, newest)


def _epochs(state_dir: Path) -> list[int]:
    return [int(name[1]) for path in os.listdir(state_dir) if (name := re.fullmatch(r"live-(\d+)", path))]


def _directory(state_dir: Path, epoch: int) -> Path:
    return state_dir / f"live-{epoch}"
