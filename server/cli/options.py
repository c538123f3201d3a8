"""Options that several commands share, added to the signature from which typer builds a command."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from ..config.option import Option  # needs pydantic, which takes long to import

Status = int | None
"""The exit status that a command returns; None for 0."""

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def new_app(help: str | None = None) -> typer.Typer:
    """Returns an app for one module's commands. Help is plain text: rich would double the time of --help."""
    names = {"help_option_names": ["--help", "-h"]}
    return typer.Typer(help=help, rich_markup_mode=None, add_completion=False, context_settings=names)


def flag(name: str, spelled: str, help: str, metavar: str | None = None, kind: Any = str | None) -> inspect.Parameter:
    """Returns an optional parameter, None (False for a bool) if it is not given."""
    shown = typer.Option(spelled, help=help, metavar=metavar, show_default=False)
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown])


def server_flag(option: "Option", help: str | None = None) -> inspect.Parameter:
    kind = str | None if option.form.separator is None else list[str] | None
    return flag(option.name, option.flag, help or option.described, option.metavar, kind)


def with_options(
    function: Callable[..., Status], extra: Sequence[inspect.Parameter], joined: Callable[[Mapping[str, Any]], Any]
) -> Callable[..., Status]:
    """Returns a command that takes the extra options and calls `function` with `joined` of their values first."""
    _, *own = inspect.signature(function, eval_str=True).parameters.values()

    @functools.wraps(function)
    def command(**values: Any) -> Status:
        taken = {each.name: values.pop(each.name) for each in extra}
        return function(joined(taken), **values)

    command.__signature__ = inspect.Signature([*own, *extra])  # pyright: ignore[reportAttributeAccessIssue]
    return command
