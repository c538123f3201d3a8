"""Follows the metrics of a run: draws curves on a terminal, and prints a line for each step elsewhere."""

import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

from ....client.rest import RestClient
from ....schemas.history import MetricSeries, RunMetrics

_USUAL = ("loss:mean", "unclipped_grad_l2:mean", "tokens_per_second", "learning_rate")
_CURVE_LINES = 6
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a Braille character by row and column."""
_BRAILLE = 0x2800
_LABEL_WIDTH = 10


class RunReader:
    """Reads the metrics of a run; each `read` asks only for what may be new."""

    def __init__(self, rest: RestClient, run: str) -> None:
        self._rest, self.run = rest, run
        self._training, self._logged = _Series(), _Series()

    def read(self) -> RunMetrics:
        """Returns the metrics of all steps so far."""
        more = True
        while more:
            found = self._rest.get_metrics(self.run, self._training.after, self._logged.after).result()
            ends = [self._training.add(found.training), self._logged.add(found.logged)]
            more = not all(ends)
        return RunMetrics(training=self._training.joined(), logged=self._logged.joined())


class _Series:
    """A series that arrives in parts. after: the cursor for the next one."""

    def __init__(self) -> None:
        self.after = -1
        self._parts: list[MetricSeries] = []

    def add(self, part: MetricSeries) -> bool:
        """Adds the part after `self.after`; returns whether it is the newest."""
        if part.last is not None:
            self._parts.append(part)
            self.after = part.last
        return part.next is None

    def joined(self) -> MetricSeries:
        parts = self._parts
        names = dict.fromkeys(name for part in parts for name in part.metrics)
        return MetricSeries(
            steps=[step for part in parts for step in part.steps],
            times=[at for part in parts for at in part.times],
            metrics={
                name: [value for part in parts for value in part.metrics.get(name, [None] * len(part.steps))]
                for name in names
            },
            next=None,
            last=parts[-1].last if parts else None,
        )


def watch_run(
    reader: RunReader, names: Sequence[str], last_step: int | None, interval: float, once: bool, as_json: bool
) -> None:
    """Shows what the run does until `last_step`, or until Ctrl-C. once: shows the steps so far, and returns."""
    if as_json or not sys.stdout.isatty():
        _print_steps(reader, names, last_step, interval, once, as_json)
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            found = reader.read()
            lines = [Text(line, style) for line, style in _chart(reader.run, found, names)]
            live.update(Group(*lines), refresh=True)
            if once or _has_reached(found, last_step):
                return
            time.sleep(interval)


def _print_steps(
    reader: RunReader, names: Sequence[str], last_step: int | None, interval: float, once: bool, as_json: bool
) -> None:
    """Prints a line for each step, as JSON or for people; metrics that the client logged have lines of their own."""
    num_training = num_logged = 0
    while True:
        found = reader.read()
        for kind, series, start in (("training", found.training, num_training), ("logged", found.logged, num_logged)):
            for number in range(start, len(series.steps)):
                print(_line(kind, series, number, names, as_json), flush=True)
        num_training, num_logged = len(found.training.steps), len(found.logged.steps)
        if once or _has_reached(found, last_step):
            return
        time.sleep(interval)


def _line(kind: str, series: MetricSeries, number: int, names: Sequence[str], as_json: bool) -> str:
    step, time = series.steps[number], series.times[number]
    values = {name: column[number] for name, column in series.metrics.items() if column[number] is not None}
    if as_json:
        return json.dumps({"series": kind, "step": step, "time": time, "metrics": values})
    shown = [name for name in names or (_USUAL if kind == "training" else values) if name in values]
    return f"step {step}  " + "  ".join(f"{name} {values[name]:.6g}" for name in shown)


def _has_reached(found: RunMetrics, last_step: int | None) -> bool:
    return last_step is not None and bool(found.training.steps) and found.training.steps[-1] >= last_step


def _chart(run: str, found: RunMetrics, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields lines with their styles: a title, and a curve of each metric with its last value."""
    terminal = shutil.get_terminal_size()
    width, num_curves = max(40, min(120, terminal.columns)), max(1, (terminal.lines - 2) // (_CURVE_LINES + 1))
    last = found.training.steps[-1] if found.training.steps else 0
    yield f"{run}  step {last}", "bold"
    for name, series in _drawn(found, names)[:num_curves]:
        values = series.metrics[name]
        newest = next((value for value in reversed(values) if value is not None), None)
        yield f"{name}  {newest:.6g}" if newest is not None else name, "cyan"
        for line in curve(series.steps, values, width, _CURVE_LINES):
            yield line, "green"


def _drawn(found: RunMetrics, names: Sequence[str]) -> list[tuple[str, MetricSeries]]:
    """Returns the metrics to draw: those that were named, else the loss, the client's own, and the usual ones."""
    chosen = names or dict.fromkeys((_USUAL[0], *found.logged.metrics, *_USUAL))
    both = (found.training, found.logged)
    return [(name, series) for name in chosen for series in both if name in series.metrics]


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
