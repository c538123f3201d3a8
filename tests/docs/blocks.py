"""Finds the code blocks of a page, and the comments that say how they are tested: docs/writing.md."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN, READ = ("python", "bash"), ("sh", "toml", "yaml", "json")
OUTPUT = ("", "text", "markdown", "nginx")
"""Languages of blocks that are run, that are parsed, and of others: output, and files of other programs."""

_BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>[^`\n]*)\n(?P<text>.*?)^(?P=indent)(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_HIDDEN = re.compile(r"^<!-- (?P<language>python|bash)\n(?P<text>.*?)^-->$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^\n]+) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A block of code.

    line: number of its first line in the page.
    not_run: the reason why it is neither run nor parsed, if it is not.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page.parent.name}/{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Returns the page's blocks, those in comments too, from top to bottom."""
    return sorted(_blocks(page, page.read_text()), key=lambda block: block.line)


def _blocks(page: Path, text: str) -> Iterator[Block]:
    shown = list(_BLOCK.finditer(text))
    for found in shown:
        marked = _NOT_RUN.search(text, 0, found.start())
        reason = marked["reason"] if marked else None
        language = found["language"].partition(" ")[0]
        yield Block(page, _line(text, found.start("text")), language, textwrap.dedent(found["text"]), reason)
    for found in _HIDDEN.finditer(text):
        if not any(block.start() < found.start() < block.end() for block in shown):
            yield Block(page, _line(text, found.start("text")), found["language"], found["text"])


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
