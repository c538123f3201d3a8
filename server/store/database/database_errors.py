"""Errors of a database, through no fault of the caller."""

from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError


class DatabaseUnreachable(SQLAlchemyError):
    """The database has been unreachable for too long. The caller may retry."""


class LeaseLost(SQLAlchemyError):
    """Another server has the lease that this store's writes need. Nothing was written, and no later write will be."""


OUTAGE_ERRORS = (OperationalError, DatabaseUnreachable)
"""Raised for example for a full disk, a lock held for too long, or an unreachable server."""

OUTAGE_RETRY_SECONDS = 2.0
"""Interval at which accepted work tries again to use the database."""


def outage_message(error: SQLAlchemyError) -> str:
    return f"the server's database cannot be used ({driver_message(error)})"


def driver_message(error: SQLAlchemyError) -> str:
    """Returns the driver's message, without the SQL statement."""
    return str(error.orig if isinstance(error, DBAPIError) else error)
