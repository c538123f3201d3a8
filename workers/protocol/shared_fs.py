"""Landmark: a file that this machine leaves in a directory, for ranks to find: so both have the same directory.

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
class Landmark:
    path: str
    words: str

    @staticmethod
    def left_in(directory: str) -> "Landmark":
        """Raises OSError."""
        landmark = Landmark(str(Path(directory, f".shared-{secrets.token_hex(8)}")), secrets.token_hex(16))
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(landmark.path).write_text(landmark.words)
        return landmark

    def remove(self) -> None:
        Path(self.path).unlink(missing_ok=True)

    def trouble(self) -> str | None:
        """Why the machine on which this is asked does not share the directory; None where it does, and may write."""
        deadline = time.monotonic() + _SECONDS
        while (trouble := self._trouble()) is not None and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)  # clients of network file systems may be a moment behind
        return trouble and f"on {socket.gethostname()} {trouble}"

    def _trouble(self) -> str | None:
        beside = Path(f"{self.path}-{os.getpid()}")
        try:
            if Path(self.path).read_text() != self.words:
                return "there is something else at that path"
            beside.touch()
            beside.unlink()
        except FileNotFoundError:
            return "what was just written there is not to be found"
        except OSError as error:
            return f"it is not to be read and written ({error.strerror})"
        return None
