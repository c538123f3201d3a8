"""Tries each constraint once in a separate process, before a rank may compile it."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

from ...schemas.errors import OperationError, RequestError
from ...schemas.sampling import Constraint
from ...workers.protocol.calls import ModelInfo
from ...workers.protocol.messages import FrameReader, decode, encode, send_pieces
from ..http.decoding import start_process
from ..text.tokenizer import Tokenizers
from . import constraint_process
from .constraint_process import TokenizerParts, Verdict

Key = TypeVar("Key")
Value = TypeVar("Value")

logger = logging.getLogger(__name__)

_MOST_VERDICTS = 10_000
_TRIAL_SECONDS = 60.0
_PENALTY_SECONDS, _LONGEST_PENALTY_SECONDS = 5.0, 60.0
"""The time that a tenant's new constraints wait after a costly one, doubled by each further one: a rank, or the
process, may have lost a second with it."""

_FORGIVEN_SECONDS = 3600.0
_MOST_TENANTS = 1000


@dataclass
class _Pause:
    """num_costly: the tenant's costly constraints. until: when its next one is tried."""

    num_costly: int = 0
    until: float = 0.0


class ConstraintChecks:
    """The verdicts on constraints, by base model. A tenant's new constraints are tried one at a time."""

    def __init__(
        self, tokenizers: Tokenizers, models: Mapping[str, ModelInfo], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokenizers, self._models, self._clock = tokenizers, models, clock
        self._pauses: dict[str, _Pause] = {}
        self._processes: dict[str, _TrialProcess] = {}
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, base_model: str, tenant_id: str, constraint: Constraint) -> float:
        """Returns the processor time that the constraint took to compile, in seconds. Raises OperationError if it is
        invalid or too costly, or cannot be tried now."""
        key = base_model, constraint.digest
        if key not in self._verdicts:
            async with self._turns.setdefault(tenant_id, asyncio.Lock()):
                await asyncio.sleep(max(0.0, self._pause(tenant_id).until - self._clock()))
                if key not in self._verdicts:
                    self._remember(key, tenant_id, await self._try(base_model, constraint))
        verdict = self._verdicts[key]
        if verdict.refusal is not None:
            raise OperationError(verdict.refusal)
        return verdict.compile_seconds

    def failed(self, base_model: str, tenant_id: str, constraint: Constraint, reason: str) -> None:
        """Records that a rank could not apply the constraint, though its trial passed."""
        self._remember((base_model, constraint.digest), tenant_id, Verdict(reason, was_costly=True))

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def _pause(self, tenant_id: str) -> _Pause:
        return self._pauses.get(tenant_id, _Pause())

    def _remember(self, key: tuple[str, str], tenant_id: str, verdict: Verdict) -> None:
        if verdict.was_costly and self._verdicts.get(key) != verdict:
            before, now = self._pause(tenant_id), self._clock()
            num_costly = 1 if before.until + _FORGIVEN_SECONDS < now else before.num_costly + 1
            seconds = min(_PENALTY_SECONDS * 2 ** (num_costly - 1), _LONGEST_PENALTY_SECONDS)
            _put(self._pauses, tenant_id, _Pause(num_costly, now + seconds), _MOST_TENANTS)
        _put(self._verdicts, key, verdict, _MOST_VERDICTS)

    async def _try(self, base_model: str, constraint: Constraint) -> Verdict:
        if (process := self._processes.get(base_model)) is None:
            process = await self._new_process(base_model)
            process = self._processes.setdefault(base_model, process)
        return await process.verdict(constraint)

    async def _new_process(self, base_model: str) -> "_TrialProcess":
        model = self._models[base_model]
        try:
            tokenizer = await self._tokenizers.get(base_model)
        except RequestError as error:
            raise OperationError(f"a constraint needs the model's tokenizer: {error.message}") from None
        return _TrialProcess(TokenizerParts(tokenizer.backend(), model.vocab_size, model.eos_token_ids))


def _put(entries: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Sets an entry. The oldest one gives way if there are too many."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]


class _TrialProcess:
    """The process of one base model, started when first needed and again if it has ended."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._pipe: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # The process ends with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    async def verdict(self, constraint: Constraint) -> Verdict:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._verdict, constraint)

    def close(self) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _verdict(self, constraint: Constraint) -> Verdict:
        with contextlib.suppress(EOFError, OSError):
            if self._pipe is not None:  # it may have ended since, being idle
                return self._answer(self._pipe, constraint)
        try:
            self._end()
            self._pipe, self._process = start_process(constraint_process.__name__)
            self._pipe.settimeout(_TRIAL_SECONDS)
            send_pieces(encode(self._parts), self._pipe)
            return self._answer(self._pipe, constraint)
        except (EOFError, OSError) as error:
            self._end()
            reason = str(error) or type(error).__name__
            message = f"the constraint cannot be tried now ({reason}): try again"
            logger.warning("%s", message)
            raise OperationError(message, "server") from None

    def _answer(self, pipe: socket.socket, constraint: Constraint) -> Verdict:
        send_pieces(encode(constraint), pipe)
        frame = FrameReader().receive(pipe)
        assert frame is not None, "the pipe blocks"
        answer = decode(frame)
        if isinstance(answer, OperationError):
            raise answer
        assert isinstance(answer, Verdict)
        return answer

    def _end(self) -> None:
        if self._pipe is not None and self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()
        self._pipe = self._process = None
