"""Records the state directory that an older commit writes: python -m trainhouse.tests.upgrades.record COMMIT...

Its server is killed, so that the journal is needed. Run it before a change of a format: tests/upgrades/states has
one of each.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ..live import wait_until_ready
from ..unit import ROOT
from .scenario import MODEL, before_upgrade, fixed_model

STATES = Path(__file__).with_name("states")


def record(commit: str, directory: Path) -> Path:
    """Returns the archive: state/, and expected.json."""
    checkout = directory / "trainhouse"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", checkout, commit], cwd=ROOT, check=True)
    try:
        state, ready, log = directory / "state", directory / "ready", directory / "log"
        model = fixed_model(directory / "model")
        command = [sys.executable, "-m", "trainhouse.server", "serve", f"--base-model={MODEL}={model}", "--port=0"]
        command += [f"--state-dir={state}", f"--ready-file={ready}", "--threads=1"]
        environment = os.environ | {"PYTHONPATH": str(directory), "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            expected = before_upgrade(wait_until_ready(process, ready, log))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", checkout], cwd=ROOT, check=True)
    (directory / "expected.json").write_text(json.dumps(expected, indent=1))
    archive = STATES / f"{commit}.tar.xz"
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(state, "state")
        packed.add(directory / "expected.json", "expected.json")
    return archive


if __name__ == "__main__":
    for one in sys.argv[1:]:
        scratch = Path(tempfile.mkdtemp())
        try:
            print(record(one, scratch))
        finally:
            shutil.rmtree(scratch)
