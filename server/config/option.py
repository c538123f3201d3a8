"""An option of the server: a field of a section, with what its annotation says. Reads, checks and shows its values."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ...schemas.models import DraftConfig
from ...workers.protocol.parallel_spec import ParallelSpec
from ...workers.protocol.worker_config import RoleGroup, ServedModel
from .option_values import (
    AUTO,
    ConfigError,
    TenantWeight,
    parse_bytes,
    parse_draft_shape,
    parse_layout,
    parse_role_group,
    parse_served_model,
    parse_weights,
    show_bytes,
)

Flags = Mapping[str, str | Sequence[str]]
"""Flags as typed, by option."""


@dataclass(frozen=True)
class Form:
    """The way in which the values of a type are written."""

    words: str
    """Name of the type in an error."""
    parse: Callable[[str, str], object] = lambda text, place: text
    """Takes a text and where it was read. Raises ValueError; a ConfigError if its own message is better."""
    metavar: str = ""
    numbers: tuple[Any, ...] = ()
    """Types of the numbers of the file that are accepted; the first is that of the value."""
    show: Callable[[Any], str] = str
    separator: str | None = None
    """Set for a flag that may be repeated; separates the entries in an environment variable."""
    is_joined: bool = False
    """A list in the file is read like its entries with commas between them."""


LayoutOrAuto = Annotated[
    ParallelSpec | None,
    Form(
        "a layout, such as tp=2, or auto",
        lambda text, place: None if text == AUTO else parse_layout(text, flag=place),
        "PARALLEL",
        is_joined=True,
    ),
]
"""A layout; None is auto."""
_BYTES = Form(
    "a number of bytes, such as 268435456 or 256MiB", lambda text, _: parse_bytes(text), "N", (int,), show_bytes
)
_FORMS: Mapping[Any, Form] = {
    int: Form("an integer", lambda text, _: int(text), "N", (int,)),
    float: Form("a number", lambda text, _: float(text), "N", (float, int), lambda value: f"{value:.12g}"),
    str: Form("a string"),
    Path: Form("a path", lambda text, _: Path(text), "FILE"),
    ParallelSpec: Form(
        "a layout, such as tp=2", lambda text, place: parse_layout(text, flag=place), "PARALLEL", is_joined=True
    ),
    DraftConfig: Form(
        "eagle3 or dflash, and fields of `draft`, such as eagle3,draft_vocab_size=32000", parse_draft_shape, "DRAFT"
    ),
    tuple[str, ...]: Form("a string, or a list of strings", separator=","),
    tuple[ServedModel, ...]: Form(
        "a list of NAME[=PATH_OR_HUB_ID]", lambda text, _: parse_served_model(text), "NAME[=SOURCE]", separator=","
    ),
    # Layouts and lists of devices contain commas.
    tuple[RoleGroup, ...]: Form(
        "a list of ROLES=LAYOUT[@DEVICE]", lambda text, _: parse_role_group(text), "GROUPS", separator=";"
    ),
    tuple[TenantWeight, ...]: Form(
        "weights, such as alice=2", lambda text, _: parse_weights(text), "WEIGHTS", is_joined=True
    ),
}


@dataclass(frozen=True)
class Option:
    """A field of a section that users set by flag, environment variable or file."""

    name: str
    default: object
    is_secret: bool
    """No message shows the value."""
    form: Form
    choices: tuple[str, ...]
    expected: str
    """Words for the values that it accepts; empty for all of its type."""
    values: TypeAdapter[Any]
    """Checks the values that it accepts."""
    help: str
    flag: str
    metavar: str
    common: bool = False
    """`--help` lists it, not only `--help-all`."""
    only_with: tuple[str, object] | None = None
    """An option and its value without which this one has no effect."""
    not_with: tuple[str, object] | None = None
    """An option and its value with which this one has no effect."""

    @property
    def shown_default(self) -> str:
        """The default as a user would write it; empty if there is none."""
        return "" if self.default in (None, ()) else self.form.show(self.default)

    @property
    def described(self) -> str:
        return f"{self.help} ({self.shown_default})" if self.shown_default else self.help

    def read(self, given: Any, place: str) -> object:
        """Parses a flag, a variable, or a value of the file. Raises ConfigError."""
        form, texts = self.form, [given] if isinstance(given, str) else given
        if type(given) in form.numbers:
            return form.numbers[0](given)
        is_text = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
        if is_text and form.separator is not None:
            return tuple(form.parse(text, place) for text in texts)
        if isinstance(given, str) or (is_text and form.is_joined):
            try:
                return form.parse(",".join(texts), place)
            except ConfigError:
                raise
            except ValueError:
                pass
        shown = "malformed" if self.is_secret else repr(given)
        raise ConfigError(f"{place} is {shown}: expected {form.words}")

    def accepts(self, value: object) -> bool:
        try:
            self.values.validate_python(value, strict=True)
        except ValidationError:
            return False
        return True

    def checked(self, value: Any) -> Any:
        """Returns the value. Raises ConfigError if it is none of the choices, or out of bounds."""
        if not self.accepts(value):
            shown = "malformed" if self.is_secret else repr(value)
            raise ConfigError(f"{self.name} is {shown}: expected {self.expected or self.form.words}")
        return value


@cache
def options_of(section: type[Any]) -> Mapping[str, Option]:
    hints = get_type_hints(section, include_extras=True)
    return {each.name: _option_of(each, hints[each.name]) for each in fields(section) if "help" in each.metadata}


def _option_of(entry: Field[Any], hint: Any) -> Option:
    kind, said = hint, []  # the type without `| None`, and what annotates it
    while get_origin(kind) in (Annotated, types.UnionType, Union):
        said += getattr(kind, "__metadata__", ())
        kind = get_args(kind)[0]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    usual = _BYTES if entry.name.endswith("_bytes") else _FORMS[str if choices else kind]
    form = next((each for each in said if isinstance(each, Form)), usual)
    bounds = (each.description for each in said if isinstance(each, FieldInfo))
    expected = " or ".join(choices) or next(bounds, None) or ""
    declared = {
        "flag": "--" + entry.name.replace("_", "-"),
        "metavar": "|".join(choices) or form.metavar or entry.name.split("_")[-1].upper(),
        **entry.metadata,
    }
    return Option(entry.name, entry.default, not entry.repr, form, choices, expected, TypeAdapter(hint), **declared)
