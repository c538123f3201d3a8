"""The answer of every verb: to be waited for with `.result()`, or awaited in any event loop."""

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable, Generator
from typing import Any, Generic, ParamSpec, TypeVar

from .errors import TrainhouseError

T = TypeVar("T")
P = ParamSpec("P")


class APIFuture(Generic[T]):
    """The operation is under way whether or not anyone waits: giving up waiting does not take it back."""

    def __init__(self, inner: concurrent.futures.Future[T]) -> None:
        self._inner = inner

    def result(self, timeout: float | None = None) -> T:
        """Blocks; raises TimeoutError after `timeout` seconds, else what the operation raised."""
        try:
            return self._inner.result(timeout)
        except TrainhouseError as error:
            # The message says it all: where in another thread it was raised is of no use to a reader.
            raise error.with_traceback(None) from None

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(asyncio.wrap_future(self._inner)).__await__()

    def done(self) -> bool:
        return self._inner.done()


def blocking(submit: Callable[P, APIFuture[T]]) -> Callable[P, T]:
    """The same call, waited for."""

    @functools.wraps(submit)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return submit(*args, **kwargs).result()

    return call
