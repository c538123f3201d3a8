"""Memory: the process's allocator, how to know that there is none left, and how much there is."""

import ctypes
import platform

import torch

from . import footprint

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

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
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def available_bytes(device: torch.device) -> int | None:
    """What the device can still give; None: unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return footprint.available_bytes()
