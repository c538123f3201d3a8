"""One server holds a state directory, whatever is removed from it meanwhile."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from trainhouse.schemas.errors import RequestError
from trainhouse.server.journal.journal import Header, Journal
from trainhouse.server.replication.state_lock import ClaimLost, StartError, locked

pytestmark = pytest.mark.anyio

HEADER = Header("optim_step", "tenant", "r", 1, "r:1")


def remove(state: Path) -> None:
    (state / "server.lock").unlink()


def test_who_removes_the_lock_lets_no_second_server_in(tmp_path: Path) -> None:
    with locked(tmp_path) as claim:
        with pytest.raises(StartError, match=f"process id {os.getpid()}"), locked(tmp_path):
            pass
        remove(tmp_path)
        for _ in range(2):
            with pytest.raises(StartError, match=r"whose server\.lock somebody has removed"), locked(tmp_path):
                pass
            remove(tmp_path)
        claim.check()
        assert (tmp_path / "server.lock").read_text() == f"{os.getpid()}\n"
    with locked(tmp_path):
        pass


@pytest.fixture
def no_locks_of_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""
    flock = fcntl.flock

    def flock_of_nfs(file, operation: int) -> None:
        if isinstance(file, int):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)


@pytest.mark.usefixtures("no_locks_of_directories")
async def test_where_directories_cannot_be_locked_a_server_whose_lock_was_removed_takes_it_again(
    tmp_path: Path,
) -> None:
    with locked(tmp_path) as claim:
        journal = Journal(tmp_path / "journal", 1 << 20, guard=claim.check)
        await journal.append(HEADER)
        remove(tmp_path)
        await journal.append(HEADER)
        with pytest.raises(StartError, match=f"process id {os.getpid()}"), locked(tmp_path):
            pass
        await journal.close()


@pytest.mark.usefixtures("no_locks_of_directories")
async def test_where_directories_cannot_be_locked_a_server_that_was_slower_accepts_nothing(tmp_path: Path) -> None:
    with locked(tmp_path) as claim:
        journal = Journal(tmp_path / "journal", 1 << 20, guard=claim.check)
        await journal.append(HEADER)
        remove(tmp_path)
        with locked(tmp_path):
            with pytest.raises(RequestError, match="taken from this server, by the server with process id"):
                await journal.append(HEADER)
            assert "taken from this server" in (await journal.try_to_write() or "")
        await journal.append(HEADER)
        await journal.close()


def test_a_directory_in_place_of_the_one_that_is_held_is_not_written_to(tmp_path: Path) -> None:
    with locked(tmp_path / "state") as claim:
        (tmp_path / "state").rename(tmp_path / "before")
        with pytest.raises(ClaimLost, match="is not the directory any more"):
            claim.check()
        with locked(tmp_path / "state"), pytest.raises(ClaimLost):
            claim.check()
    assert list((tmp_path / "state").iterdir()) == [tmp_path / "state" / "server.lock"]
