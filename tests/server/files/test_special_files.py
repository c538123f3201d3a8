"""FIFOs, and deeply nested JSON, in the files of a state: reading them waits forever or ends the reader."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from trainhouse.schemas.bounds import load_json
from trainhouse.server.checkpoints.download_urls import load_secret
from trainhouse.server.files.directories import read_regular, remove_tree, sweep_runs, sync_files
from trainhouse.server.files.manifest import MANIFEST, ManifestMismatch, check_directory, write_manifest
from trainhouse.server.files.segment import Damage, complete_bytes, scan_segment
from trainhouse.server.journal.restore_marker import RestoreMarker

DEEP = "[" * 1_000_000


def replace_by_fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def test_a_fifo_is_not_read_as_a_file(tmp_path: Path) -> None:
    fifo = replace_by_fifo(tmp_path / "file")
    reads: list[Callable[[], object]] = [
        lambda: read_regular(fifo),
        lambda: load_secret(fifo),
        lambda: sync_files(tmp_path),
    ]
    for read in reads:
        with pytest.raises(OSError, match="not a regular file"):
            read()
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(Path("/dev/zero"))
    (tmp_path / "plain").write_bytes(b"content")
    assert read_regular(tmp_path / "plain") == b"content"


@pytest.mark.parametrize("name", ["weights", MANIFEST])
def test_a_directory_with_a_fifo_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / "weights").touch()
    write_manifest(tmp_path, {})
    check_directory(tmp_path)
    replace_by_fifo(tmp_path / name)
    with pytest.raises(ManifestMismatch, match=f"{name}.* cannot be read"):
        check_directory(tmp_path)


def test_a_fifo_is_no_segment(tmp_path: Path) -> None:
    fifo = replace_by_fifo(tmp_path / "0000000000000001.segment")
    assert complete_bytes(fifo) is None
    assert [isinstance(each, Damage) for each in scan_segment(fifo)] == [True]


def test_whatever_has_the_name_of_a_directory_is_removed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "file").touch()
    replace_by_fifo(tmp_path / "whole" / "fifo")
    replace_by_fifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "link").symlink_to(kept)
    for name in ("whole", "fifo", "file", "loop", "link"):
        remove_tree(tmp_path / name)
        remove_tree(tmp_path / name, ignore_errors=True)
        with pytest.raises(FileNotFoundError):
            remove_tree(tmp_path / name)
    assert list(tmp_path.iterdir()) == [kept]
    replace_by_fifo(tmp_path / "left-by-a-crash")
    sweep_runs(tmp_path, {"kept"})
    assert list(tmp_path.iterdir()) == [kept]


def test_nested_json_is_damage(tmp_path: Path) -> None:
    for text in (DEEP, DEEP.encode(), '{"a":' * 100_000):
        with pytest.raises(json.JSONDecodeError, match="nested too deeply"):
            load_json(text)
    (tmp_path / "weights").touch()
    write_manifest(tmp_path, {})
    (tmp_path / MANIFEST).write_text(DEEP)
    with pytest.raises(ManifestMismatch, match="not the JSON of a manifest"):
        check_directory(tmp_path)
    (tmp_path / MANIFEST).unlink()
    (tmp_path / "copied.json").write_text(DEEP)
    assert RestoreMarker(tmp_path).copied_at, "damaged: as if no run had continued since the copy"
