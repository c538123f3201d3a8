"""Shell: what stands around a worker in its own process."""

import gc
import importlib
import os
import traceback
from typing import Any

from ...schemas.errors import OperationError
from ..ops.allocator import Trimming
from ..protocol.messages import Piece, decode, encode
from .base import Answer, PoolSpec, WorkerError


class Shell:
    """Builds the worker, calls it, and turns its errors into values."""

    def __init__(self, spec: PoolSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._worker: object = None
        self._trimming = Trimming()

    def answer(self, frame: memoryview) -> list[Piece]:
        """The message None builds the worker and is answered by the process id."""
        try:
            message: Any = decode(frame)
            with self._trimming.working():
                return encode(Answer(self._build() if message is None else self._call(*message)))
        except OperationError as error:
            return encode(Answer(error=error))
        except ValueError as error:
            return encode(Answer(error=_plain(error)))
        except Exception as error:
            summary = f"{type(error).__name__}: {error}"
            return encode(Answer(error=WorkerError(summary, traceback.format_exc())))

    def _build(self) -> int:
        module, _, name = self._spec.worker.partition(":")
        os.environ["OMP_NUM_THREADS"] = str(self._spec.threads)
        let_waiting_threads_sleep()
        try:
            self._worker = getattr(importlib.import_module(module), name)(self._spec.configs[self._rank])
        except OSError as error:
            raise ValueError(str(error)) from error  # an unreadable model is as good as a bad one
        # What is there now stays: collections of garbage need not look at it again, which takes them long.
        gc.collect()
        gc.freeze()
        return os.getpid()

    def _call(self, method: str, arguments: tuple[object, ...]) -> object:
        return getattr(self._worker, method)(*arguments)


def _plain(error: ValueError) -> ValueError:
    """Subclasses have constructors of their own and may not survive pickling."""
    plain = ValueError(str(error))
    plain.add_note(traceback.format_exc())
    return plain


def let_waiting_threads_sleep() -> None:
    """OpenMP reads this once, when it is loaded. Spinning threads keep the core from whoever has work for them: beside
    one busy process they made a training step nine times slower, and on quiet cores no faster (docs/performance.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
