"""Damages files as crashes, disks and cosmic rays do while no server runs."""

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from trainhouse.server.files.manifest import MANIFEST
from trainhouse.server.files.segment import scan_segment


def newest_segment(directory: Path) -> Path:
    return max(path for path in directory.glob("*.segment") if path.stat().st_size)


def append_half_a_record(segment: Path, drawn: random.Random) -> None:
    """Appends the beginning of a copy of the last record."""
    (*_, last) = scan_segment(segment)
    record = segment.read_bytes()[last.offset :]
    _append(segment, record[: drawn.randrange(1, len(record))])


def append_garbage(segment: Path, drawn: random.Random) -> None:
    _append(segment, drawn.randbytes(drawn.randrange(1, 5000)))


def append_zeros(segment: Path, drawn: random.Random) -> None:
    _append(segment, bytes(drawn.randrange(1, 5000)))


TEARS: Mapping[str, Callable[[Path, random.Random], None]] = {
    "half": append_half_a_record,
    "garbage": append_garbage,
    "zeros": append_zeros,
}
"""Ways to append to a segment what no client was answered for."""


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def snapshots_of_runs(state_dir: Path) -> list[list[Path]]:
    """Returns the complete snapshots of each run that has any, oldest first."""
    runs = [sorted(run.glob("[0-9]*"), key=lambda path: int(path.name)) for run in (state_dir / "snapshots").glob("*")]
    return [whole for run in runs if (whole := [path for path in run if (path / MANIFEST).exists()])]


def flip_a_byte(snapshot: Path, drawn: random.Random) -> None:
    path = _file_of(snapshot, drawn)
    content = bytearray(path.read_bytes())
    content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    path.write_bytes(content)


def remove_a_file(snapshot: Path, drawn: random.Random) -> None:
    _file_of(snapshot, drawn).unlink()


def cut_the_manifest(snapshot: Path, drawn: random.Random) -> None:
    manifest = snapshot / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[: drawn.randrange(manifest.stat().st_size)])


def remove_all(snapshot: Path, _: random.Random) -> None:
    shutil.rmtree(snapshot)


DAMAGES: Mapping[str, Callable[[Path, random.Random], None]] = {
    "byte": flip_a_byte,
    "file": remove_a_file,
    "manifest": cut_the_manifest,
    "directory": remove_all,
}


def _file_of(snapshot: Path, drawn: random.Random) -> Path:
    return drawn.choice(sorted(path for path in snapshot.iterdir() if path.name != MANIFEST and path.stat().st_size))
