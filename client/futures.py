"""Futures of operations: block on `.result()`, or await them in any event loop."""

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable, Generator
from typing import Any, Generic, ParamSpec, TypeVar

from .errors import TrainhouseError

T = TypeVar("T")
P = ParamSpec("P")


class APIFuture(Generic[T]):
    """The future result of an operation, which runs whether or not the caller waits: a timeout does not cancel it."""

    def __init__(self, inner: concurrent.futures.Future[T]) -> None:
        self._inner = inner

    def result(self, timeout: float | None = None) -> T:
        """Blocks until the operation is finished and returns its result.

        Args:
            timeout: in seconds; None waits forever.
        Raises:
            TimeoutError: the operation is not finished in time; it continues.
            RequestFailedError: the operation failed.
            APIStatusError: the server refused the request.
            APIConnectionError: the server could not be reached.
        """
        try:
            return self._inner.result(timeout)
        except TrainhouseError as error:
            # The traceback is that of the client's thread, which does not help the user.
            raise error.with_traceback(None) from None

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(asyncio.wrap_future(self._inner)).__await__()

    def done(self) -> bool:
        return self._inner.done()


def blocking(submit: Callable[P, APIFuture[T]]) -> Callable[P, T]:
    """Returns a variant of `submit` that waits for the result."""

    @functools.wraps(submit)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            future = submit(*args, **kwargs)
        except TypeError as error:  # of a wrong argument: the user has not called `submit`
            error.args = (str(error).replace(submit.__name__, submit.__name__.removesuffix("_async")),)
            raise
        return future.result()

    return call
