"""A disk that is small enough to be filled."""

import subprocess
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
def filled(disk: Path, leaving: int = 0) -> Iterator[Callable[[], None]]:
    """Full to the last byte, but for `leaving`, until it is left.

    Yields what fills it again: of a snapshot that fails, say, the files are removed.
    """
    ballast = disk / "ballast"

    def fill() -> None:
        with ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(_PAGE))
            except OSError:
                file.truncate(file.tell() - leaving)

    try:
        fill()
        yield fill
    finally:
        ballast.unlink()
