"""RecentCalls: what the ranks did last."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ...workers.scheduler.calls import EndedCall
from ...workers.scheduler.work import RunWork

_KEPT = 60


@dataclass(frozen=True)
class RecentCall:
    """A call of a group's ranks, without its data.

    began_at: in seconds since 1970. num_works: operations or steps in it. num_runs, num_tenants: to which these belong.
    error: the reason if all of it failed.
    """

    group: str
    activity: str
    began_at: float
    seconds: float
    num_tokens: int
    num_works: int
    num_runs: int
    num_tenants: int
    error: str | None


class RecentCalls:
    """Keeps the last calls other than slices of sampling, of which there are many every second."""

    def __init__(self) -> None:
        self._calls: deque[RecentCall] = deque(maxlen=_KEPT)

    def __iter__(self) -> Iterator[RecentCall]:
        """Yields the last call first."""
        return reversed(self._calls)

    def add(self, ended: EndedCall) -> None:
        call = ended.call
        # Without questions of the server itself, too.
        works = [work for work in call.works if isinstance(work, RunWork) and work.tenant_id]
        if works:
            num_runs, num_tenants = len({work.key for work in works}), len({work.tenant_id for work in works})
            size = (call.size.tokens, len(works), num_runs, num_tenants)
            self._calls.append(
                RecentCall(ended.group, call.activity, ended.began_at, ended.seconds, *size, ended.error)
            )
