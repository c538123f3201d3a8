"""Prints what commands found: JSON for programs, tables for people, and on a terminal a spinner for what takes long.

Results go to standard output, everything else to standard error.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except for tabs and ends of lines."""
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, default=str))


def aligned(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yields the lines of a table with columns of equal width."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def print_table(head: tuple[str, ...], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table: with colours and folded cells on a terminal, and whole lines for a file or a pipe. Titles in
    `head` may be empty."""
    cells = [tuple("-" if cell is None else _shown(cell) for cell in row) for row in rows]
    if not sys.stdout.isatty():
        lines = list(aligned(head, cells))
        print("\n".join(lines if any(head) else lines[1:]))
        return
    from rich.console import Console  # imported late, as it takes a tenth of a second
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold cyan", show_header=any(head))
    for title in head:
        table.add_column(title, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))  # as Text, since a run's id may look like the name of an emoji, :train:
    Console().print(table)


def _shown(cell: object) -> str:
    return f"{cell.astimezone():%Y-%m-%d %H:%M}" if isinstance(cell, datetime) else for_terminal(str(cell))


def for_terminal(text: str) -> str:
    """Returns the text without characters by which a model or another user could steer the terminal, if this is one."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text


@contextmanager
def spinner(words: str) -> Iterator[Callable[[int, int], None]]:
    """Shows on a terminal what the program does, and for how long. Yields a function, for any thread, that shows how
    much is done: the bytes that are and those of all."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(words, total=None)
        progress.console.show_cursor(True)  # a process that is killed would leave the terminal without one
        yield lambda done, total: progress.update(task, description=f"{words}{_share(done, total)}")


def _share(done: int, total: int) -> str:
    return f": {100 * done // total} % of {size(total)}" if done < total else ""


def size(num_bytes: int | None) -> str | None:
    """Returns a number of bytes as people read it; None for None."""
    if num_bytes is None or num_bytes < 1024:
        return None if num_bytes is None else f"{num_bytes} B"
    unit, name = next(each for each in _UNITS if num_bytes >= each[0])
    return f"{num_bytes / unit:.1f} {name}"


def print_error(command: str, message: str, status: int, as_json: bool) -> None:
    """Prints one line to standard error; for programs that asked for JSON also an object to standard output."""
    print(f"trainhouse{command and f' {command}'}: error: {message}", file=sys.stderr)
    if as_json:
        print_json({"error": message, "status": status})
