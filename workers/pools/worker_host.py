"""Wraps a worker in its own process."""

import gc
import importlib
import logging
import os
import traceback
from typing import Any

from ...schemas.errors import OperationError
from ..protocol.messages import Buffer, decode, encode
from ..resources.allocator import MemoryTrimmer
from .base import PoolSpec, RankAnswer, RankProcess, WorkerError


class WorkerHost:
    """Builds the worker, calls it, and turns its errors into values."""

    def __init__(self, spec: PoolSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._worker: object = None
        self._trimming = MemoryTrimmer()
        logging.basicConfig(
            format=f"%(asctime)s %(levelname)-7s rank {rank}, %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )
        # Other packages keep to warnings.
        logging.getLogger(__name__.partition(".")[0]).setLevel(spec.log_level)

    def answer(self, frame: memoryview) -> list[Buffer]:
        """Answers a message; None builds the worker, unless there is one."""
        try:
            message: Any = decode(frame)
            with self._trimming.working():
                if message is None:
                    return encode(RankAnswer(self._build()))
                method, arguments = message
                return encode(RankAnswer(getattr(self._worker, method)(*arguments)))
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


def set_passive_wait_policy() -> None:
    """Makes idle OpenMP threads sleep instead of spin; OpenMP reads the variable when it is loaded.

    Next to one busy process, spinning threads made a training step nine times slower, and on quiet cores no faster
    (docs/performance.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
