"""Does what docs/quickstart.md says, in an empty directory with an environment of its own, and compares the outputs.

`pytest -s` prints the time to the first sample of a trained adapter.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from .blocks import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "quickstart.md"
INSTALL_SECONDS = 2400
SECOND_TERMINAL = "in a second terminal: source env/bin/activate"


@dataclass
class Terminal:
    """Runs commands one after the other in a directory, each with the environment that `activate` gives it."""

    directory: Path

    def start(self, script: str, output: Path) -> subprocess.Popen[bytes]:
        activate = "[ ! -f env/bin/activate ] || source env/bin/activate\n"
        # Not those of the test's environment: a program of the same name there must not be found.
        kept = {name: each for name, each in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        with output.open("wb") as stream:
            return subprocess.Popen(
                ["bash", "-c", f"set -eo pipefail\n{activate}{script}"],
                cwd=self.directory,
                env=kept | {"PYTHONUNBUFFERED": "1", "PATH": f"/usr/local/bin:/usr/bin:/bin:{python_directory()}"},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, script: str) -> str:
        output = self.directory / ".output"
        process = self.start(script, output)
        try:
            status = process.wait(INSTALL_SECONDS)
        finally:
            end(process)
        assert status == 0, f"{script}: {output.read_text()}"
        return output.read_text()

    @contextmanager
    def running(self, script: str, promised: str) -> Iterator[None]:
        """Runs the command in another terminal, from when it has printed what is promised."""
        output = self.directory / ".second"
        process = self.start(f"exec {script}", output)
        try:
            deadline = time.monotonic() + 300
            while not matches(promised, output.read_text()):
                assert process.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.1)
            yield
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs; with its children if it does not end by itself."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def python_directory() -> Path:
    """Returns the directory of the Python with which the test's environment was made."""
    return Path(sys.base_prefix) / "bin"


def matches(promised: str, output: str) -> bool:
    """True if each promised line, in this order, is in the output; ... stands for any text."""
    patterns = (".*".join(map(re.escape, line.split("..."))) for line in promised.splitlines())
    return re.search(".*".join(patterns), output, re.DOTALL) is not None


def title(block: Block) -> str | None:
    line = PAGE.read_text().splitlines()[block.line - 2]
    found = re.search(r'title="(.*)"', line)
    return found and found[1]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_quickstart_keeps_its_promises_in_an_empty_directory(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 8000))  # raises if it is in use
    directory = tmp_path / "first"
    directory.mkdir()
    copy_checkout(tmp_path / "trainhouse")
    terminal, began, num_compared = Terminal(directory), time.monotonic(), 0
    with ExitStack() as stack:
        for block, after in pairwise([*blocks_of(PAGE), None]):
            promised = after.text if after and after.language == "text" else ""
            if block.language == "python":
                (directory / str(title(block))).write_text(block.text)
            elif title(block) == SECOND_TERMINAL:
                stack.enter_context(terminal.running(block.text, promised))
                num_compared += 1
            elif block.language == "bash":
                output = terminal.run(block.text)
                assert matches(promised, output), f"{block.text}{output}"
                num_compared += bool(promised)
            if block.language != "text":
                print(f"{time.monotonic() - began:6.0f} s: {block.text.splitlines()[-1]}", flush=True)
    assert num_compared == 5


def copy_checkout(target: Path) -> None:
    """Copies the files of the checkout, without what git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def test_promised_output_is_compared() -> None:
    assert matches("step 0: loss ...\nOur cat", "step 0: loss 3\nstep 1: loss 2\nOur cat is")
    assert not matches("step 1\nstep 0", "step 0\nstep 1\n") and not matches("a", "b")
