"""Repeated errors are logged once, and a full disk is explained to the client that saves."""

import errno
import logging

import pytest
from sqlalchemy.exc import OperationalError
from trainhouse.schemas.errors import OperationError
from trainhouse.server.logs.repeated_errors import RepeatedErrorLog, refusing_full_disk
from trainhouse.server.store import LeaseLost


def full(statement: str) -> OperationalError:
    return OperationalError(statement, {}, Exception("database or disk is full"))


def test_each_cause_and_the_recovery_are_logged_once_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    trouble = RepeatedErrorLog(logging.getLogger("trainhouse.test"), "housekeeping")
    for error in (full("INSERT 1"), full("INSERT 2"), LeaseLost("lost"), OSError(errno.ENOSPC, "full")):
        trouble.failed(error)
    for _ in range(2):
        trouble.succeeded()
    failed = "housekeeping failed, will retry"
    assert caplog.messages == [
        f"{failed}: database or disk is full",
        f"{failed}: lost",
        f"{failed}: [Errno {errno.ENOSPC}] full",
        "housekeeping works again",
    ]
    assert all(record.exc_info is None for record in caplog.records)


def test_unexpected_errors_have_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    RepeatedErrorLog(logging.getLogger("trainhouse.test"), "housekeeping").failed(KeyError("a"))
    assert caplog.records[0].exc_info is not None and "KeyError" in caplog.text


def test_only_a_full_disk_is_translated_for_a_save() -> None:
    words = "the checkpoint was not saved: the server's disk is full"
    with pytest.raises(OperationError, match=words), refusing_full_disk("the checkpoint was"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), refusing_full_disk("the checkpoint was"):
        raise FileNotFoundError(errno.ENOENT, "gone")
