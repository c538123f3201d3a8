"""A directory that two machines are to share: whether they do is found out by a file."""

import os
from pathlib import Path

import pytest
from trainhouse.workers.protocol import shared_fs as landmark
from trainhouse.workers.protocol.shared_fs import Landmark


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landmark, "_SECONDS", 0.0)


def test_a_directory_that_is_shared_is_known_by_what_was_left_there(tmp_path: Path) -> None:
    left = Landmark.left_in(str(tmp_path / "made" / "anew"))
    assert left.trouble() is None
    left.remove()
    assert list((tmp_path / "made" / "anew").iterdir()) == []
    left.remove()


def test_one_that_is_not_is_told_with_the_reason(tmp_path: Path) -> None:
    left = Landmark.left_in(str(tmp_path))
    assert "something else at that path" in str(Landmark(left.path, "other words").trouble())
    left.remove()
    assert "what was just written there is not to be found" in str(left.trouble())
    assert "is not to be read and written (Not a directory)" in str(Landmark(f"{__file__}/landmark", "x").trouble())
    if os.geteuid():
        left = Landmark.left_in(str(tmp_path))
        tmp_path.chmod(0o500)
        assert "is not to be read and written (Permission denied)" in str(left.trouble())
