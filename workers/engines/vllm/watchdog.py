"""Runs a command until it ends or whoever started this hangs up, however that one ended; then ends all of it.

A program of its own, of the standard library alone: `python lifeline.py COMMAND...`, with a pipe as its stdin. The
first line of stdout is the command's process id; what the command says goes to stderr.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 5.0


def main() -> int:
    # Ctrl-C and SIGTERM belong to who started us: their end is what we wait for.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, preexec_fn=_as_usual
    )
    print(command.pid, flush=True)
    threading.Thread(target=_end_on_hang_up, args=(command,), daemon=True).start()
    status = command.wait()
    # Children that it left behind.
    _send(command.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _as_usual() -> None:
    """What is ignored here would be ignored there."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _end_on_hang_up(command: "subprocess.Popen[bytes]") -> None:
    os.read(sys.stdin.fileno(), 1)
    _send(command.pid, signal.SIGTERM)
    try:
        command.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _send(command.pid, signal.SIGKILL)


def _send(group: int, number: signal.Signals) -> None:
    """To the command and its children, which are a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
