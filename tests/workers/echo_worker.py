"""A worker without torch, with which the pools are tested. Child processes import it by name."""

import ctypes
import gc
import logging
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trainhouse.schemas.errors import OperationError
from trainhouse.tests.benchmarks.processes.probes import resident_bytes

ECHO = "trainhouse.tests.workers.echo_worker:EchoWorker"


@dataclass(frozen=True)
class EchoConfig:
    rank: int = 0
    start_error: str | None = None
    start_seconds: float = 0.0
    reset_error: str | None = None


class EchoWorker:
    def __init__(self, config: EchoConfig) -> None:
        time.sleep(config.start_seconds)
        if config.start_error:
            raise ValueError(config.start_error)
        self._rank, self._reset_error = config.rank, config.reset_error
        self._num_counted = 0

    def open_rendezvous(self) -> str:
        return "here"

    def load(self, address: str) -> None:
        assert address == "here"

    def reset(self) -> None:
        if self._reset_error:
            raise AttributeError(self._reset_error)
        self._num_counted = 0

    def touch_when_freed(self, array: np.ndarray, path: str) -> None:
        """Touches the file when the message that held the array is freed."""
        message: Any = array
        while (base := message.obj if isinstance(message, memoryview) else message.base) is not None:
            message = base
        assert message.nbytes > array.nbytes
        weakref.finalize(message, Path(path).touch)

    def rank(self) -> int:
        return self._rank

    def garbage(self) -> tuple[bool, int]:
        """Returns if garbage collection is enabled, and how many objects it skips."""
        return gc.isenabled(), gc.get_freeze_count()

    def log(self, message: str) -> None:
        logging.getLogger(__name__).info(message)

    def echo(self, value: object) -> object:
        return value

    def double(self, values: np.ndarray) -> np.ndarray:
        """Doubles the array in place, which fails if it is read-only."""
        values *= 2
        return values

    def count(self, _: object) -> int:
        self._num_counted += 1
        return self._num_counted

    def num_heaps(self) -> int:
        """Counts the allocator's heaps after other threads have allocated memory."""
        threads = [threading.Thread(target=ctypes.create_string_buffer, args=(1 << 16,)) for _ in range(8)]
        for thread in threads:
            thread.start()
            thread.join()
        library, path = ctypes.CDLL(None), f"/proc/self/fd/{os.memfd_create('heaps')}"
        library.fopen.restype = ctypes.c_void_p
        file = ctypes.c_void_p(library.fopen(path.encode(), b"w"))
        library.malloc_info(0, file)
        library.fclose(file)
        return Path(path).read_text().count("<heap nr=")

    def take_and_free(self, num_blocks: int, block_bytes: int) -> int:
        """Allocates blocks and frees all but a few in between. Returns the resident bytes afterwards."""
        blocks = [ctypes.create_string_buffer(block_bytes) for _ in range(num_blocks)]
        self._kept = blocks[::16]
        del blocks
        time.sleep(0.1)  # long enough to count as work
        return self.resident_bytes()

    def resident_bytes(self) -> int:
        return resident_bytes()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def main_file(self) -> str | None:
        import __main__

        return getattr(__main__, "__file__", None)

    def refuse(self, message: str) -> None:
        raise OperationError(message, "user")

    def reject(self, message: str) -> None:
        raise ValueError(message)

    def fail(self, message: str) -> None:
        raise KeyError(message)

    def fail_alone(self, rank: int) -> None:
        """Fails on one rank while the others wait, as in a collective."""
        if self._rank == rank:
            raise KeyError("broken")
        time.sleep(300)

    def refuse_and_leave(self, rank: int) -> None:
        """Refuses on one rank while the others wait, as in a collective."""
        if self._rank == rank:
            raise OperationError("refused", "user")
        time.sleep(300)

    def refuse_alone(self, rank: int) -> None:
        if self._rank == rank:
            raise OperationError("refused", "user")

    def return_unpicklable(self) -> object:
        return lambda: None

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self, exit_code: int) -> None:
        os._exit(exit_code)

    def interrupt_self(self) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return "still here"
