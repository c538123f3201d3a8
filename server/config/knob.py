"""Declares knobs: the kinds of values that they take, the conditions on them, and what `--help` says."""

import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Unpack

from .knob_values import (
    AUTO,
    BYTE_UNITS,
    ConfigError,
    parse_bytes,
    parse_draft_shape,
    parse_layout,
    parse_role_group,
    parse_served_model,
    parse_weights,
    show_draft_shape,
)


@dataclass(frozen=True)
class ValueKind:
    """The form in which a knob's value is written.

    words: describe the kind in an error.
    parse: takes a text and where it was read. Raises ValueError; a ConfigError if its own message is better.
    number: type of the TOML numbers that are accepted.
    separator: set for a knob whose flag may be repeated; separates the entries in an environment variable.
    is_joined: a list in the file is read like its entries with commas between them.
    """

    words: str
    metavar: str = ""
    parse: Callable[[str, str], object] = lambda text, place: text
    number: type[int] | type[float] | None = None
    show: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()
    separator: str | None = None
    is_joined: bool = False

    def read(self, text: str | Sequence[str], place: str) -> object:
        """Parses a flag, a variable, or one or more strings of the file. Raises ConfigError."""
        if self.separator is not None:
            return tuple(self.parse(entry, place) for entry in ([text] if isinstance(text, str) else text))
        if self.is_joined and not isinstance(text, str):
            text = ",".join(text)
        if not isinstance(text, str):
            raise self.refusal(list(text), place)
        try:
            return self.parse(text, place)
        except ConfigError:
            raise
        except ValueError:
            raise self.refusal(text, place) from None

    def refusal(self, value: object, place: str) -> ConfigError:
        return ConfigError(f"{place} is {value!r}: expected {self.words}")


def _show_bytes(value: int) -> str:
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "") if value % BYTE_UNITS[unit] == 0)
    return f"{value // BYTE_UNITS[unit]}{unit}"


INTEGER = ValueKind("an integer", "N", lambda text, place: int(text), number=int)
NUMBER = ValueKind("a number", "N", lambda text, place: float(text), number=float, show=lambda value: f"{value:.12g}")
BYTES = ValueKind(
    "a number of bytes, such as 268435456 or 256MiB",
    "N",
    lambda text, place: parse_bytes(text),
    number=int,
    show=_show_bytes,
)
Bytes = Annotated[int, BYTES]
TEXT = ValueKind("a string")
TEXTS = ValueKind("a string, or a list of strings", separator=",")
PATH = ValueKind("a path", "FILE", lambda text, place: Path(text))
BASE_MODELS = ValueKind(
    "a list of NAME[=PATH_OR_HUB_ID]", "NAME[=SOURCE]", lambda text, place: parse_served_model(text), separator=","
)
# Layouts and lists of devices contain commas.
ROLE_GROUPS = ValueKind(
    "a list of ROLES=LAYOUT[@DEVICE]", "GROUPS", lambda text, place: parse_role_group(text), separator=";"
)
LAYOUT = ValueKind(
    "a layout, such as tp=2", "PARALLEL", lambda text, place: parse_layout(text, flag=place), is_joined=True
)
LAYOUT_OR_AUTO = ValueKind(
    "a layout, such as tp=2, or auto",
    "PARALLEL",
    lambda text, place: None if text == AUTO else parse_layout(text, flag=place),
    is_joined=True,
)
DRAFT = ValueKind(
    "eagle3 or dflash, and fields of `draft`, such as eagle3,draft_vocab_size=32000",
    "DRAFT",
    parse_draft_shape,
    show=show_draft_shape,
)
WEIGHTS = ValueKind("weights, such as alice=2", "WEIGHTS", lambda text, place: parse_weights(text), is_joined=True)


@dataclass(frozen=True)
class ValueCheck:
    """A condition on a knob's value, and the words that describe it in an error."""

    holds: Callable[[object], bool]
    words: str


def _number(holds: Callable[[float], bool], words: str) -> ValueCheck:
    return ValueCheck(lambda value: isinstance(value, int | float) and holds(value), words)


def between(low: float, high: float) -> ValueCheck:
    return _number(lambda value: low <= value <= high, f"from {low:g} to {high:g}")


def above(low: float) -> ValueCheck:
    return _number(lambda value: low < value < math.inf, f"above {low:g}")


