"""The weights of ephemeral samplers: complete at every moment, from one save or the next."""

import os
from pathlib import Path

import pytest
from trainhouse.server.sampling.ephemeral_weights import EphemeralWeights

pytestmark = pytest.mark.anyio


async def save(weights: EphemeralWeights, content: str) -> None:
    async with weights.writing("run:inflight") as staging:
        (staging / "file").write_text(content)


def saved_content(weights: EphemeralWeights) -> str:
    return (weights.directory("run:inflight") / "file").read_text()


async def test_weights_exist_at_every_moment_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, seen, rename = EphemeralWeights(tmp_path), [], os.rename

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        seen.append(saved_content(EphemeralWeights(tmp_path)))  # as a process that starts now, after a kill, finds them

    await save(weights, "0")
    before = weights.directory("run:inflight")
    monkeypatch.setattr(os, "rename", renamed)
    await save(weights, "1")
    assert seen and set(seen) <= {"0", "1"} and saved_content(weights) == "1"
    assert (before / "file").read_text() == "0", "a reader may still use it"
    await save(weights, "2")
    assert saved_content(weights) == "2" and not before.exists()


async def test_an_interrupted_save_keeps_the_earlier_weights(tmp_path: Path) -> None:
    weights = EphemeralWeights(tmp_path)
    assert not weights.has("run:inflight") and not weights.has(None)
    await save(weights, "0")
    with pytest.raises(RuntimeError):
        async with weights.writing("run:inflight") as staging:
            (staging / "file").write_text("1")
            raise RuntimeError
    assert weights.has("run:inflight") and saved_content(weights) == "0"
    await weights.remove_all_but({"run:inflight"})
    assert os.listdir(tmp_path) == ["run_inflight"]
    await weights.remove_all_but(())
    assert not weights.has("run:inflight")


async def test_weights_in_the_earlier_layout_are_still_read(tmp_path: Path) -> None:
    (tmp_path / "run_inflight").mkdir()
    (tmp_path / "run_inflight" / "file").write_text("0")
    for _ in range(2):
        weights = EphemeralWeights(tmp_path)
        assert weights.has("run:inflight")
        await weights.remove_all_but({"run:inflight"})
        assert saved_content(weights) == "0"
    await save(weights, "1")
    assert saved_content(weights) == "1"
