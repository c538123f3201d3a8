"""A file shows if two machines share a directory."""

import os
from pathlib import Path

import pytest
from trainhouse.workers.protocol import shared_fs
from trainhouse.workers.protocol.shared_fs import SharedFileProbe


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_fs, "_SECONDS", 0.0)


def test_shared_directory_is_recognized_by_the_file_left_there(tmp_path: Path) -> None:
    left = SharedFileProbe.write_into(str(tmp_path / "made" / "new"))
    assert left.find_problem() is None
    left.remove()
    assert list((tmp_path / "made" / "new").iterdir()) == []
    left.remove()


def test_unshared_directory_is_reported_with_the_reason(tmp_path: Path) -> None:
    left = SharedFileProbe.write_into(str(tmp_path))
    assert "has other contents" in str(SharedFileProbe(left.path, "other words").find_problem())
    left.remove()
    assert "the file just written there was not found" in str(left.find_problem())
    assert "cannot be read and written (Not a directory)" in str(
        SharedFileProbe(f"{__file__}/probe", "x").find_problem()
    )
    if os.geteuid():
        left = SharedFileProbe.write_into(str(tmp_path))
        tmp_path.chmod(0o500)
        assert "cannot be read and written (Permission denied)" in str(left.find_problem())
