"""Only the server's own user can read its files, even in directories that were open to all before."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from trainhouse.server.cli.commands import main
from trainhouse.server.files.state_lock import STATE_PATTERNS, StartError, keep_private

from ...live import live_server
from ..real import MODEL, sample_body
from ..runs.test_restart import DATA, Client


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(*roots: Path) -> list[str]:
    """Skips what vanishes meanwhile, such as staging directories of a running server."""
    found = []
    for path in (path for root in roots for path in (root, *root.rglob("*"))):
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            found += [f"{path} {stat.filemode(mode)}"] if mode & 0o077 and not stat.S_ISLNK(mode) else []
    return found


def open_up(*roots: Path) -> None:
    """Makes everything readable by all users, as an earlier version left it."""
    for path in (path for root in roots for path in (root, *root.rglob("*"))):
        path.chmod(0o755 if path.is_dir() else 0o644)


def write_every_kind_of_file(client: Client) -> None:
    session_id = client.post("create_session", {"sdk_version": "0"})["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    model_id = client.post("create_model", create)["model_id"]
    assert client.post("forward_backward", {"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy"})["metrics"]
    assert client.post("optim_step", {"model_id": model_id})["metrics"]
    saved = client.post("save_weights", {"model_id": model_id, "path": "a"})["path"]
    sampler = client.post("save_weights_for_sampler", {"model_id": model_id, "sampling_session_seq_id": 3})
    body = sample_body(sampler["sampling_session_id"], record_stability_info=True)
    assert client.post("sample", body)["sequences"]
    assert client.post("load_weights", {"model_id": model_id, "path": saved})["status"] == 200
    assert client.post("copy_weights", {"source_path": saved})["status"] == 200


@pytest.mark.slow
def test_other_users_cannot_read_a_servers_files(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    state, checkpoints, mirror, backup = [tmp_path / name for name in ("state", "checkpoints", "mirror", "backup")]
    for directory in (state, checkpoints, mirror, backup):
        directory.mkdir(mode=0o755)
    places = {"checkpoints": str(checkpoints), "mirror": f"file://{mirror}", "snapshot_steps": 1}
    with live_server({MODEL: tiny_models["qwen3"]}, state, **places) as server:
        write_every_kind_of_file(Client(server))
        assert main(["backup", "--state-dir", str(state), str(backup)]) == 0
        (state / "ready").unlink()  # only the URL, which others may wait for
        assert open_to_others(state, checkpoints, backup) == []
    assert {path.name for path in state.iterdir()} >= {"trainhouse.db", "journal", "results", "snapshots", "ephemeral"}
    assert list(mirror.iterdir()) and list(backup.rglob("*.segment"))
    assert open_to_others(state, checkpoints, backup, *mirror.iterdir()) == []

    open_up(state, checkpoints)
    assert len(open_to_others(state, checkpoints)) > 20, "the control"
    with live_server({MODEL: tiny_models["qwen3"]}, state, **places) as server:
        (state / "ready").unlink()
        assert open_to_others(state, checkpoints) == []
        assert f"{state} could be read by other users (mode 755)" in server.log_tail()


def test_creating_a_key_makes_the_directory_private(tmp_path: Path) -> None:
    for state in (tmp_path / "new", tmp_path / "old"):
        if state.name == "old":
            state.mkdir(mode=0o755)
            (state / "another.txt").touch(mode=0o644)
        assert main(["keys", "create", "team", "--state-dir", str(state)]) == 0
        assert open_to_others(state) == ([f"{state}/another.txt -rw-r--r--"] if state.name == "old" else [])


@pytest.mark.parametrize("raises", [True, False], ids=["refused", "without effect"])
def test_a_directory_whose_mode_cannot_be_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    def chmod(self: Path, mode: int) -> None:
        if raises:
            raise PermissionError(1, "Operation not permitted")

    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    monkeypatch.setattr(Path, "chmod", chmod)
    with pytest.raises(StartError, match=rf"\(mode 755\).*`chmod 700 {state}` as its owner, or give a directory in it"):
        keep_private(state, STATE_PATTERNS)
    (state / "inner").mkdir(mode=0o700)
    keep_private(state / "inner", STATE_PATTERNS)
    keep_private(state / "missing", STATE_PATTERNS)


def test_a_directory_shared_by_all_users_is_refused_unchanged(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(StartError, match=r"by all users of this machine .mode 1777.: give a directory in it"):
        keep_private(tmp_path, STATE_PATTERNS)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
