"""The README's commands and links work."""

import os
import re
import subprocess
import sys
from pathlib import Path

from .live import LiveServer

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_client_example_runs_and_its_loss_falls(shared_server: LiveServer) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 14
    code = code.replace("http://127.0.0.1:8000", shared_server.url).replace(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "tiny/chat"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()[:10]]
    assert losses[-1] < losses[0]


def test_make_targets_and_linked_files_exist() -> None:
    root = Path(__file__).resolve().parent.parent
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z][a-z-]*)", README)) - {"lint"} <= targets
    for path in re.findall(r"\]\(([^)]+)\)", README):
        assert (root / path.partition("#")[0]).exists(), path
