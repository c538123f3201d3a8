"""Special files in the place of a state's files hold up no command and no start, and give no traceback."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from trainhouse.server.store import DATABASE_NAME

from ...live import live_server
from ..real import MODEL
from .test_verify import only, stopped_state

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

__all__ = ["stopped_state"]

SECONDS = 120
DEEP = "[" * 200_000


@pytest.fixture
def state(stopped_state: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped_state, tmp_path / "state"))


def place_socket(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as one:  # names of sockets are short
        one.bind(path.name)


def place_everything(directory: Path) -> None:
    os.mkfifo(directory / "fifo")
    place_socket(directory / "socket")
    (directory / "loop").symlink_to("loop")
    (directory / "nowhere").symlink_to("nothing")
    (directory / "deep.json").write_text(DEEP)


def trainhouse(*arguments: str) -> tuple[int, str]:
    """Returns the exit status and what was printed."""
    command = [sys.executable, "-m", "trainhouse.server", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    printed = ended.stdout + ended.stderr
    assert "Traceback" not in printed, printed
    return ended.returncode, printed


def directories(state: Path) -> Iterator[Path]:
    """Yields those of all depths, the one of weights that are sampled after the start last."""
    yield state
    yield from sorted(path for path in state.rglob("*") if path.is_dir())


def test_commands_and_start_pass_what_is_no_file(state: Path, tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    snapshot = sorted(state.glob("snapshots/*/*"))[-1]
    for directory in list(directories(state)):
        place_everything(directory)
    for name in ("journal", "results", "recordings"):
        (state / name / "00000099.segment").mkdir()
    for name in ("trainhouse.json", "manifest.json"):
        only(state, f"checkpoints/*/weights/a*/{name}").write_text(DEEP)
    (snapshot / "manifest.json").unlink()
    os.mkfifo(snapshot / "manifest.json")
    status, said = trainhouse("verify", f"--state-dir={state}")
    assert status == 1 and f"{snapshot}: " in said and "is damaged" in said, said
    assert trainhouse("backup", str(tmp_path / "copy"), f"--state-dir={state}")[0] in (0, 1)
    with live_server({MODEL: tiny_models["qwen3"]}, state) as server:
        assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text()
    status, said = trainhouse("verify", "--repair", f"--state-dir={state}")
    assert "repaired: removed" in said, said


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (DATABASE_NAME, os.mkfifo),
        (f"{DATABASE_NAME}-wal", Path.mkdir),
        (f"{DATABASE_NAME}-shm", os.mkfifo),
        ("url_secret", os.mkfifo),
        ("server.lock", lambda path: path.symlink_to(path.name)),
    ],
)
def test_a_file_of_the_state_that_is_none_is_named(
    state: Path, tmp_path: Path, tiny_models: dict[str, Path], name: str, place: Callable[[Path], object]
) -> None:
    (state / name).unlink(missing_ok=True)
    place(state / name)
    ends = [trainhouse(*each, f"--state-dir={state}") for each in (["verify"], ["backup", str(tmp_path / "copy")])]
    try:
        with live_server({MODEL: tiny_models["qwen3"]}, state) as server:
            ends.append((0, server.log.read_text()))
    except RuntimeError as error:
        ends.append((1, str(error)))
    for status, said in ends:
        assert "Traceback" not in said and (status == 0 or str(state) in said), said
