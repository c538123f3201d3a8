"""Tests the GPU benchmark with a tiny model, on any device."""

import json
from pathlib import Path

import pytest

from ...benchmarks import gpu

# peft calls it in transformers, and torch's profiler warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning", "ignore:.*Profiler")


@pytest.mark.slow
def test_each_step_writes_its_figures(tmp_path: Path) -> None:
    gpu.main(["--model=tiny", "--rounds=1", f"--out={tmp_path}"])
    found = {step: json.loads((tmp_path / f"{step}-tiny.json").read_text()) for step in gpu.STEPS}
    assert all("torch" in figures["hardware"] and figures["seconds"] >= 0 for figures in found.values())
    assert found["train"]["16 tenants 1x64"]["tokens/s"] > 0 and found["decode"]["1 row"]["tokens/s"] > 0
    assert found["reference"]["train, tokens/s"]["ratio"] > 0
    assert (tmp_path / found["profiles"]["profile of train"]).read_text()


@pytest.mark.slow
def test_an_interrupted_step_keeps_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "read_model", cut_off)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--model=tiny", "--rounds=1", "--steps=peak,train", f"--out={tmp_path}"])
    assert json.loads((tmp_path / "peak-tiny.json").read_text())["product"]["TFLOP/s"] > 0
    assert list(json.loads((tmp_path / "train-tiny.json").read_text())) == ["hardware"]