def matches(pattern: str, words: str) -> ValueCheck:
    return ValueCheck(lambda value: re.fullmatch(pattern, str(value)) is not None, words)


POSITIVE = _number(lambda value: 1 <= value < math.inf, "at least 1")
NOT_NEGATIVE = _number(lambda value: 0 <= value < math.inf, "at least 0")
SHARE = _number(lambda value: 0 < value <= 1, "above 0, 1 at the most")
_DEVICE = "(auto|cpu|cuda(:[0-9]+)?)"
DEVICES = matches(
    f"{_DEVICE}(,{_DEVICE})*",
    "auto, cpu, cuda, cuda:N, or a comma-separated list with one of them for each base model",
)
URLS = matches(
    r"https?://[^\s,/]+[^\s,]*(,https?://[^\s,/]+[^\s,]*)*",
    "http://HOST:PORT, or a comma-separated list with one for each base model",
)
ONE_URL = matches(r"https?://[^\s/?#]+/?", "http://HOST:PORT or https://HOST:PORT")
DATABASE_URL = matches(r"postgresql(\+psycopg)?://[^\s]+", "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE")


class KnobOptions(TypedDict, total=False):
    """Parts of a knob's declaration that most knobs leave out.

    common: `--help` shows the knob, not only `--help-all`.
    secret: no message shows the value.
    only_with: (knob, value), the only mode in which this knob has an effect.
    not_with: (knob, value), a mode in which this knob has no effect.
    """

    metavar: str
    check: ValueCheck
    common: bool
    secret: bool
    only_with: tuple[str, object]
    not_with: tuple[str, object]
    flag: str


@dataclass(frozen=True)
class Knob:
    """A field of a section with what it was declared with; see KnobOptions."""

    name: str
    default: object
    kind: ValueKind
    help: str
    metavar: str
    flag: str
    check: ValueCheck | None = None
    common: bool = False
    secret: bool = False
    only_with: tuple[str, object] | None = None
    not_with: tuple[str, object] | None = None

    def check_value(self, value: object) -> None:
        """Raises ConfigError if the value is not one of the choices, or breaks the knob's condition."""
        if value is None and self.default is None:
            return
        if self.kind.choices and value not in self.kind.choices:
            raise ConfigError(f"{self.name} is {value!r}: expected {' or '.join(self.kind.choices)}")
        if self.check is not None and not self.check.holds(value):
            shown = "malformed" if self.secret else repr(value)
            raise ConfigError(f"{self.name} is {shown}: expected {self.check.words}")

    @property
    def described(self) -> str:
        """The help with the default as a user would write it."""
        return self.help if self.default in (None, ()) else f"{self.help} ({self.kind.show(self.default)})"


Value = TypeVar("Value")


def knob(default: Value, help: str, **options: Unpack[KnobOptions]) -> Value:
    """Returns a field of a section with its default; its metadata declare the knob."""
    return field(default=default, metadata={"help": help, **options}, repr=not options.get("secret", False))


@dataclass(frozen=True)
class Section:
    """Base class of the sections of ServerConfig: checks every value. Raises ConfigError."""

    def __post_init__(self) -> None:
        for entry in knobs_of(type(self)).values():
            entry.check_value(getattr(self, entry.name))


@cache
def knobs_of(section: type[Section]) -> Mapping[str, Knob]:
    """Returns the knobs of a section by name."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {entry.name: _knob_of(entry, _kind_of(hints[entry.name])) for entry in fields(section)}


def _knob_of(entry: Field[Any], kind: ValueKind) -> Knob:
    inferred: dict[str, Any] = {
        "metavar": "|".join(kind.choices) or kind.metavar or entry.name.split("_")[-1].upper(),
        "flag": "--" + entry.name.replace("_", "-"),
    }
    return Knob(entry.name, entry.default, kind, **(inferred | entry.metadata))


def _kind_of(hint: Any) -> ValueKind:
    """Returns the kind that the type is annotated with or implies; INTEGER for `int | None`."""
    if typing.get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    if typing.get_origin(hint) is Literal:
        return ValueKind("a string", choices=typing.get_args(hint))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _kind_of(typing.get_args(hint)[0])
    return {int: INTEGER, float: NUMBER, str: TEXT, Path: PATH}[hint]
