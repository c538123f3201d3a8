"""Counts the exchanges of a rank with others."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from trainhouse.workers.parallel.mesh import Team

from .probe_worker import ProbeWorker

# None of them calls another one.
EXCHANGES = (
    *("all_gather_object", "all_reduce", "start_all_gather", "gather_at_first", "reduce_scatter"),
    *("all_to_all", "start_ring_shift", "broadcast"),
)


class Exchanges:
    def __init__(self, _: ProbeWorker) -> None:
        kinds = {name: name.removeprefix("start_") for name in EXCHANGES}
        self._numbers = Counter(dict.fromkeys(kinds.values(), 0))
        for name, kind in kinds.items():
            setattr(Team, name, self._counted(getattr(Team, name), kind))

    def num(self) -> Counter[str]:
        """Returns the number since the first call, by kind."""
        return self._numbers

    def _counted(self, exchange: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def counted(team: Team, *arguments: Any, **named: Any) -> Any:
            self._numbers[kind] += team.size > 1
            return exchange(team, *arguments, **named)

        return counted
