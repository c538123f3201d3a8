"""What a process has of the machine's memory, as Linux tells it of itself: see proc(5)."""

from pathlib import Path


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    """Of resident memory, at most since `restart_peak`."""
    return _status("VmHWM")


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
