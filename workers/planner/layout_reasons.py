"""Explains the choice between layouts, and between ways to keep activations, in lines of text. Imports no torch."""

from collections.abc import Iterator, Sequence

from ..resources.machine import gigabytes
from .exchanges import SAMPLE_TOKENS, SAMPLES, TokenCost
from .layout_search import Candidate, PlannedLayout
from .speeds import Speeds

_MOST_SHOWN = 5


def reasons_of_choice(choice: PlannedLayout, speeds: Speeds) -> Iterator[str]:
    """Yields why the activations and the layout were chosen; nothing if there was no choice."""
    if len(choice.ways) > 1:
        yield f"--activations {choice.load.activations} {least_time(speeds)}"
        for way in choice.ways:
            total = microseconds(way.cost.seconds)
            yield f"  {way.activations} with {way.spec}: {total}, of which {', '.join(_terms(way.cost))}"
    yield from reasons_of(choice.candidates, speeds)


def least_time(speeds: Speeds) -> str:
    """Returns the end of a line before the ways to keep activations."""
    rate = float(f"{speeds.flops_per_second / 1e12:.3g}")
    return f"takes least time for a token (a device computes {rate:g} TFLOP/s, {speeds.rate_source}):"


def _terms(cost: TokenCost) -> Iterator[str]:
    yield f"products {microseconds(cost.compute_seconds)}"
    yield f"exchanges {microseconds(cost.pass_seconds)}"
    if cost.decode_seconds:
        yield f"sampling {microseconds(cost.decode_seconds)}"


def reasons_of(candidates: Sequence[Candidate], speeds: Speeds) -> Iterator[str]:
    """Yields why the first candidate was chosen; nothing if it has a single rank."""
    chosen = candidates[0]
    if chosen.spec.num_ranks == 1:
        return
    yield (
        f"{chosen.spec} takes least time for a token, of layouts of {chosen.spec.num_ranks} ranks that fit (over "
        f"{speeds.link.name}, {speeds.source}):"
    )
    fitting = [each for each in candidates if each.cost is not None]
    yield from (f"  {_time_of(each)}" for each in fitting[:_MOST_SHOWN])
    if len(fitting) > _MOST_SHOWN:
        yield f"  {len(fitting) - _MOST_SHOWN} more take longer"
    if others := candidates[len(fitting) :]:
        number = "1 does" if len(others) == 1 else f"{len(others)} do"
        yield f"  {number} not fit: {others[0].spec} needs {gigabytes(others[0].num_bytes)} at least"
    if chosen.cost is not None and chosen.cost.decode_seconds:
        yield f"  to sample: {SAMPLES} samples at a time, of {SAMPLE_TOKENS} tokens each"


def _time_of(candidate: Candidate) -> str:
    cost = candidate.cost
    assert cost is not None
    parts = [f"{gigabytes(candidate.num_bytes)} on each rank"]
    if cost.compute_seconds:
        sending = f"sends {_kilobytes(cost.sent)} in {microseconds(cost.pass_seconds)}"
        parts.append(f"a pass computes for {microseconds(cost.compute_seconds)} and {sending}")
    if cost.decode_seconds:
        parts.append(f"sampling sends {_kilobytes(cost.decode_sent)} and takes {microseconds(cost.decode_seconds)}")
    return f"{candidate.spec}: {', '.join(parts)}"


def _kilobytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e3:.1f} kB"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
