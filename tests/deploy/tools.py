"""The programs that check deploy/, which `make deploy-tools` installs in an environment of their own."""

import os
import subprocess
from pathlib import Path

import pytest

from ..unit import ROOT

DEPLOY = ROOT / "deploy"
_TOOLS = Path(os.environ.get("TRAINHOUSE_DEPLOY_TOOLS", ROOT / ".venv-deploy"))


def tool(name: str) -> Path:
    """Returns the path of a program; skips the test if it is not installed."""
    places = (_TOOLS / "bin" / name, _TOOLS / "prometheus" / "usr" / "bin" / name)
    path = next((place for place in places if place.exists()), None)
    if path is None:
        pytest.skip(f"{name} is not installed: run make deploy-tools")
    return path


def passes(*command: str | Path, cwd: Path | None = None) -> bool:
    """Runs a check and prints what it says. Returns whether it passes."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    print(done.stdout, done.stderr)
    return done.returncode == 0
