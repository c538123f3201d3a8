"""A worker without a model that only connects to the others. Child processes import it by name."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from trainhouse.workers.parallel.mesh import LOOPBACK, Mesh, Rendezvous, connect, own_host
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

MEETING = "trainhouse.tests.workers.parallel.meeting_worker:MeetingWorker"
SECONDS = 60.0


@dataclass(frozen=True)
class MeetingConfig:
    spec: ParallelSpec
    rank: int
    is_local: bool


class MeetingWorker:
    def __init__(self, config: MeetingConfig) -> None:
        self._config = config
        self._meeting: Rendezvous | None = None

    def open_rendezvous(self) -> str | None:
        if self._config.rank > 0:
            return None
        self._meeting = Rendezvous.open(LOOPBACK if self._config.is_local else own_host(), SECONDS)
        return self._meeting.address

    def load(self, address: str) -> None:
        meeting = self._meeting or Rendezvous.join(address, SECONDS)
        connect(meeting, self._config.spec, self._config.rank, torch.device("cpu"), SECONDS)
        self._mesh = Mesh(self._config.spec, self._config.rank)

    def summed(self, value: float) -> float:
        return self._mesh.across().all_reduce(torch.tensor([value])).item()

    def listening(self) -> list[list[str]]:
        """Returns the listening addresses of each rank."""
        return self._mesh.all_gather_object(_listening_addresses())


def _listening_addresses() -> list[str]:
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
