"""Logs errors that repeat while their cause lasts: once per cause, and once when they are over."""

import contextlib
import errno
import logging
from collections.abc import Iterator

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.errors import OperationError
from ..store import LeaseLost
from ..store.database.database_errors import OUTAGE_ERRORS, driver_message

EXPECTED_ERRORS = (OSError, LeaseLost, *OUTAGE_ERRORS)
"""A full disk, an unreachable database, a lost lease: a traceback would add nothing."""


class RepeatedErrorLog:
    """Logs the failures of one activity that is repeated.

    reason: the reason of the current failure, or None.
    """

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self.reason: str | None = None

    def failed(self, error: Exception) -> None:
        words = driver_message(error) if isinstance(error, SQLAlchemyError) else str(error)
        if words == self.reason:
            return
        self.reason = words
        if isinstance(error, EXPECTED_ERRORS):
            self._logger.error("%s failed, will retry: %s", self._what, words)
        else:
            self._logger.error("%s failed, will retry", self._what, exc_info=error)

    def succeeded(self) -> None:
        if self.reason is not None:
            self._logger.warning("%s works again", self._what)
            self.reason = None


@contextlib.contextmanager
def refusing_full_disk(what: str) -> Iterator[None]:
    """Turns a full disk in the block into OperationError (server), with a message for the tenant that saves."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"{what} not saved: the server's disk is full ({error.strerror}); retry when there is space again"
        raise OperationError(message, "server") from None
