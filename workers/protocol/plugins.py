"""Folders that add rows to the core's tables. The core imports none of them, and runs where one is taken away."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_ROOT = __name__.rpartition(".workers.")[0]


def plugin_rows(module: str, table: str) -> Mapping[Any, Any]:
    """Returns the rows that a module adds to a table, none where its folder was taken away.

    Args:
        module: its name below the root package, such as "workers.drafts.rows".
    """
    name = f"{_ROOT}.{module}"
    try:
        found = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and a package that it needs is missing
        return {}
    return getattr(found, table)
