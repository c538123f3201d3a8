"""The weights of ephemeral samplers: there at every moment, of whichever save."""

import os
from pathlib import Path

import pytest
from trainhouse.server.sampling.ephemeral import EphemeralWeights

pytestmark = pytest.mark.anyio


async def save(weights: EphemeralWeights, content: str) -> None:
    async with weights.writing("run:inflight") as staging:
        (staging / "file").write_text(content)


def saved(weights: EphemeralWeights) -> str:
    return (weights.directory("run:inflight") / "file").read_text()


async def test_between_two_saves_there_is_no_moment_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, seen, rename = EphemeralWeights(tmp_path), [], os.rename

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        seen.append(saved(EphemeralWeights(tmp_path)))  # as a process that starts now, after a kill, finds them

    await save(weights, "0")
    before = weights.directory("run:inflight")
    monkeypatch.setattr(os, "rename", renamed)
    await save(weights, "1")
    assert seen and set(seen) <= {"0", "1"} and saved(weights) == "1"
    assert (before / "file").read_text() == "0", "somebody may be reading it"
    await save(weights, "2")
    assert saved(weights) == "2" and not before.exists()


async def test_a_save_that_was_cut_off_leaves_what_was_there(tmp_path: Path) -> None:
    weights = EphemeralWeights(tmp_path)
    assert not weights.has("run:inflight") and not weights.has(None)
    await save(weights, "0")
    with pytest.raises(RuntimeError):
        async with weights.writing("run:inflight") as staging:
            (staging / "file").write_text("1")
            raise RuntimeError
    assert weights.has("run:inflight") and saved(weights) == "0"
    await weights.sweep({"run:inflight"})
    assert os.listdir(tmp_path) == ["run_inflight"]
    await weights.sweep(())
    assert not weights.has("run:inflight")


async def test_weights_of_the_earlier_layout_are_taken_over(tmp_path: Path) -> None:
    (tmp_path / "run_inflight").mkdir()
    (tmp_path / "run_inflight" / "file").write_text("0")
    for _ in range(2):
        weights = EphemeralWeights(tmp_path)
        assert weights.has("run:inflight")
        await weights.sweep({"run:inflight"})
        assert saved(weights) == "0"
    await save(weights, "1")
    assert saved(weights) == "1"
