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
    """A tmpfs of its own, mounted there."""
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
    """Full to the last byte, but for `leaving`, until it is left.

    Yields what keeps it full for so many seconds: of a snapshot that fails, say, the files are removed, and a fast
    script would come to its end in their room.
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
