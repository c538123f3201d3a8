"""Checks that ranks see the same directory as this machine, by a file written here that they look for.

Imports no torch.
"""

import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 5.0
_PAUSE_SECONDS = 0.25


@dataclass(frozen=True)
class SharedFileProbe:
    """A file with random contents, written by this machine into a directory that ranks must share."""

    path: str
    contents: str

    @staticmethod
    def write_into(directory: str) -> "SharedFileProbe":
        """Writes a probe into the directory, which is created if missing.

        Raises:
            OSError: the directory cannot be written.
        """
        probe = SharedFileProbe(str(Path(directory, f".shared-{secrets.token_hex(8)}")), secrets.token_hex(16))
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(probe.path).write_text(probe.contents)
        return probe

    def remove(self) -> None:
        Path(self.path).unlink(missing_ok=True)

    def find_problem(self) -> str | None:
        """Returns why this machine does not share the directory, or None if it can read and write it."""
        deadline = time.monotonic() + _SECONDS
        while (problem := self._problem()) is not None and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)  # a network file system's client may lag a moment
        return problem and f"on {socket.gethostname()} {problem}"

    def _problem(self) -> str | None:
        beside = Path(f"{self.path}-{os.getpid()}")
        try:
            if Path(self.path).read_text() != self.contents:
                return "the file at that path has other contents"
            beside.touch()
            beside.unlink()
        except FileNotFoundError:
            return "the file just written there was not found"
        except OSError as error:
            return f"it cannot be read and written ({error.strerror})"
        return None
