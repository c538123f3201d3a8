"""The process's memory allocator."""

import ctypes
import platform

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def tune_allocator() -> bool:
    """Has glibc keep freed memory instead of giving it back; call it at process start. Elsewhere does nothing.

    A training step frees and allocates the same large tensors over and over, each time at the price of page faults.
    Returns whether the allocator took the setting.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))
