"""Rounds: which parts of a pass run together."""

from collections.abc import Iterator, Sequence

from ..verbs import Part


def rounds(parts: Sequence[Part], most_runs: int) -> Iterator[list[int]]:
    """Indices, every part's once. A round's parts are of at most `most_runs` runs, all with or all without gradients.

    Parts with gradients of one run go to different rounds, in their order, for they share the adapter's scratch. Those
    without share nothing.
    """
    waiting = list(range(len(parts)))
    while waiting:
        chosen = _next_round(parts, waiting, most_runs)
        yield chosen
        waiting = sorted(set(waiting).difference(chosen))


def _next_round(parts: Sequence[Part], waiting: list[int], most_runs: int) -> list[int]:
    """The first of those that wait, and all that may run beside it."""
    forward_only = parts[waiting[0]].request.forward_only
    runs: set[str] = set()
    chosen = []
    for i in waiting:
        run_id = parts[i].request.model_id
        has_room = forward_only if run_id in runs else len(runs) < most_runs
        if has_room and parts[i].request.forward_only == forward_only:
            runs.add(run_id)
            chosen.append(i)
    return chosen
