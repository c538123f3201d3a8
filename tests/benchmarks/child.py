"""A helper process of a benchmark, which answers a line of JSON for every line of JSON that it is sent."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

EXIT_SECONDS = 30


class Child:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin and process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout

    def send(self, request: object) -> None:
        self._stdin.write(json.dumps(request) + "\n")
        self._stdin.flush()

    def receive(self) -> Any:
        """Raises RuntimeError when the process has ended instead."""
        if not (line := self._stdout.readline()):
            raise RuntimeError("a benchmark's process ended without an answer: its error is above")
        return json.loads(line)

    def ask(self, request: object) -> Any:
        self.send(request)
        return self.receive()


def child(module: str, *arguments: str) -> AbstractContextManager[Child]:
    """Runs `module` of this package until the end of the block."""
    return running([sys.executable, "-m", f"trainhouse.tests.benchmarks.{module}", *arguments])


@contextmanager
def running(command: list[str]) -> Iterator[Child]:
    """Runs it until the end of the block; it waits silently in between."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        try:
            yield Child(process)
        finally:
            process.stdin.close()
            try:
                process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
