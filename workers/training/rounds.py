"""Rounds: which parts of a pass run together."""

from collections.abc import Callable, Iterator, Sequence

from ..protocol.verbs import Part


def rounds(
    parts: Sequence[Part], most_runs: int, runs_alone: Callable[[str], bool] = lambda _: False
) -> Iterator[list[int]]:
    """Indices, every part's once. A round's parts are of at most `most_runs` runs, all with or all without gradients.

    Parts with gradients of one run go to different rounds, in their order, for they share the adapter's scratch. Those
    without share nothing. runs_alone: whether only parts of that one run may be together.
    """
    waiting = list(range(len(parts)))
    while waiting:
        chosen = _next_round(parts, waiting, most_runs, runs_alone)
        yield chosen
        waiting = sorted(set(waiting).difference(chosen))


def _next_round(
    parts: Sequence[Part], waiting: list[int], most_runs: int, runs_alone: Callable[[str], bool]
) -> list[int]:
    """The first of those that wait, and all that may run beside it."""
    first = parts[waiting[0]].request
    runs: set[str] = set()
    chosen = []
    for i in waiting:
        run_id = parts[i].request.model_id
        if run_id in runs:
            has_room = first.forward_only
        else:
            has_room = not runs or (len(runs) < most_runs and not (runs_alone(run_id) or runs_alone(first.model_id)))
        if has_room and parts[i].request.forward_only == first.forward_only:
            runs.add(run_id)
            chosen.append(i)
    return chosen
