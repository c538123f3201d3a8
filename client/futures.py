"""The answer of every verb: to be waited for with `.result()`, or awaited in any event loop."""

import asyncio
import concurrent.futures
from collections.abc import Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class APIFuture(Generic[T]):
    """The operation is under way whether or not anyone waits: giving up waiting does not take it back."""

    def __init__(self, inner: concurrent.futures.Future[T]) -> None:
        self._inner = inner

    def result(self, timeout: float | None = None) -> T:
        """Blocks; raises TimeoutError after `timeout` seconds, else what the operation raised."""
        return self._inner.result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(asyncio.wrap_future(self._inner)).__await__()

    def done(self) -> bool:
        return self._inner.done()
