"""Durability: files, their names and their directories are synced to disk when the option requires it."""

import os
from pathlib import Path

import pytest
from trainhouse.server.files.directories import STAGING
from trainhouse.server.files.state_lock import created_state_directory
from trainhouse.workers.dispatch import WorkerDispatch

from ..api import DRAFTS
from ..journal.test_futures import wait_until
from ..real import MODEL, batch, running_server, sample, sample_body, server_config

pytestmark = pytest.mark.anyio

KEPT = ("journal", "results", "recordings", "snapshots", "loaded", "ephemeral", "checkpoints")


class Disk:
    """Records what would survive a power cut: the sizes of files and the names in directories, by inode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sizes: dict[int, int] = {}
        self._names: dict[int, set[str]] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, handle: int) -> None:
        self._fsync(handle)
        inode, path = os.fstat(handle).st_ino, Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self._names[inode] = set(os.listdir(path))
        else:
            self._sizes[inode] = os.fstat(handle).st_size

    def has_synced(self, path: Path) -> bool:
        """True if the file itself and its name in the parent directory are synced."""
        stat = path.stat()
        is_itself = path.is_dir() or self._sizes.get(stat.st_ino) == stat.st_size
        return is_itself and path.name in self._names.get(path.parent.stat().st_ino, ())


@pytest.mark.parametrize("durability", ["power", "process"])
async def test_durability_decides_what_a_run_leaves_on_disk(
    dispatch: WorkerDispatch,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
) -> None:
    disk, top = Disk(monkeypatch), tmp_path / "new" / "state"
    config = server_config(tiny_models["qwen3"], top, durability=durability, snapshot_steps=1)
    with created_state_directory(top, sync=durability == "power"):
        async with running_server(config, dispatch) as server:
            run = await server.create_run()
            await run.train(batch(), 3)
            path = (await run.do("save_weights", path="a"))["path"]
            assert "error" not in await run.do("load_weights", path=path)
            saved = await run.do("save_weights_for_sampler", sampling_session_seq_id=0)
            await sample(server, sample_body(saved["sampling_session_id"], record_stability_info=True))
            assert list(top.glob("loaded/*_train_0/[0-9]*"))
            if DRAFTS:
                draft = {"model_role": "draft", "draft": {"algorithm": "eagle3"}, "target_path": path}
                body = {"session_id": run.session_id, "model_seq_id": 1, "base_model": MODEL} | draft
                assert "error" not in await server.result((await server.post("create_model", body))["request_id"])
                await wait_until(lambda: bool(list(top.glob("snapshots/*_train_1/[0-9]*"))))
                assert list(top.glob("loaded/*_train_1/*")), "its target"
    every = [path for name in KEPT for path in (top / name, *(top / name).rglob("*"))]
    left = [path for path in every if STAGING not in str(path)]  # of a snapshot that the stop interrupted
    lost = {path.relative_to(tmp_path).as_posix() for path in (top.parent, top, *left) if not disk.has_synced(path)}
    if durability == "power":
        assert lost == set()
    else:
        assert {"new", "new/state"} < lost and any("/journal/" in path for path in lost)
        assert not any("/checkpoints/" in path for path in lost), "checkpoints are always synced"
