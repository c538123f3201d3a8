"""A server process that a command starts, waits for and stops."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import CommandFailed

LOAD_SECONDS = 300
STOP_SECONDS = 20
_SHOWN_LINES = 20


@dataclass
class Server:
    """A server process that answers at `url`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raises CommandFailed if it has died."""
        if self.process.poll() is not None:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
            raise CommandFailed(f"the server ended with status {self.process.returncode}:\n{last}")


@contextmanager
def served(flags: Sequence[str], state_dir: Path) -> Iterator[Server]:
    """Yields a server with these flags of `serve`, once it is ready; its log is server.log in the state directory.
    Raises CommandFailed."""
    ready, log = state_dir / "ready", state_dir / "server.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "trainhouse.server", "serve", *flags, "--ready-file", str(ready)]
    with log.open("wb") as output, running(command, output.fileno()) as process:
        server = Server("", process, log)
        deadline = time.monotonic() + LOAD_SECONDS
        while not (ready.is_file() and (url := re.search(r"http://\S+", ready.read_text()))):
            server.check()
            if time.monotonic() > deadline:
                raise CommandFailed(f"the server is not ready after {LOAD_SECONDS} s: see {log}")
            time.sleep(0.1)
        server.url = url[0]
        yield server


@contextmanager
def running(command: list[str], output: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process in its own session, which Ctrl-C does not reach; leaving the block ends it."""
    errors = None if output is None else subprocess.STDOUT
    process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
    try:
        yield process
    finally:
        # An impatient second Ctrl-C must not leave it running.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.terminate()
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
