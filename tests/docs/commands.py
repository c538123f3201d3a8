"""Finds the `trainhouse` commands of a shell block and parses them as the real command line does."""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import PurePath
from typing import Any

from trainhouse.server.cli.commands import COMMANDS, app
from trainhouse.server.config.load import load_config
from trainhouse.server.config.server_config import OPTIONS
from typer.main import get_command

VARIABLE = re.compile(r"TRAINHOUSE_[A-Z_]+")
VLLM = "/opt/vllm/bin/python"
SEPARATORS = re.compile(r"[;&|()<>\n]+")


def commands_of(script: str) -> Iterator[list[str]]:
    """Yields the arguments of each `trainhouse` in a script, also those that run in a container."""
    for words in _simple_commands(script):
        for index, word in enumerate(words[:-1]):
            if PurePath(word).name == "trainhouse" and words[index + 1] in COMMANDS:
                yield words[index + 1 :]
                break
        else:
            if words and PurePath(words[0]).name == "trainhouse":
                yield words[1:]


def _simple_commands(script: str) -> Iterator[list[str]]:
    without_comments = re.sub(r"(^|[ \t])#[^\n]*", "", script.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(without_comments, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    for is_separator, words in groupby(lexer, lambda word: SEPARATORS.fullmatch(word) is not None):
        if not is_separator:
            yield list(words)


def variables_of(script: str) -> dict[str, str]:
    """Returns the TRAINHOUSE_* variables that the script sets."""
    words = (word for words in _simple_commands(script) for word in words)
    return {name: value for name, _, value in (word.partition("=") for word in words) if VARIABLE.fullmatch(name)}


def parse_command(arguments: list[str], environment: Mapping[str, str]) -> None:
    """Raises an error if the command line would refuse the arguments.

    "..." stands for any value, or for more options. The directory of a model, and of vLLM, need not exist.
    """
    context, command = None, get_command(app)
    if arguments == ["--version"]:  # which prints and exits
        return
    rest = [re.sub(r"=/models/\S+", "=/", word.replace(VLLM, sys.executable)) for word in _filled(arguments)]
    name = "trainhouse"
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "resolve_command"):
            break
        found, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        name = str(found)
    if name == "serve":
        assert not context.args, f"serve has no {context.args[0]}"
        given = {name: value for name, value in context.params.items() if value and name in OPTIONS}
        some = {"base_models": "M"} if "..." in arguments else {}
        load_config(some | given, environment, None)


def flags() -> set[str]:
    """Returns the flags of all commands."""
    return {*(option.flag for option in OPTIONS.values()), *_flags("trainhouse", get_command(app), None), "--help-all"}


def _flags(name: str, command: Any, parent: Any) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    for parameter in command.get_params(context):
        yield from (*parameter.opts, *parameter.secondary_opts)
    for each in getattr(command, "commands", {}):
        yield from _flags(each, command.resolve_command(context, [each])[1], context)


def _filled(arguments: list[str]) -> Iterator[str]:
    for previous, word in zip(["", *arguments], arguments, strict=False):
        if word != "...":
            yield word
        elif previous.startswith("--"):
            yield "any"
