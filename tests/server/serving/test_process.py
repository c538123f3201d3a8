"""The server's process: open files, cleanup after a failed start, and exit."""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from trainhouse.server.cli.commands import main
from trainhouse.server.serving.app import create_app
from trainhouse.server.serving.server_process import allow_many_connections
from trainhouse.server.store import DATABASE_NAME, DatabaseUnreachable, StoreConfig, open_store
from trainhouse.server.store.database.database_errors import OUTAGE_ERRORS
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import server_config


def test_a_low_limit_of_open_files_is_raised_and_a_high_one_left_alone() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 1 << 16 if hard == resource.RLIM_INFINITY else min(1 << 16, hard)
    try:
        for before, after in ((512, enough), (enough, enough), (hard, hard)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
            allow_many_connections()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (after, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.anyio
async def test_a_failed_start_leaves_no_store_open(tmp_path: Path) -> None:
    """A standby retries in the same process."""

    def store_handles() -> list[str]:
        open_files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("store-")]
        return threads + [name for name in open_files if DATABASE_NAME in name]

    config = server_config(tmp_path, tmp_path / "state")
    config.store.state_dir.mkdir()
    (config.store.state_dir / "journal").write_text("no directory can be here")
    app, before = create_app(config, WorkerDispatch(config.dispatch_config())), store_handles()
    with pytest.raises(FileExistsError):
        async with app.router.lifespan_context(app):
            pass
    assert (config.store.state_dir / DATABASE_NAME).exists() and store_handles() == before


def test_an_unreachable_database_is_an_outage_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A standby retries after an outage; a ValueError would end it."""
    url = "postgresql+psycopg://me:geheim@127.0.0.1:1/d"
    with pytest.raises(DatabaseUnreachable, match="cannot be used: ") as away:
        open_store(StoreConfig(tmp_path, url))
    assert isinstance(away.value, OUTAGE_ERRORS) and "geheim" not in str(away.value)
    with pytest.raises(ValueError, match="cannot be used: "):
        open_store(StoreConfig(tmp_path, f"{url}?connect_timeout=x"))
    assert main(["keys", "list", "--database-url", url]) == 1
    assert "trainhouse keys: error: postgresql+psycopg://me:***@127.0.0.1" in capsys.readouterr().err


_HANGING = """
import threading
from trainhouse.server.serving import server_process as process
process._LEAVING_SECONDS = 0.1
with process.bounded_exit():
    threading.Thread(target=threading.Event().wait).start()
    raise RuntimeError("it led once")
"""


def test_a_hanging_thread_does_not_keep_a_failed_process_alive() -> None:
    ended = subprocess.run([sys.executable, "-c", _HANGING], timeout=60, check=False, capture_output=True, text=True)
    assert ended.returncode == 1 and "it led once" in ended.stderr
