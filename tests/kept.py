"""`trainhouse workers` for tests: a process that keeps ranks, with its own secret, stopped by its process id."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .live import READY_SECONDS, flags_of, start, stop

SECRET = "kept-" + 40 * "s"


@dataclass(eq=False)
class Workers:
    address: str
    process: subprocess.Popen[bytes]
    log: Path
    secret_file: Path

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options of a server that attaches to these workers."""
        return {"workers": self.address, "workers_secret_file": self.secret_file}


@contextmanager
def kept_workers(
    models: Mapping[str, Path],
    directory: Path,
    listen: str = "127.0.0.1:0",
    below: Sequence[str] = (),
    **options: object,
) -> Iterator[Workers]:
    """below: prefix of the command. options: like those of live_server."""
    directory.mkdir(parents=True, exist_ok=True)
    log, ready, secret_file = (directory / name for name in ("workers.log", "workers.ready", "secret"))
    secret_file.touch(0o600)
    secret_file.write_text(SECRET)
    ready.unlink(missing_ok=True)
    flags = [f"--base-model={name}={model}" for name, model in models.items()]
    knobs = {"threads": 1, "listen": listen, "ready_file": ready, "workers_secret_file": secret_file} | dict(options)
    flags += flags_of(knobs)
    process = start([*below, sys.executable, "-m", "trainhouse.server", "workers", *flags], log)
    try:
        yield Workers(_address(process, ready, log), process, log, secret_file)
    finally:
        stop(process)


def _address(process: "subprocess.Popen[bytes]", ready: Path, log: Path) -> str:
    deadline = time.monotonic() + 2 * READY_SECONDS  # a Ray cluster takes longer
    while time.monotonic() < deadline and process.poll() is None:
        if ready.is_file():
            return ready.read_text().strip()
        time.sleep(0.05)
    raise RuntimeError(f"no workers (exit status {process.poll()}):\n{log.read_text(errors='replace')[-8000:]}")
