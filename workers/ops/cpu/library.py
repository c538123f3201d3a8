"""Compiles kernels.c and training.c for this machine at first use, if it has a C compiler."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...resources.machine import cache_directory

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "training.c"))
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("products.h", "vectors.h"))
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_SECONDS = 120

# Their types are looked up here, since a call of isinstance for each argument takes as long as a short kernel.
_TENSORS = frozenset((Tensor, nn.Parameter))

_log = logging.getLogger(__name__)

Recorder = Callable[[Callable[[], object]], None]


class CompiledLibrary:
    """The compiled functions, as attributes, which take tensors for pointers to numbers.

    A thread can record its calls, to repeat them later.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._recording = library, _Recording()

    def declare(self, arguments: Mapping[str, Sequence[object]], fallible: Sequence[str]) -> None:
        """Declares the types of functions' arguments, and the functions that return 1 if they get no memory."""
        for name, types in arguments.items():
            function = getattr(self._library, name)
            function.argtypes = types
            if name in fallible:
                function.errcheck = _raise_if_failed
            setattr(self, name, partial(self._call, function))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...

    @contextmanager
    def recorded_by(self, record: Recorder) -> Iterator[None]:
        """Calls `record` on this thread, while inside, with a function that repeats the call, at each call."""
        self._recording.record = record
        try:
            yield
        finally:
            self._recording.record = None

    def _call(self, function: Callable[..., int], *arguments: object) -> int:
        given = [each.data_ptr() if type(each) in _TENSORS else each for each in arguments]  # pyright: ignore
        if (record := self._recording.record) is not None:
            record(partial(function, *given))
        return function(*given)


class _Recording(threading.local):
    record: Recorder | None = None


def _raise_if_failed(failed: int, function: Any, arguments: Sequence[object]) -> int:
    if failed:
        raise MemoryError(f"kernel {function.__name__}: the host has no memory for what it computes on the way")
    return failed


def load_library() -> CompiledLibrary | None:
    """Compiles the library, which takes a second or two, unless an earlier process already has."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _log.warning(
            "no C compiler found: sampling and training on the CPU take up to twice as long. Install gcc or clang"
        )
        return None
    try:
        return CompiledLibrary(ctypes.CDLL(str(_compiled(compiler))))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning(
            "%s cannot compile kernels.c: sampling and training on the CPU take up to twice as long: %s", compiler, said
        )
        return None


def _compiled(compiler: str) -> Path:
    library = _directory() / f"kernels-{_digest(compiler)}.so"
    if not library.exists():
        # Compiled under another name first, because other processes may compile it at the same time.
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            command = [compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
            made.replace(library)
    return library


def _directory() -> Path:
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="trainhouse-"))
    return directory if os.access(directory, os.W_OK) else Path(tempfile.mkdtemp(prefix="trainhouse-"))


def _digest(compiler: str) -> str:
    """Returns a hash of everything that the compiled code depends on.

    A home directory may be shared by machines with different processors.
    """
    processors = Path("/proc/cpuinfo")
    lines = processors.read_text().splitlines() if processors.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    parts = (*(path.read_text() for path in (*_SOURCES, *_HEADERS)), compiler, *_FLAGS, platform.machine(), features)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
