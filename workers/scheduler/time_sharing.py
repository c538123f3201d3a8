"""Turns: which kind of work has the ranks next."""

from collections.abc import Sequence


class Turns:
    """Shares the ranks' time between kinds of work: of those that want it, the one that has had least goes next.

    Each has a clock of the seconds it got. One that does not want the ranks is set forward to the clock of the one that
    goes, so idleness earns no credit; time taken while others waited stays a debt.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._seconds = dict.fromkeys(kinds, 0.0)

    def next(self, wanting: Sequence[str]) -> str:
        """Among equals the first."""
        kind = min(wanting, key=self._seconds.__getitem__)
        for idle in self._seconds.keys() - set(wanting):
            self._seconds[idle] = max(self._seconds[idle], self._seconds[kind])
        return kind

    def spent(self, kind: str, seconds: float) -> None:
        self._seconds[kind] += seconds
