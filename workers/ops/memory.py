"""Memory: how much there is, and how to be told when there is none left."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...schemas.errors import OperationError
from ..planner import footprint
from .allocator import free_bytes, trim

_SIZES = Path("/proc/self/statm")

# The share of what is available that stays for others.
_RESERVE = 20

# torch has a type of its own for CUDA only: its CPU allocator and the libraries below raise plain RuntimeErrors.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation", "ALLOC_FAILED")


def give_back_freed(device: torch.device) -> None:
    """To the system, what the allocators keep for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim()


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
    limit = _data_bytes() - _given_back_bytes() + available - available // _RESERVE
    resource.setrlimit(resource.RLIMIT_DATA, (limit if before == resource.RLIM_INFINITY else min(limit, before), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _given_back_bytes() -> int:
    """What the allocator has given back and will take again without being asked: it is available, and part of
    `_data_bytes`. Nobody counts it, so it is the least of what is not touched and what the allocator could hand out."""
    resident, of_files = (int(number) for number in _SIZES.read_text().split()[1:3])
    untouched = _data_bytes() - (resident - of_files) * resource.getpagesize()
    return min(untouched, free_bytes()) if untouched > 0 else 0


def _data_bytes() -> int:
    """What this process has taken, touched or not; what its allocator keeps for later is part of it."""
    return int(_SIZES.read_text().split()[5]) * resource.getpagesize()
