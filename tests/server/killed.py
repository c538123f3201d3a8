"""Runs an action on checkpoints over and over, each time in a process that ends by kill -9 one step later.

A step is a call that changes a file below the state directory or at a URL, an fsync, or a commit of the database: the
process ends right before it, and also right after a commit. Prints the number of steps.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import ParamSpec, TypeVar

from sqlalchemy import Connection
from trainhouse.server.checkpoints.checkpoints import Checkpoints
from trainhouse.server.checkpoints.copies import copy_checkpoint
from trainhouse.server.files.remote_directory import RemoteDirectory
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.store import DATABASE_NAME, SessionRecord, SqliteStore
from trainhouse.server.tenants.auth import Auth, Tenant

CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.utime"}
FIRST, SECOND = b"first", b"second"

P = ParamSpec("P")
T = TypeVar("T")
Action = Callable[[Checkpoints, SqliteStore], Awaitable[None]]


async def save(checkpoints: Checkpoints, store: SqliteStore, content: bytes = SECOND, overwrite: bool = False) -> None:
    (run_id,) = await store.runs.list_ids()
    run = await store.runs.get(run_id)
    assert run is not None
    async with checkpoints.writing(run, "weights", "a", overwrite) as staging:
        (staging / "adapter_model.safetensors").write_bytes(content)
        (staging / "optimizer.safetensors").write_bytes(content)


async def save_twice(checkpoints: Checkpoints, store: SqliteStore) -> None:
    await save(checkpoints, store, FIRST)
    await save(checkpoints, store, SECOND, overwrite=True)


async def save_and_delete(checkpoints: Checkpoints, store: SqliteStore) -> None:
    await save(checkpoints, store)
    (run_id,) = await store.runs.list_ids()
    record = await checkpoints.find(f"tinker://{run_id}/weights/a")
    assert record is not None
    await checkpoints.delete(record)


async def save_and_copy(checkpoints: Checkpoints, store: SqliteStore) -> None:
    await save(checkpoints, store)
    (run_id,) = await store.runs.list_ids()
    record = await checkpoints.find(f"tinker://{run_id}/weights/a")
    assert record is not None
    session = SessionRecord("copied", record.tenant_id, 1.0, 1.0, finished_at=1.0, end="success")
    await copy_checkpoint(checkpoints, record, session, None)
    await checkpoints.resolve(Tenant(record.tenant_id, ""), "tinker://copied:train:0/weights/a")


async def save_mirror_and_delete(checkpoints: Checkpoints, store: SqliteStore) -> None:
    await save(checkpoints, store)
    while await store.copies.list_unfinished():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    (run_id,) = await store.runs.list_ids()
    record = await checkpoints.find(f"tinker://{run_id}/weights/a")
    assert record is not None
    await checkpoints.delete(record)
    while await store.copies.list_in([record.directory]):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


ACTIONS: dict[str, Action] = {
    "save_mirror_and_delete": save_mirror_and_delete,
    "save": save,
    "save_twice": save_twice,
    "save_and_delete": save_and_delete,
    "save_and_copy": save_and_copy,
}


def mirror_of(state_dir: Path) -> str:
    return f"file://{state_dir}-mirror"


async def act(action: Action, state_dir: Path, place: str | None, steps: "Steps") -> None:
    store = SqliteStore(state_dir / DATABASE_NAME)
    mirrors = (mirror_of(state_dir),) if action is save_mirror_and_delete else ()
    checkpoints = Checkpoints(store, Auth(store, True), state_dir, config=CheckpointStorageConfig(place, mirrors))
    await checkpoints.start()
    steps.watch(state_dir)
    await action(checkpoints, store)
    await checkpoints.close()
    store.close()


class Steps:
    """Kills the process right before the step with number `last`, counted from 0."""

    def __init__(self, last: int) -> None:
        self._left = last

    def step(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def watch(self, state_dir: Path) -> None:
        below = str(state_dir)

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            is_write = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+")
            if (is_write or event in CHANGES) and str(arguments[0]).startswith(below):
                self.step()

        sys.addaudithook(hook)
        os.fsync = self._stepping(os.fsync)
        for name in ("put", "write", "copy", "remove"):
            setattr(RemoteDirectory, name, self._stepping(getattr(RemoteDirectory, name)))
        write = SqliteStore.write

        async def stepping(store: SqliteStore, statements: Callable[[Connection], T]) -> T:
            self.step()
            answer = await write(store, statements)
            self.step()
            return answer

        SqliteStore.write = stepping

    def _stepping(self, call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def stepping(*arguments: P.args, **named: P.kwargs) -> T:
            self.step()
            return call(*arguments, **named)

        return stepping


def main(action: str, base: Path, place: str | None) -> None:
    for number in count():
        state_dir = base.with_name(f"{number:03d}")
        shutil.copytree(base, state_dir)
        own_place = place and f"{place}/{number:03d}"
        pid = os.fork()
        if pid == 0:
            asyncio.run(act(ACTIONS[action], state_dir, own_place, Steps(number)))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert status == 0, f"the action failed with status {status}"
            print(number)
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
