"""What a benchmark reports: figures, and lines that say what was asked for and whether it was reached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Row = Mapping[str, str | float | None]
"""One line of a table: column -> cell."""


@dataclass(frozen=True)
class Line:
    what: str
    value: float
    sense: Literal["at least", "at most"]
    wanted: float

    @property
    def passed(self) -> bool:
        return self.value >= self.wanted if self.sense == "at least" else self.value <= self.wanted

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.what}: {self.value:.2f}, {self.sense} {self.wanted:g} is asked for"

    def as_json(self) -> Row:
        return vars(self) | {"passed": self.passed}


@dataclass(frozen=True)
class Section:
    """One benchmark's outcome. table: empty where nothing was run. notes: what the figures mean, and what of the
    setting they depend on."""

    title: str
    table: Sequence[Row]
    lines: Sequence[Line]
    notes: Sequence[str] = field(default=())

    def __str__(self) -> str:
        """Markdown, as docs/performance.md takes it."""
        lines = [f"- {line}" for line in self.lines]
        return "\n".join([f"\n## {self.title}\n", *self.notes, "", *_markdown(self.table), "", *lines])

    def as_json(self) -> dict[str, object]:
        table, lines = [dict(row) for row in self.table], [line.as_json() for line in self.lines]
        return {"title": self.title, "notes": list(self.notes), "table": table, "lines": lines}


def _markdown(table: Sequence[Row]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left, the others to the right."""
    if not table:
        return []
    cells = [list(table[0]), *([_shown(value) for value in row.values()] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    rows = [" | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]
    head, *body = [f"| {row} |" for row in rows]
    return [head, f"|{rule}|", *body]


def _shown(value: str | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
