"""The log file of our vLLM servers, and the last error of the newest one."""

import contextlib
import os
import re
from pathlib import Path
from typing import BinaryIO

# How much of the end of the file is searched for the last error.
_TAIL_BYTES = 64 << 10


class VllmLog:
    """All servers that this process starts append to one file. An earlier process's file is renamed to `.1`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._start = 0

    def begin(self) -> None:
        """Renames the file of an earlier process. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self.file.replace(f"{self.file}.1")

    def open(self) -> BinaryIO:
        """Opens the file for the next server's output. Raises OSError."""
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = self.file.open("ab")
        self._start = output.tell()
        return output

    def last_error(self) -> str:
        """Returns the newest server's last line that names an error, else its last line."""
        lines = [line.strip() for line in self._tail().splitlines() if line.strip()]
        named = [line for line in lines if re.search(r"\b[A-Za-z]*(Error|Exception)\b: ", line)]
        last = (named or lines or ["it logged nothing"])[-1]
        without_origin = re.sub(r"^\(.*?\)( [A-Z]+ [^]]*\])?", "", last).strip()
        return f"{without_origin} (more in {self.file})"

    def _tail(self) -> str:
        try:
            with self.file.open("rb") as log:
                log.seek(max(self._start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"
