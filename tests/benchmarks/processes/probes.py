"""Measures the memory and the health of processes with the standard library alone.

So light workers of tests can import it, and `python -I -S` can run it:
    probes.py memory PID    memory of a process that no file backs
    probes.py server PID    resident memory of a server and of its decoding processes, together
    probes.py health URL    milliseconds that the server's health route takes to answer, asked every 30 ms
Each answers a line with the largest value since the line before, and the last one. A thread could not watch its own
process, because it waits while other threads hold the interpreter.
"""

import http.client
import json
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    """Returns the most resident memory since `restart_peak`."""
    return _status("VmHWM")


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    """Reads a field of this process's status, see proc(5)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def watch(measure: Callable[[], float], seconds: float) -> None:
    """Measures every so many seconds, and answers the lines of standard input until it closes."""
    most, due = measure(), time.monotonic()
    while True:
        if select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
            if not sys.stdin.readline():
                return
            now = measure()
            print(json.dumps([max(most, now), now]), flush=True)
            most = now
        if time.monotonic() >= due:
            most = max(most, measure())
            due = max(due + seconds, time.monotonic())


def anonymous_bytes(pid: int) -> int:
    resident, of_files = _pages(pid)
    return PAGE * (resident - of_files)


def server_bytes(pid: int) -> int:
    decoders = [child for child in _children(pid) if "server.http.decoding import" in _read(child, "cmdline")]
    return PAGE * sum(_pages(each)[0] for each in (pid, *decoders))


def _pages(pid: int) -> tuple[int, int]:
    """Returns the pages of resident memory, and those of them that files back; none if the process has ended."""
    _, resident, of_files, *_ = _read(pid, "statm").split() or (0, 0, 0)
    return int(resident), int(of_files)


def _children(pid: int) -> list[int]:
    processes = [each for each in os.listdir("/proc") if each.isdigit()]
    # The parent is the second field after the name, which is in parentheses and can hold anything.
    return [int(each) for each in processes if _read(each, "stat").rpartition(")")[2].split()[1:2] == [str(pid)]]


def _read(pid: object, name: str) -> str:
    """Returns an empty text if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def health_milliseconds(url: str) -> Callable[[], float]:
    address = urlsplit(url)
    assert address.hostname == "127.0.0.1"
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)

    def measure() -> float:
        started = time.monotonic()
        connection.request("GET", "/api/v1/healthz")
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        return 1000 * (time.monotonic() - started)

    return measure


def main(kind: str, target: str) -> None:
    if kind == "health":
        watch(health_milliseconds(target), 0.03)
    elif kind == "server":
        watch(lambda: server_bytes(int(target)), 0.01)
    else:
        watch(lambda: anonymous_bytes(int(target)), 0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
