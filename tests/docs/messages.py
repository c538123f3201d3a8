"""Finds the messages of the code, to compare them with those that pages quote."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from .blocks import ROOT

PACKAGES = ("client", "schemas", "server", "workers")


@cache
def messages_of_the_code() -> list[str]:
    """Returns every string of the code, with ... in place of values."""
    trees = (ast.parse(path.read_text()) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [text for tree in trees for text in _texts(tree)]


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=parts):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in parts)
            case ast.Constant(value=str(text)):
                yield re.sub(r"%[sd.\d]*[sdf]", "...", text)


def is_message(quoted: str) -> bool:
    """True if the code has a string with these parts in their order; ... in the quotation stands for any text."""
    pattern = re.compile(".*".join(map(re.escape, quoted.split("..."))), re.DOTALL)
    return any(pattern.search(text) for text in messages_of_the_code())
