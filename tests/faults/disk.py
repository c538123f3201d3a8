"""A disk that is small enough to be filled."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PAGE = 4096


@contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[Path]:
    """Mounts a tmpfs of `num_bytes` at the directory."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk takes privileges: run the tests under `unshare --map-root-user --mount`")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def filled(disk: Path, leaving: int = 0) -> Iterator[Callable[[float], None]]:
    """Fills the disk to the last byte, except for `leaving` bytes, until the block ends.

    Yields a function that keeps the disk full for so many seconds: a failed snapshot, for example, removes its files,
    and a fast script would finish in that space.
    """
    ballast = disk / "ballast"

    def fill() -> None:
        with ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(_PAGE))
            except OSError:
                file.truncate(file.tell() - leaving)

    def keep_full(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)
            fill()

    try:
        fill()
        yield keep_full
    finally:
        ballast.unlink()
