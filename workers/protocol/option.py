"""Declares the options of the server: fields of configs, whose type says what values they may have.

server/config makes flags, environment variables, keys of the TOML file and the reference of them, and checks the values
that it reads. The configs themselves check nothing.
"""

from dataclasses import field, fields
from typing import Annotated, Any, TypeVar

from pydantic import Field

Value = TypeVar("Value")


def option(default: Value, help: str, secret: bool = False, **more: Any) -> Value:
    """Declares an option: `help` is its line in `--help-all`, `more` are fields of Option (server/config)."""
    return field(default=default, metadata={"help": help, **more}, repr=not secret)


def between(low: float, high: float) -> Any:
    return Field(ge=low, le=high, description=f"from {low:g} to {high:g}")


def above(low: float) -> Any:
    return Field(gt=low, allow_inf_nan=False, description=f"above {low:g}")


def at_least(low: float) -> Any:
    return Field(ge=low, allow_inf_nan=False, description=f"at least {low:g}")


def matching(pattern: str, words: str) -> Any:
    return Field(pattern=f"^(?:{pattern})$", description=words)


# The description of a Field says in an error which values are expected.
Positive = Annotated[int, Field(ge=1, description="at least 1")]
NotNegative = Annotated[int, Field(ge=0, description="at least 0")]
NotNegativeNumber = Annotated[float, at_least(0)]
Duration = Annotated[float, above(0)]
Share = Annotated[float, Field(gt=0, le=1, description="above 0, 1 at the most")]
_DEVICE = "(auto|cpu|cuda(:[0-9]+)?)"
Devices = Annotated[
    str,
    matching(
        f"{_DEVICE}(,{_DEVICE})*",
        "auto, cpu, cuda, cuda:N, or a comma-separated list with one of them for each base model",
    ),
]


def values_of(kind: type[Any], config: object) -> dict[str, Any]:
    """Returns the fields of `kind` in a config whose class extends it."""
    return {each.name: getattr(config, each.name) for each in fields(kind)}
