"""The connections of a rank: a sum over all ranks, and the addresses on which it listens."""

import os
import socket
from pathlib import Path

import torch

from .probe_worker import ProbeWorker


def summed(rank: ProbeWorker, value: float) -> float:
    return rank.mesh.across().all_reduce(torch.tensor([value])).item()


def listening_addresses(_: ProbeWorker) -> list[str]:
    own = {_target(file) for file in Path("/proc/self/fd").iterdir()}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(_address_in(fields[1].partition(":")[0]))
    return found


def _target(file: Path) -> str:
    """The descriptor that lists the directory is closed by then."""
    try:
        return os.readlink(file)
    except OSError:
        return ""


def _address_in(words: str) -> str:
    """Parses Linux's form: 32-bit words in little-endian order."""
    whole = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    if whole.startswith(bytes(10) + b"\xff\xff"):
        whole = whole[12:]
    return socket.inet_ntop(socket.AF_INET if len(whole) == 4 else socket.AF_INET6, whole)
