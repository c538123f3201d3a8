"""`trainhouse demo`: converts the demo's model, serves it on a free port, and runs the client program against it.

Each of the three is a separate process, with the command that a user would type. All of them end with this one.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ...workers.resources.machine import cache_directory
from .child_server import running, served
from .errors import INTERRUPTED, CommandFailed, missing_package
from .options import Status, new_app
from .output import spinner

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONVERSION = "smollm2-135m-instruct-1"  # the number changes with what the conversion writes
_PACKAGES = ("torch", "sqlalchemy", "gguf")  # of the extras, one each that nothing else brings


app = new_app()


@app.command(help=f"Fine-tune {MODEL} on this machine: a few minutes on two cores.")
def demo(
    state_dir: Annotated[
        Path | None, typer.Option(help="Directory for the checkpoint and the server's log (~/.cache/trainhouse/demo).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (30).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per step (8).")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of each completion shown (30).")] = None,
) -> Status:
    """Returns the exit status, 0 only if the held-out loss fell."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise missing_package(package, "server,demo")
    # A closed terminal or SIGTERM ends the parts just as Ctrl-C does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    flags = {"--steps": steps, "--batch-size": batch_size, "--max-tokens": max_tokens}
    try:
        return demonstrate(
            state_dir or cache_directory() / "demo",
            [f"{flag}={value}" for flag, value in flags.items() if value is not None],
        )
    except KeyboardInterrupt:
        print("\ninterrupted; the server is stopped", file=sys.stderr)
        return INTERRUPTED


def demonstrate(state_dir: Path, client_arguments: Sequence[str]) -> int:
    model = converted_model()
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = ["--base-model", f"{MODEL}={model}", "--port", "0", "--state-dir", str(state_dir)]
    print(f"trainhouse serve {' '.join(flags)}    (log: {state_dir / 'server.log'})", flush=True)
    with ExitStack() as stack:
        with spinner(f"loading {MODEL}"):
            server = stack.enter_context(served(flags, state_dir))
        print(f"the server answers at {server.url}", flush=True)
        arguments = ["--base-url", server.url, "--model", MODEL, *client_arguments]
        client = stack.enter_context(running([sys.executable, "-m", "trainhouse.examples.demo", *arguments]))
        while (status := client.poll()) is None:
            server.check()
            time.sleep(0.1)
    if status != 0:
        return status
    adapters = state_dir.rglob("adapter_model.safetensors")
    if newest := max(adapters, key=lambda path: path.stat().st_mtime, default=None):
        print(f"its files are in {newest.parent}")
    own_command = sys.argv[0] if Path(sys.argv[0]).name == "trainhouse" else "trainhouse"
    print(f"serve it: {own_command} serve --base-model {MODEL}={model} --state-dir {state_dir}")
    return status


def converted_model() -> Path:
    directory = cache_directory() / CONVERSION
    if not directory.is_dir():
        print(f"converting {MODEL} to {directory} (once)", flush=True)
        with running([sys.executable, "-m", "trainhouse.workers.models.gguf", str(directory)]) as conversion:
            if conversion.wait() != 0:
                raise CommandFailed(f"the conversion of {MODEL} failed: is the [demo] extra installed?")
    return directory
