"""Refuses arguments by the names that other libraries use, with what to write here."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def suggests(**remedies: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function refuse these keyword arguments with a TypeError that says what to write instead.

    Args:
        remedies: what other libraries name an argument -> what to write here.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name in remedies:
                    raise TypeError(f"{function.__name__} has no argument {name}: write {remedies[name]}")
            return function(*args, **kwargs)

        return call

    return decorate
