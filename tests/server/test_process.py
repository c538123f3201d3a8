"""A server's process: what it asks of the system."""

import os
import resource
import threading
from pathlib import Path

import pytest
from trainhouse.server.app import create_app
from trainhouse.server.process import allow_many_connections
from trainhouse.server.store import DATABASE_NAME
from trainhouse.workers.dispatch import WorkerDispatch

from .real import server_config


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
async def test_a_server_that_cannot_open_its_parts_leaves_no_store_open(tmp_path: Path) -> None:
    """A standby tries that again, in the same process."""

    def left() -> list[str]:
        open_files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("store-")]
        return threads + [name for name in open_files if DATABASE_NAME in name]

    config = server_config(tmp_path, tmp_path / "state")
    config.state_dir.mkdir()
    (config.state_dir / "journal").write_text("no directory can be here")
    app, before = create_app(config, WorkerDispatch(config.dispatch_config())), left()
    with pytest.raises(FileExistsError):
        async with app.router.lifespan_context(app):
            pass
    assert (config.state_dir / DATABASE_NAME).exists() and left() == before
