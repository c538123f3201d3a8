"""Trouble: what fails again and again while its cause lasts: said once for each cause, and once that it is over."""

import contextlib
import errno
import logging
from collections.abc import Iterator

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.errors import OperationError
from ..store import LeaseLost
from ..store.outages import OUTAGES, words_of

FORESEEN = (OSError, LeaseLost, *OUTAGES)
"""A full disk, a database that is away, a lease that is another server's: no traceback says more."""


class Trouble:
    """Of one thing that is tried again and again. words: what stops it now, None: nothing."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self.words: str | None = None

    def failed(self, error: Exception) -> None:
        words = words_of(error) if isinstance(error, SQLAlchemyError) else str(error)
        if words == self.words:
            return
        self.words = words
        if isinstance(error, FORESEEN):
            self._logger.error("%s failed, and is tried again: %s", self._what, words)
        else:
            self._logger.error("%s failed, and is tried again", self._what, exc_info=error)

    def passed(self) -> None:
        if self.words is not None:
            self._logger.warning("%s succeeds again", self._what)
            self.words = None


@contextlib.contextmanager
def room_for(what: str) -> Iterator[None]:
    """Where there is none in the block, raises OperationError (server) in words for whoever saves."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"{what} not saved, since the server's disk is full ({error.strerror}): try again when there is room"
        raise OperationError(message, "server") from None
