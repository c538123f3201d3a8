"""The core works without each of its plugins: its tests pass in a copy of the tree that lacks their folders."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .test_architecture import PLUGINS, ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TRAINS_AND_SAMPLES = "tests/acceptance/test_official_sdk.py"
TESTS = {
    "planner": ("tests/workers/worker/test_worker.py", "tests/workers/scheduler", "tests/server/serving"),
    "formats": ("tests/workers/worker/test_worker.py", "tests/workers/shapes", "tests/workers/scheduler"),
}
"""The core's tests that are nearest to the plugin's rows, run with those of the SDK."""


def without(plugin: str, directory: Path) -> Path:
    """Returns a copy of the tree without the plugin's folders and the tests of these."""
    copy = directory / "trainhouse"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    for folder in PLUGINS[plugin]:
        shutil.rmtree(copy / folder)
        shutil.rmtree(copy / "tests" / folder, ignore_errors=True)
    return copy


def test_auto_is_refused_without_the_planner(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    copy, model = without("planner", tmp_path), f"--base-model=m={tiny_models['qwen3']}"
    command = [sys.executable, "-m", "trainhouse.server", "serve", model, "--parallel=auto"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode and "--parallel auto needs the planner" in done.stderr, done.stderr


def test_a_packed_release_is_refused_without_the_formats(tmp_path: Path) -> None:
    copy = without("formats", tmp_path)
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    code = f"from trainhouse.workers.shapes.model_shape import refusal_of; print(refusal_of({config}))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, timeout=120
    )
    assert "by fp8 are not supported, because this installation is without workers/formats" in done.stdout, done.stderr


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_core_works_without(plugin: str, tmp_path: Path) -> None:
    copy = without(plugin, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not full and not slow", TRAINS_AND_SAMPLES, *TESTS[plugin]]
    done = subprocess.run(
        command, cwd=copy, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
