"""The errors that a user gets: an HTTP status, a failed future, or for a wrong argument a ValueError."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

Category = Literal["user", "server", "unknown"]


class OperationError(Exception):
    """An accepted operation failed; its future returns this message and category.

    `user`: the request was wrong, and the message names the value and the remedy. `server`: the server failed.
    It is sent between processes, so it holds nothing but its two arguments.
    """

    def __init__(self, message: str, category: Category = "user") -> None:
        super().__init__(message, category)
        self.message = message
        self.category: Category = category

    def __str__(self) -> str:
        return self.message


class RequestError(Exception):
    """A request is refused at once with an HTTP status (4xx, or 503 if it may succeed later)."""

    def __init__(self, message: str, status: int = 400, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, status, retry_after_seconds)
        self.message = message
        self.status = status
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return self.message


class InvalidBody(RequestError):
    """The body violates the protocol. The message quotes values of it, perhaps training data: it is not for the log."""


class UnknownField(InvalidBody):
    """The body has a field that this version does not know.

    changes_results: it is part of a datum, a tensor, a loss, an optimizer's or a sampling message.
    """

    def __init__(self, message: str, changes_results: bool) -> None:
        super().__init__(message)
        self.args = message, changes_results
        self.changes_results = changes_results


_MAX_REPORTED = 5

Error = TypeVar("Error", bound=Mapping[str, Any])

# pydantic appends the name of the type to the location of a field that accepts several types, "[key]" to that of a key.
_TYPE_NAME = re.compile(r"bool|dict|float|int|list|str|constrained-\w+|[a-z]*\[.*\]|([A-Z][a-z]+){2,}")


@contextmanager
def readable_validation_errors() -> Iterator[None]:
    """Converts a ValidationError of the block to a ValueError that names the first wrong fields, their values and the
    allowed ones."""
    try:
        yield
    except ValidationError as error:
        words = list(dict.fromkeys(map(_words, telling_errors(error.errors(include_url=False)))))
        more = [f"and {len(words) - _MAX_REPORTED} more"] if len(words) > _MAX_REPORTED else []
        raise ValueError("; ".join([*words[:_MAX_REPORTED], *more])) from None


def telling_errors(errors: Sequence[Error]) -> list[Error]:
    """Leaves out errors that say less than others: a field that accepts several types yields one per type, and those
    from inside the value are more helpful."""
    places = [place_of(each) for each in errors if _is_specific(each)]
    looked_into = {place[:end] for place in places for end in range(len(place) + 1)}
    return [each for each in errors if _is_specific(each) or place_of(each) not in looked_into]


def _is_specific(error: Mapping[str, Any]) -> bool:
    return not error["type"].endswith("_type")


def _words(error: Mapping[str, Any]) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "unknown_name":
        return error["msg"]
    place = ".".join(map(str, place_of(error)))
    return f"{place} is {shortened(error['input'])}: {expected(error)}" if place else expected(error)


def expected(error: Mapping[str, Any]) -> str:
    """Rewords pydantic's message to follow the value: "it should be a valid integer"."""
    return re.sub(r"^(Input|String|List|Dictionary|Tuple) should", "it should", error["msg"]).replace(
        " after validation", ""
    )


def place_of(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Returns the location of an error as field names, keys and list indices, without pydantic's type names."""
    return tuple(part for part in error["loc"] if isinstance(part, int) or not _TYPE_NAME.fullmatch(part))


if TYPE_CHECKING:  # by pydantic's metaclass, type checkers know the fields
    from pydantic._internal._model_construction import ModelMetaclass as ReadableErrors
else:

    class ReadableErrors(type(BaseModel)):
        """Metaclass of the models that users construct: a wrong argument is a readable ValueError or TypeError."""

        def __call__(cls, *args, **fields):
            if args:
                first = next(iter(cls.model_fields))
                raise TypeError(f"{cls.__name__} takes its fields by name: write {cls.__name__}({first}=...)")
            with readable_validation_errors():
                return super().__call__(**fields)
