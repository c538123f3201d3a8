"""Tracks suspects: work that was in the call in which a worker died.

Suspects run in smaller companies until they get past the point of the death. A request that kills its worker is soon
alone, and other requests are cleared.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# For suspects that are never retried; and for those whose position is unknown, so that passing it cannot be seen.
_REMEMBERED_SECONDS, _UNKNOWN_SECONDS = 3600.0, 300.0


@dataclass(frozen=True)
class _Accusation:
    position: int | None
    most_together: int
    at: float


class Suspects:
    """Suspect runs or sampling jobs, by key.

    shrinks: after a fatal call, only one in `shrinks` of its members (at least one) may run together next time.

    Positions say how far a key has progressed, and stay comparable over deaths. None means unknown.
    """

    def __init__(self, shrinks: float = math.inf) -> None:
        self._shrinks = shrinks
        self._accused: dict[str, _Accusation] = {}

    def __bool__(self) -> bool:
        return bool(self._accused)

    def __contains__(self, key: object) -> bool:
        return key in self._accused

    def accuse(self, positions: Mapping[str, int | None]) -> None:
        """Makes every member of the fatal call a suspect, with its position at the time."""
        now = time.monotonic()
        self._accused = {key: each for key, each in self._accused.items() if now - each.at < _REMEMBERED_SECONDS}
        max_together = max(1, int(len(positions) // self._shrinks))
        self._accused |= {key: _Accusation(at, max_together, now) for key, at in positions.items()}

    def most_together(self, keys: Iterable[str]) -> float:
        """Returns how many keys may run together if these are among them."""
        return min((self._accused[key].most_together for key in keys if key in self._accused), default=math.inf)

    def record_progress(self, key: str, position: int | None) -> None:
        """Clears the key if this position is past the one at which it was accused."""
        accusation = self._accused.get(key)
        if accusation is not None and _is_past(accusation, position):
            del self._accused[key]

    def clear(self, key: str) -> None:
        """Forgets the key, which has ended."""
        self._accused.pop(key, None)


def _is_past(accusation: _Accusation, position: int | None) -> bool:
    if position is None or accusation.position is None:
        return time.monotonic() - accusation.at > _UNKNOWN_SECONDS
    return position >= accusation.position
