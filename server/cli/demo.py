"""`trainhouse demo`: converts the demo's model, serves it on a free port, and runs the client program against it.

Each of the three is a separate process, with the command that a user would type. All of them end with this one.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...workers.models.model_cache import cache_directory

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONVERSION = "smollm2-135m-instruct-1"  # the number changes with what the conversion writes
CLIENT_FLAGS = {
    "--steps": "optimizer steps (default: 30)",
    "--batch-size": "examples per step (default: 8)",
    "--max-tokens": "tokens of each completion shown (default: 30)",
}
"""Flags of the client program, declared here so that a mistake is reported before the model is loaded."""
INTERRUPTED = 130
LOAD_SECONDS = 300
STOP_SECONDS = 20


class DemoError(Exception):
    """A part of the demo failed; the message says which and where its log is."""


def run_demo(arguments: Sequence[str]) -> int:
    """Returns the exit status, 0 only if the held-out loss fell."""
    options = parser().parse_args(arguments)
    # A closed terminal or SIGTERM ends the parts just as Ctrl-C does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return demonstrate(options.state_dir, client_arguments(options))
    except DemoError as error:
        print(f"trainhouse demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the server is stopped", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    description = f"Fine-tune {MODEL} on this machine: a few minutes on two cores."
    options = argparse.ArgumentParser("trainhouse demo", description=description)
    options.add_argument(
        "--state-dir",
        type=Path,
        default=cache_directory() / "demo",
        help="directory for the checkpoint and the server's log (default: %(default)s)",
    )
    for flag, help in CLIENT_FLAGS.items():
        options.add_argument(flag, type=int, help=help)
    return options


def client_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the client program's flags that were given."""
    values = {flag: getattr(options, flag.strip("-").replace("-", "_")) for flag in CLIENT_FLAGS}
    return [f"{flag}={value}" for flag, value in values.items() if value is not None]


def demonstrate(state_dir: Path, client_arguments: Sequence[str]) -> int:
    model = converted_model()
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with served(model, state_dir) as server:
        status = run_client(server, ["--base-url", server.url, "--model", MODEL, *client_arguments])
    if status != 0:
        return status
    for adapter in newest_adapter(state_dir):
        print(f"its files are in {adapter.parent}")
    print(f"serve it: {own_command()} serve --base-model {MODEL}={model} --state-dir {state_dir}")
    return status


def converted_model() -> Path:
    directory = cache_directory() / CONVERSION
    if not directory.is_dir():
        print(f"converting {MODEL} to {directory} (once)", flush=True)
        with running([sys.executable, "-m", "trainhouse.workers.models.gguf", str(directory)]) as conversion:
            if conversion.wait() != 0:
                raise DemoError(f"the conversion of {MODEL} failed: is the [demo] extra installed?")
    return directory


class Server:
    """A server process that answers at `url`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.log = log
        self._process = process

    def check(self) -> None:
        """Raises DemoError if it has died."""
        if self._process.poll() is not None:
            raise DemoError(f"the server ended with status {self._process.returncode}:\n{tail(self.log)}")


@contextmanager
def served(model: Path, state_dir: Path) -> Iterator[Server]:
    ready, log = state_dir / "ready", state_dir / "server.log"
    ready.unlink(missing_ok=True)
    flags = ["--base-model", f"{MODEL}={model}", "--port", "0", "--state-dir", str(state_dir)]
    print(f"trainhouse serve {' '.join(flags)}    (log: {log})", flush=True)
    command = [sys.executable, "-m", "trainhouse.server", "serve", *flags, "--ready-file", str(ready)]
    with log.open("wb") as output, running(command, output.fileno()) as process:
        server = Server("", process, log)
        server.url = wait_until_ready(server, ready)
        print(f"the server answers at {server.url}", flush=True)
        yield server


def wait_until_ready(server: Server, ready: Path) -> str:
    deadline = time.monotonic() + LOAD_SECONDS
    while time.monotonic() < deadline:
        if ready.is_file() and (url := re.search(r"http://\S+", ready.read_text())):
            return url[0]
        server.check()
        time.sleep(0.1)
    raise DemoError(f"the server is not ready after {LOAD_SECONDS} s: see {server.log}")


def run_client(server: Server, arguments: list[str]) -> int:
    with running([sys.executable, "-m", "trainhouse.examples.demo", *arguments]) as client:
        while client.poll() is None:
            server.check()
            time.sleep(0.1)
        return client.returncode


@contextmanager
def running(command: list[str], output: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process in its own session, which Ctrl-C does not reach; leaving the block ends it."""
    errors = None if output is None else subprocess.STDOUT
    process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
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


def own_command() -> str:
    """Returns the command that started this process, for a user to type."""
    return sys.argv[0] if Path(sys.argv[0]).name == "trainhouse" else "trainhouse"


def newest_adapter(state_dir: Path) -> list[Path]:
    """Returns the adapter file saved last, or an empty list."""
    found = state_dir.rglob("adapter_model.safetensors")
    return sorted(found, key=lambda path: path.stat().st_mtime)[-1:]


def tail(log: Path, num_lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
