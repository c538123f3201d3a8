"""Errors of a database that is temporarily unusable, through no fault of the caller."""

from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from .engine import DatabaseUnreachable

OUTAGE_ERRORS = (OperationalError, DatabaseUnreachable)
"""Raised for example for a full disk, a lock held for too long, or an unreachable server."""


def driver_message(error: SQLAlchemyError) -> str:
    """Returns the driver's message, without the SQL statement."""
    return str(error.orig if isinstance(error, DBAPIError) else error)
