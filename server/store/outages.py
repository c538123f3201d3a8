"""Outages: a database that cannot be used for now, which is no mistake of whoever asked."""

from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from .engine import DatabaseUnreachable

OUTAGES = (OperationalError, DatabaseUnreachable)
"""A full disk, a lock held for too long, a server that is away."""


def words_of(error: SQLAlchemyError) -> str:
    """The reason in the driver's words, without the statement."""
    return str(error.orig if isinstance(error, DBAPIError) else error)
