"""One server holds a state directory, even if files in it are removed meanwhile."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from trainhouse.schemas.errors import RequestError
from trainhouse.server.files.state_lock import StartError, StateLockLost, locked_state_directory
from trainhouse.server.journal.journal import Header, Journal

pytestmark = pytest.mark.anyio

HEADER = Header("optim_step", "tenant", "r", 1, "r:1")


def remove_lock(state: Path) -> None:
    (state / "server.lock").unlink()


def test_removing_the_lock_file_admits_no_second_server(tmp_path: Path) -> None:
    with locked_state_directory(tmp_path) as lock:
        with pytest.raises(StartError, match=f"process id {os.getpid()}"), locked_state_directory(tmp_path):
            pass
        remove_lock(tmp_path)
        for _ in range(2):
            with pytest.raises(StartError, match=r"whose server\.lock was removed"), locked_state_directory(tmp_path):
                pass
            remove_lock(tmp_path)
        lock.check()
        assert (tmp_path / "server.lock").read_text() == f"{os.getpid()}\n"
    with locked_state_directory(tmp_path):
        pass


@pytest.fixture
def no_directory_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes locks of directories fail, as on NFS."""
    flock = fcntl.flock

    def flock_of_nfs(file, operation: int) -> None:
        if isinstance(file, int):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)


@pytest.mark.usefixtures("no_directory_locks")
async def test_without_directory_locks_a_removed_lock_file_is_recreated(
    tmp_path: Path,
) -> None:
    with locked_state_directory(tmp_path) as lock:
        journal = Journal(tmp_path / "journal", 1 << 20, guard=lock.check)
        await journal.append(HEADER)
        remove_lock(tmp_path)
        await journal.append(HEADER)
        with pytest.raises(StartError, match=f"process id {os.getpid()}"), locked_state_directory(tmp_path):
            pass
        await journal.close()


@pytest.mark.usefixtures("no_directory_locks")
async def test_without_directory_locks_the_slower_server_accepts_nothing(tmp_path: Path) -> None:
    with locked_state_directory(tmp_path) as lock:
        journal = Journal(tmp_path / "journal", 1 << 20, guard=lock.check)
        await journal.append(HEADER)
        remove_lock(tmp_path)
        with locked_state_directory(tmp_path):
            with pytest.raises(RequestError, match="taken from this server, by the server with process id"):
                await journal.append(HEADER)
            assert "taken from this server" in (await journal.check_writable() or "")
        await journal.append(HEADER)
        await journal.close()


def test_a_replaced_state_directory_is_not_written_to(tmp_path: Path) -> None:
    with locked_state_directory(tmp_path / "state") as lock:
        (tmp_path / "state").rename(tmp_path / "before")
        with pytest.raises(StateLockLost, match="is no longer the directory"):
            lock.check()
        with locked_state_directory(tmp_path / "state"), pytest.raises(StateLockLost):
            lock.check()
    assert list((tmp_path / "state").iterdir()) == [tmp_path / "state" / "server.lock"]
