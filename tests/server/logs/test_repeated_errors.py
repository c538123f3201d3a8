"""What fails again and again is said once, and a full disk in words for whoever saves."""

import errno
import logging

import pytest
from sqlalchemy.exc import OperationalError
from trainhouse.schemas.errors import OperationError
from trainhouse.server.logs.repeated_errors import Trouble, room_for
from trainhouse.server.store import LeaseLost


def full(statement: str) -> OperationalError:
    return OperationalError(statement, {}, Exception("database or disk is full"))


def test_each_cause_is_said_once_without_a_traceback_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble(logging.getLogger("trainhouse.test"), "housekeeping")
    for error in (full("INSERT 1"), full("INSERT 2"), LeaseLost("lost"), OSError(errno.ENOSPC, "full")):
        trouble.failed(error)
    for _ in range(2):
        trouble.passed()
    failed = "housekeeping failed, and is tried again"
    assert caplog.messages == [
        f"{failed}: database or disk is full",
        f"{failed}: lost",
        f"{failed}: [Errno {errno.ENOSPC}] full",
        "housekeeping succeeds again",
    ]
    assert all(record.exc_info is None for record in caplog.records)


def test_what_nobody_foresaw_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    Trouble(logging.getLogger("trainhouse.test"), "housekeeping").failed(KeyError("a"))
    assert caplog.records[0].exc_info is not None and "KeyError" in caplog.text


def test_a_save_without_room_says_so_and_other_errors_stay_what_they_are() -> None:
    words = "the checkpoint was not saved, since the server's disk is full"
    with pytest.raises(OperationError, match=words), room_for("the checkpoint was"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), room_for("the checkpoint was"):
        raise FileNotFoundError(errno.ENOENT, "gone")
