"""Memory: the process's allocator, how much there is, and how to be told when there is none left."""

import ctypes
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..schemas.errors import OperationError
from . import footprint

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MOST_ARENAS = -8

_SIZES = Path("/proc/self/statm")

# The share of what is available that stays for others.
_RESERVE = 20

# torch has a type of its own for CUDA only: its CPU allocator and the libraries below raise plain RuntimeErrors.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation", "ALLOC_FAILED")


def tune_allocator() -> bool:
    """Has glibc keep freed memory instead of giving it back; call it at process start. Elsewhere does nothing.

    A training step frees and allocates the same large tensors over and over, each time at the price of page faults.
    Returns whether the allocator took the setting.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Those of further threads would not hold what is larger than 64 MB.
    settings = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _MOST_ARENAS: 1}
    return 0 not in [mallopt(name, value) for name, value in settings.items()]


def give_back_freed(device: torch.device) -> None:
    """To the system, what the allocators keep for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Raises OperationError (server) where there is none for what is done inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OperationError(f"no memory for {what}: {error}; {remedy}", "server") from None


def available_bytes(device: torch.device) -> int | None:
    """What the device can still give; None: unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return footprint.available_bytes()


@contextmanager
def bounded_memory(device: torch.device) -> Iterator[None]:
    """Inside, to take more than the machine has is an error that can be caught.

    Linux promises memory that it does not have, and ends who takes it at its word. Only for the CPU; elsewhere than on
    Linux does nothing.
    """
    available = available_bytes(device) if device.type == "cpu" and _SIZES.exists() else None
    if available is None:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + available - available // _RESERVE
    resource.setrlimit(resource.RLIMIT_DATA, (limit if before == resource.RLIM_INFINITY else min(limit, before), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _data_bytes() -> int:
    """What this process has taken, touched or not; what its allocator keeps for later is part of it."""
    return int(_SIZES.read_text().split()[5]) * resource.getpagesize()
