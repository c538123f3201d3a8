"""Decides which parts of a pass run together, as a round."""

from collections.abc import Callable, Iterator, Sequence

from ..protocol.calls import OperationPart


def rounds(
    parts: Sequence[OperationPart], max_runs: int, is_exclusive: Callable[[str], bool] = lambda _: False
) -> Iterator[list[int]]:
    """Yields the rounds as indices of their parts; every part is in exactly one.

    A round has parts of at most `max_runs` runs, all with or all without gradients. Parts of one run that need
    gradients go to different rounds, in order, because they share the adapter's scratch. Those without share nothing.

    Args:
        is_exclusive: true for a run whose parts cannot be in a round with those of other runs.
    """
    waiting = list(range(len(parts)))
    if len(parts) == 1:
        yield waiting
        return
    while waiting:
        chosen = _next_round(parts, waiting, max_runs, is_exclusive)
        yield chosen
        waiting = sorted(set(waiting).difference(chosen))


def _next_round(
    parts: Sequence[OperationPart], waiting: list[int], max_runs: int, is_exclusive: Callable[[str], bool]
) -> list[int]:
    """Returns the first waiting part and all that can run with it."""
    first = parts[waiting[0]].request
    runs: set[str] = set()
    chosen = []
    for i in waiting:
        run_id = parts[i].request.model_id
        if run_id in runs:
            has_room = first.forward_only
        else:
            has_room = not runs or (len(runs) < max_runs and not (is_exclusive(run_id) or is_exclusive(first.model_id)))
        if has_room and parts[i].request.forward_only == first.forward_only:
            runs.add(run_id)
            chosen.append(i)
    return chosen
