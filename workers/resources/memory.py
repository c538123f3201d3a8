"""Measures available memory, and turns running out of it into an error that can be caught."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...schemas.errors import OperationError
from . import machine
from .allocator import free_bytes, trim

_SIZES = Path("/proc/self/statm")

# One part in this many of the available memory is left to other processes.
_RESERVE = 20

# torch has an error type for CUDA only: its CPU allocator and the libraries below it raise plain RuntimeErrors.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation", "ALLOC_FAILED")


def release_freed_memory(device: torch.device) -> None:
    """Returns freed memory that the allocators keep to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim()


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def reporting_out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Raises OperationError (server) if memory runs out inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OperationError(f"no memory for {what}: {error}; {remedy}", "server") from None


def available_bytes(device: torch.device) -> int | None:
    """Returns how much memory the device still has, or None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine.available_bytes()


@contextmanager
def bounded_memory(device: torch.device) -> Iterator[None]:
    """Turns taking more memory than the machine has into an error that can be caught, while inside.

    Linux overcommits memory, and kills a process that uses it. For the CPU only; does nothing on systems other than
    Linux.
    """
    available = machine.available_bytes() if device.type == "cpu" and _SIZES.exists() else None
    if available is None:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _taken_bytes() + available - available // _RESERVE
    resource.setrlimit(resource.RLIMIT_DATA, (limit if before == resource.RLIM_INFINITY else min(limit, before), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _taken_bytes() -> int:
    """Returns the memory that this process has taken from the system, touched or not.

    Freed memory that the allocator has trimmed is available, because it is reused without asking the system, but the
    system still counts it. There is no count of it, so it is taken as the smaller of the untouched memory and what the
    allocator could hand out.
    """
    pages = [int(number) for number in _SIZES.read_text().split()]
    resident, of_files, data = (pages[column] * resource.getpagesize() for column in (1, 2, 5))
    untouched = data - (resident - of_files)
    return data - max(0, min(untouched, free_bytes()))
