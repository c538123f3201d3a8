"""The process that tries constraints before a rank compiles them: `main`.

llguidance is native code that constraints can crash, or keep busy for minutes. The process reads the tokenizer of one
base model once and forks for each constraint, with limits on time, memory and stack, so that a trial takes
milliseconds. A rank then compiles only what passed.
"""

import os
import resource
import signal
import socket
import sys
import time
from typing import NamedTuple

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.sampling import Constraint
from ...workers.protocol.messages import FrameReader, decode, encode, send_pieces
from ...workers.sampler.requests.structured_output import MASK_SECONDS, Matcher, MatcherFactory
from ..http.decoding import become_expendable

IDLE_SECONDS = 600.0

_COMPILE_SECONDS = 0.1
"""The most processor time of compiling a constraint: a rank does nothing else meanwhile."""

_MOST_MASK_SECONDS = 0.05
_PROCESSOR_SECONDS = 1
_NICENESS = 10
"""A tenant can keep the process busy: at 10 it gets a tenth of a core that a rank uses as well."""

_MEMORY_BYTES = 2 << 30
_STACK_BYTES = 2 << 20
"""A quarter of what threads of a rank have, by default."""

_WALKS = 4
_WALK_TOKENS = 32
_FEW_TOKENS = 64
_FEW_BYTES = 4096  # a pipe takes so much at once
_TOO_MUCH = "the constraint is too complex: trying it took too much time, memory or nesting: simplify it"
_REFUSING_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGXCPU)


class TokenizerParts(NamedTuple):
    """The arguments of MatcherFactory."""

    backend: str
    vocab_size: int
    end_token_ids: tuple[int, ...]


class Verdict(NamedTuple):
    """The result of a trial."""

    refusal: str | None
    """The reason to refuse the constraint; None if it is cheap enough."""
    was_costly: bool = False
    """The trial took long."""
    compile_seconds: float = 0.0
    """Processor time of compiling the constraint."""


def main() -> None:
    """Receives the tokenizer, then constraints, and answers each with its verdict until none follows."""
    become_expendable(_NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would not survive the fork
    with socket.socket(fileno=int(sys.argv[1])) as pipe:
        pipe.settimeout(IDLE_SECONDS)
        parts = _receive(pipe)
        assert isinstance(parts, TokenizerParts)
        factory: MatcherFactory | OperationError
        try:
            factory = MatcherFactory(*parts)
        except OperationError as error:
            factory = error
        while True:
            try:
                constraint = _receive(pipe)
            except (EOFError, TimeoutError):
                return
            assert isinstance(constraint, Constraint)
            send_pieces(encode(_verdict(factory, constraint)), pipe)


def _receive(pipe: socket.socket) -> object:
    frame = FrameReader().receive(pipe)
    assert frame is not None, "the pipe blocks"
    return decode(frame)


def _verdict(factory: MatcherFactory | OperationError, constraint: Constraint) -> Verdict | OperationError:
    """Tries the constraint in a child process. Returns an OperationError that the constraint has no part in."""
    if isinstance(factory, OperationError):
        return Verdict(factory.message)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS + 1))
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
            seconds, refusal = _trial(factory, constraint)
            os.write(writing, f"{seconds} {refusal}".encode()[:_FEW_BYTES])
            os._exit(0)
        except MemoryError:
            os.abort()
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as answer:
        seconds, _, refusal = answer.read().decode(errors="replace").partition(" ")
    _, status, used = os.wait4(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _REFUSING_SIGNALS:
        return Verdict(_TOO_MUCH, was_costly=True)
    if status:
        message = "the constraint could not be tried: the machine may be out of memory: try again"
        return OperationError(message, "server")
    return Verdict(refusal or None, used.ru_utime + used.ru_stime > _COMPILE_SECONDS, float(seconds))


def _trial(factory: MatcherFactory, constraint: Constraint) -> tuple[float, str]:
    """Compiles the constraint and follows some texts that it allows. Returns the seconds of compiling, and the refusal,
    "" if there is none."""
    began = time.process_time()
    try:
        matcher = factory.new(constraint)
    except OperationError as error:
        return 0.0, error.message
    if (seconds := time.process_time() - began) > _COMPILE_SECONDS:
        return seconds, (
            f"the constraint takes {seconds:.2g} s to compile, more than {_COMPILE_SECONDS:g} s: simplify it (fewer"
            " properties, alternatives and repetitions)"
        )
    return seconds, _refusal_of_masks(matcher)


def _refusal_of_masks(matcher: Matcher) -> str:
    random = np.random.default_rng(0)
    seconds: list[float] = []
    for number in range(_WALKS):
        walk = matcher.copy()
        for _ in range(_WALK_TOKENS):
            allowed = walk.allowed()
            seconds.append(walk.seconds)
            if allowed is None or walk.seconds > _MOST_MASK_SECONDS:
                break
            tokens = np.flatnonzero(allowed)
            # Small ids are single characters, which end strings and numbers; of all tokens most are words.
            tokens = tokens[:_FEW_TOKENS] if number % 2 else tokens
            if not len(tokens) or not walk.advance(int(random.choice(tokens))) or walk.is_finished:
                break
        if walk.failure is not None:
            return walk.failure
        if max(seconds) > _MOST_MASK_SECONDS or sum(seconds) > _MOST_MASK_SECONDS + MASK_SECONDS * len(seconds):
            return (
                f"the constraint takes {1000 * max(seconds):.0f} ms for a token, more than"
                f" {1000 * _MOST_MASK_SECONDS:g}, or {1000 * sum(seconds) / len(seconds):.1f} ms on average, more than"
                f" {1000 * MASK_SECONDS:g}: simplify it (fewer optional properties, alternatives and repetitions)"
            )
    return ""
