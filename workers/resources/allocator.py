"""Tunes how a worker process keeps freed memory for its next pass, and returns it to the system. Imports no torch."""

import ctypes
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MAX_ARENAS = -8

# oneDNN compiles each product for its number of rows, which takes half a millisecond and half a megabyte of its cache;
# torch caches more for each thread. Both keep 1024 products, which fragments the heap, unless these variables are set
# before the first product. A pass needs a dozen products for each shape of its micro-batches.
_PRODUCT_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "48", "LRU_CACHE_CAPACITY": "16"}

# The C library; None if it is another one than glibc, whose allocator alone is tuned here.
_GLIBC = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None

IDLE_SECONDS = 5.0
STEADY_SECONDS = 300.0
_WORK_SECONDS = 0.02


def tune_allocator() -> bool:
    """Bounds the caches of products, and makes glibc keep freed memory. Call it at process start.

    A training step frees and allocates the same large tensors over and over, each time at the price of page faults.
    Returns whether the allocator took the setting, which only glibc does.
    """
    for name, capacity in _PRODUCT_CACHES.items():
        os.environ.setdefault(name, capacity)
    if _GLIBC is None:
        return False
    # One arena, because those of other threads cannot hold allocations larger than 64 MB.
    settings = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _MAX_ARENAS: 1}
    return 0 not in [_GLIBC.mallopt(name, value) for name, value in settings.items()]


@contextmanager
def single_arena_for_children() -> Iterator[None]:
    """Makes processes started inside have one arena from the beginning.

    A limit that a process sets later does not remove the arenas that its threads have by then.
    """
    before = os.environ.get("MALLOC_ARENA_MAX")
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("MALLOC_ARENA_MAX", None)  # another thread may have begun at the same time


def trim() -> None:
    """Returns all whole pages of freed memory to the system; does nothing without glibc."""
    if _GLIBC is not None:
        _GLIBC.malloc_trim(0)


def free_bytes() -> int:
    """Returns how much the allocator could hand out without asking the system, trimmed or not; 0 if unknown."""
    if _GLIBC is None or not hasattr(_GLIBC, "mallinfo2"):
        return 0
    _GLIBC.mallinfo2.restype = _MallInfo
    return _GLIBC.mallinfo2().fordblks


class _MallInfo(ctypes.Structure):
    """Holds the result of mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


class MemoryTrimmer:
    """Trims from a background thread.

    It trims when there has been no work for some seconds, and every few minutes during steady work, where the page
    faults that follow cost less than a hundredth of the time.
    """

    def __init__(self, idle_seconds: float = IDLE_SECONDS, steady_seconds: float = STEADY_SECONDS) -> None:
        self._idle_seconds, self._steady_seconds = idle_seconds, steady_seconds
        self._has_worked = threading.Event()
        self._is_working = False
        self._worked_at = self._trimmed_at = time.monotonic()
        threading.Thread(target=self._run, name="trimming", daemon=True).start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks work while inside; anything very short, such as reading how much memory there is, does not count."""
        self._is_working, began = True, time.monotonic()
        try:
            yield
        finally:
            self._is_working, ended = False, time.monotonic()
            if ended - began > _WORK_SECONDS:
                self._worked_at = ended
                self._has_worked.set()

    def _run(self) -> None:
        while self._has_worked.wait():
            time.sleep(self._idle_seconds / 4)
            if self._is_due(time.monotonic()):
                self._has_worked.clear()
                trim()
                self._trimmed_at = time.monotonic()

    def _is_due(self, now: float) -> bool:
        is_idle = not self._is_working and now - self._worked_at >= self._idle_seconds
        return is_idle or now - self._trimmed_at >= self._steady_seconds
