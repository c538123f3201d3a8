"""Values that a request does not take, in words."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from reprlib import repr as shortened
from typing import Any

from pydantic import ValidationError


@contextmanager
def refused_in_words() -> Iterator[None]:
    """Raises ValueError where pydantic refuses what the block makes: each field, its value and what may be there."""
    try:
        yield
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # Where a field may be of several types, each tells what is wrong with it.
        telling = [each for each in errors if not each["type"].endswith("_type")] or errors
        raise ValueError("; ".join(map(_words, telling))) from None


def _words(error: Mapping[str, Any]) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    place = ".".join(str(part) for part in error["loc"] if isinstance(part, int) or _is_field(part))
    meaning = error["msg"].replace("Input should", "it should", 1)
    return f"{place} is {shortened(error['input'])}: {meaning}"


def _is_field(part: str) -> bool:
    """And no branch of a type."""
    return part.isidentifier() and part.islower()
