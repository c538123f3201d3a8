"""The commands of docs/guides/cookbook.md."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from ...docs.blocks import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "guides" / "cookbook.md"


@dataclass(frozen=True)
class Command:
    """One `python -m MODULE NAME=VALUE ...`."""

    module: str
    options: dict[str, str]


def commands_in(blocks: list[Block]) -> Iterator[Command]:
    for block in blocks:
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["python", "-m"] and words[2].startswith("tinker_cookbook."):
                yield Command(words[2], dict(word.split("=", 1) for word in words[3:]))


COMMANDS = list(commands_in(blocks_of(PAGE)))


def options_of(module: str) -> dict[str, str]:
    """Returns the options with which the page first starts a module."""
    return next(command.options for command in COMMANDS if command.module == module)
