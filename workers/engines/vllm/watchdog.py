"""Runs a command, and kills it with its children when the parent process ends, even if that was killed.

A program that needs only the standard library: `python watchdog.py SECONDS COMMAND...`, with a pipe as its stdin. When
that ends, with the parent, the command has so many seconds to exit. The first line of stdout is the command's process
id; the command's own output goes to stderr.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    # Ctrl-C and SIGTERM are for the parent process: we wait for its end instead.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _, seconds, *arguments = sys.argv
    command = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, preexec_fn=_restore_signals
    )
    print(command.pid, flush=True)
    threading.Thread(target=_end_on_hang_up, args=(command, float(seconds)), daemon=True).start()
    status = command.wait()
    # Kill the children that the command left behind.
    _send(command.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _restore_signals() -> None:
    """Restores the signals that `main` ignores: the command would inherit them as ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _end_on_hang_up(command: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    os.read(sys.stdin.fileno(), 1)
    _send(command.pid, signal.SIGTERM)
    try:
        command.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        _send(command.pid, signal.SIGKILL)


def _send(group: int, number: signal.Signals) -> None:
    """Signals the command and its children, which form a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
