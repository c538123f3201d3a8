"""Curves in the terminal: a line chart of Braille dots, two by four in each character."""

import itertools
import math
from collections.abc import Iterator, Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a Braille character by row and column."""
_BRAILLE = 0x2800
_LABEL_WIDTH = 10


def curve(steps: Sequence[int], values: Sequence[float | None], width: int, height: int) -> Iterator[str]:
    """Yields the lines of a chart of finite values by step, with the range at its left and the steps below it.

    Args:
        width, height: of the whole chart in characters; at least 14 and 3.
    """
    points = [
        (step, value) for step, value in zip(steps, values, strict=True) if value is not None and math.isfinite(value)
    ]
    if not points:
        yield "no values yet"
        return
    columns, rows = width - _LABEL_WIDTH - 1, height - 1
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    cells = [[0] * columns for _ in range(rows)]
    dots = [
        (
            _scaled(step, first, last, 2 * columns - 1),
            4 * rows - 1 - _scaled(value, low, high, 4 * rows - 1),
        )
        for step, value in points
    ]
    for x, y in _joined(dots):
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    for number, row in enumerate(cells):
        label = f"{high:.4g}" if number == 0 else f"{low:.4g}" if number == rows - 1 else ""
        yield f"{label:>{_LABEL_WIDTH}} " + "".join(chr(_BRAILLE + bits) for bits in row)
    ends = f"step {first}", str(last)
    yield " " * (_LABEL_WIDTH + 1) + ends[0] + ends[1].rjust(columns - len(ends[0]))


def _scaled(value: float, low: float, high: float, most: int) -> int:
    return most // 2 if high == low else round((value - low) / (high - low) * most)


def _joined(dots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the dots and those on the straight lines between them."""
    yield from dots[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(dots):
        num = max(abs(x1 - x0), abs(y1 - y0), 1)
        yield from ((x0 + (x1 - x0) * k // num, y0 + (y1 - y0) * k // num) for k in range(1, num + 1))
