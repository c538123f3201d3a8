"""Docstrings, comments and messages are plain English: no fragments, and none of the words that STYLE replaces."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client", "examples", "schemas", "server", "tests", "workers")

OPENERS = """Of As What Where Whose Who Which In That How Why Whether Not Nothing None Else For By With To From Behind
Beyond It They Its Then So And But Also"""
"""A docstring that opens with one of these has no subject, or one that the reader has not met."""

REFUSED = {
    "told|tell|tells|telling": "report, say",
    "come|comes|coming|came": "arrive, reach, follow",
    "goes on|go on|going on|went on|gone on": "continue",
    "anew|made again|makes? again": "rebuild, new",
    "once more": "again, retry",
    "lets? go|letting go": "release",
    "puts? off|putting off": "throttle, defer",
    "is there|are there": "exists, is available",
    "who has": "the holder",
    "is to be|are to be|was to be|were to be": "must, will be",
    "besides?": "next to, in addition to",
    "whose it is": "owner",
    "nobody|whoever|whatever": "no one, the caller that, any",
}
"""Words (regular expressions) -> what to say instead."""

OPENER = re.compile(rf"({'|'.join(OPENERS.split())})\b")
WORD = re.compile(rf"\b({'|'.join(REFUSED).replace(' ', chr(92) + 's+')})\b", re.IGNORECASE)
QUOTED = re.compile(r"`[^`]*`|https?://\S+|\"[^\"]*\"")


def problems(source: str) -> Iterator[str]:
    """One line for each rule that a module breaks, with its line number."""
    tree = ast.parse(source)
    docstrings = dict(texts_alone(tree))
    for line, text in docstrings.items():
        if match := OPENER.match(text):
            yield f"{line}: a docstring opens with {match[0]}: {text.splitlines()[0]}"
    for line, text in [*docstrings.items(), *comments(source), *messages(tree)]:
        for match in WORD.finditer(QUOTED.sub("", text)):
            yield f"{line}: {match[0]}: say {instead(match[0])}"


def texts_alone(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of modules, classes, functions and attributes: strings that are statements."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, inspect.cleandoc(text)


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings of four words and more that are no docstrings."""
    expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text.count(" ") > 2 and id(node) not in expressions:
                yield node.lineno, text


def instead(word: str) -> str:
    return next(words for refused, words in REFUSED.items() if re.fullmatch(refused, " ".join(word.lower().split())))


def modules() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if not path.name.endswith("_pb2.py") and path != Path(__file__)]


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_prose_is_plain(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in modules()
        if path.is_relative_to(ROOT / package)
        for problem in problems(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_what_is_refused_is_found() -> None:
    source = (
        '"""Of a run."""\n\n# Put off until it comes.\nraise ValueError("nobody has the lease")\nx = "is `told` here"\n'
    )
    assert [problem.split(": ")[1] for problem in problems(source)] == [
        "a docstring opens with Of",
        "Put off",
        "comes",
        "nobody",
    ]
