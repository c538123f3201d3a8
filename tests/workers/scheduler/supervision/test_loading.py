"""Tests that a model whose process is killed while it loads is loaded again, and the last error names the cause."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trainhouse.tests.workers.killed_loader import KILLED_LOADER, KILLS

from ...engines.test_sampler_groups import LLAMA
from ...test_dispatch import write_header

pytestmark = pytest.mark.slow

SCRIPT = """
import asyncio, sys
from pathlib import Path
from trainhouse.workers.protocol.worker_config import DispatchConfig, ServedModel, WorkerConfig
from trainhouse.workers.dispatch import WorkerDispatch

async def main():
    model = WorkerConfig(ServedModel("tiny", sys.argv[1]), device="cpu")
    dispatch = WorkerDispatch(DispatchConfig((model,), worker=sys.argv[2]))
    await dispatch.start(print)
    assert dispatch.pids("tiny") and dispatch.is_up("tiny")
    await dispatch.close()

asyncio.run(main())
"""


def start_dispatch(directory: Path, *kills: str) -> subprocess.CompletedProcess[str]:
    """Starts a dispatch in a new process, whose forkserver has not imported the worker."""
    write_header(directory, shape=(1000, 1000))
    shutil.copy(LLAMA, directory / "config.json")
    (directory / "kills").mkdir()
    for number, place in enumerate(kills):
        (directory / "kills" / f"{place}-{number}").touch()
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(directory), KILLED_LOADER]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={KILLS: str(directory / "kills")}, check=False
    )


@pytest.mark.parametrize("kills", [["load"], ["import"], ["import", "load", "load"]])
def test_a_model_killed_while_it_loads_is_loaded_again(kills: list[str], tmp_path: Path) -> None:
    finished = start_dispatch(tmp_path, *kills)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("tiny did not load: ") == len(kills) and "tiny ready in" in finished.stdout
    assert finished.stdout.count("the kernel's out-of-memory killer did") == len(kills)
    assert finished.stdout.count("loading it needs 4 MB of memory for its weights, and ") == len(kills)
    assert ("killed by SIGKILL" in finished.stdout) == ("load" in kills)
    assert ("the process that starts workers ended while it started one" in finished.stdout) == ("import" in kills)


def test_a_model_killed_each_time_fails_with_the_reason(tmp_path: Path) -> None:
    finished = start_dispatch(tmp_path, *["load"] * 9)
    assert finished.returncode == 1 and finished.stdout.count("trying again in") == 3
    assert f"ValueError: base model tiny does not load from {tmp_path}, tried 4 times: the worker died: killed by" in (
        finished.stderr
    )
    assert len(list((tmp_path / "kills").iterdir())) == 9 - 4
