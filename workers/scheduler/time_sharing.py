"""Decides which kind of work gets the ranks next."""

from collections.abc import Sequence


class TimeShares:
    """Shares the ranks' time between kinds of work: of those that have work, the one that has used the least time goes
    next.

    Each kind has a clock of the seconds it used. A kind without work is set forward to the clock of the one that runs,
    so that idle time earns no credit; time used while others waited stays on its account.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._seconds = dict.fromkeys(kinds, 0.0)

    def next(self, wanting: Sequence[str]) -> str:
        """Returns the kind to run next; the first one on a tie."""
        kind = min(wanting, key=self._seconds.__getitem__)
        for idle in self._seconds.keys() - set(wanting):
            self._seconds[idle] = max(self._seconds[idle], self._seconds[kind])
        return kind

    def charge(self, kind: str, seconds: float) -> None:
        self._seconds[kind] += seconds
