"""Wraps a worker in its own process."""

import gc
import importlib
import os
import time
import traceback
from typing import Any

from ...schemas.errors import OperationError
from ..protocol.messages import Buffer, decode, encode
from ..resources.allocator import MemoryTrimmer
from .base import START, PoolSpec, RankAnswer, RankProcess, RankTime, WorkerError
from .children import set_passive_wait_policy


class WorkerHost:
    """Builds the worker, calls it, and turns its errors into values."""

    def __init__(self, spec: PoolSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._worker: object = None
        self._trimming = MemoryTrimmer()
        spec.log.install(rank)

    def answer(self, frame: memoryview) -> list[Buffer]:
        """Answers a message: a method of the worker (workers/worker/worker.py) with its arguments, or START."""
        began_at, started = time.time(), time.perf_counter()
        try:
            message: Any = decode(frame)
            with self._trimming.working():
                method, arguments = message
                value = self._build() if method == START else getattr(self._worker, method)(*arguments)
                return encode(RankAnswer(value, time=RankTime(began_at, time.perf_counter() - started)))
        except OperationError as error:
            return encode(RankAnswer(error=error))
        except ValueError as error:
            return encode(RankAnswer(error=_plain(error)))
        except Exception as error:
            summary = f"{type(error).__name__}: {error}"
            return encode(RankAnswer(error=WorkerError(summary, traceback.format_exc())))

    def _build(self) -> RankProcess:
        if self._worker is not None:
            return RankProcess(os.getpid(), is_kept=True)
        module, _, name = self._spec.worker.partition(":")
        os.environ["OMP_NUM_THREADS"] = str(self._spec.threads)
        set_passive_wait_policy()
        try:
            self._worker = getattr(importlib.import_module(module), name)(self._spec.configs[self._rank])
        except OSError as error:
            raise ValueError(str(error)) from error  # an unreadable model counts as a bad one
        # Everything loaded so far stays; garbage collections would waste time on it.
        gc.collect()
        gc.freeze()
        return RankProcess(os.getpid(), is_kept=False)


def _plain(error: ValueError) -> ValueError:
    """Converts subclasses, whose constructors may not survive pickling, into a plain ValueError."""
    plain = ValueError(str(error))
    plain.add_note(traceback.format_exc())
    return plain
