"""VllmLog: the file in which our vLLM servers log, and what the newest of them died of."""

import contextlib
import os
import re
from pathlib import Path
from typing import BinaryIO

# Where the last error is looked for.
_TAIL_BYTES = 64 << 10


class VllmLog:
    """What one server after the other says, in one file. That of an earlier process of ours is kept beside it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._start = 0

    def begin(self) -> None:
        """Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self.file.replace(f"{self.file}.1")

    def open(self) -> BinaryIO:
        """For the next server. Raises OSError."""
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = self.file.open("ab")
        self._start = output.tell()
        return output

    def last_error(self) -> str:
        """Of the newest server: the last line that names an error, else the last line."""
        lines = [line.strip() for line in self._tail().splitlines() if line.strip()]
        named = [line for line in lines if re.search(r"\b[A-Za-z]*(Error|Exception)\b: ", line)]
        last = (named or lines or ["it said nothing"])[-1]
        without_origin = re.sub(r"^\(.*?\)( [A-Z]+ [^]]*\])?", "", last).strip()
        return f"{without_origin} (more in {self.file})"

    def _tail(self) -> str:
        try:
            with self.file.open("rb") as log:
                log.seek(max(self._start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"
