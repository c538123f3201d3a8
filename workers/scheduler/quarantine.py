"""Suspects: the work in whose call a worker died, which is kept in smaller company until it has come past that place.

So whoever the worker dies of is soon alone with it, and nobody else's work is held against it.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Those that never come back; and those of which nobody knows whether they have come past the place.
_REMEMBERED_SECONDS, _UNKNOWN_SECONDS = 3600.0, 300.0


@dataclass(frozen=True)
class _Accusation:
    position: int | None
    most_together: int
    at: float


class Suspects:
    """By key, that of a run or of a sampling job.

    shrinks: of as many as there were in the fatal call, one in `shrinks` may be together next time, and at least one.
    Positions tell how far a key has come; those of one key are comparable over deaths. None = unknown.
    """

    def __init__(self, shrinks: float = math.inf) -> None:
        self._shrinks = shrinks
        self._accused: dict[str, _Accusation] = {}

    def __bool__(self) -> bool:
        return bool(self._accused)

    def __contains__(self, key: object) -> bool:
        return key in self._accused

    def accuse(self, positions: Mapping[str, int | None]) -> None:
        """All that were in the fatal call, each with the position at which it was."""
        now = time.monotonic()
        self._accused = {key: each for key, each in self._accused.items() if now - each.at < _REMEMBERED_SECONDS}
        most_together = max(1, int(len(positions) // self._shrinks))
        self._accused |= {key: _Accusation(at, most_together, now) for key, at in positions.items()}

    def most_together(self, keys: Iterable[str]) -> float:
        """How many may run at a time when these do."""
        return min((self._accused[key].most_together for key in keys if key in self._accused), default=math.inf)

    def passed(self, key: str, position: int | None) -> None:
        """The key has got through that position."""
        accusation = self._accused.get(key)
        if accusation is not None and _is_past(accusation, position):
            del self._accused[key]

    def clear(self, key: str) -> None:
        """It has ended."""
        self._accused.pop(key, None)


def _is_past(accusation: _Accusation, position: int | None) -> bool:
    if position is None or accusation.position is None:
        return time.monotonic() - accusation.at > _UNKNOWN_SECONDS
    return position >= accusation.position
