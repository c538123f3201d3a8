"""A token bucket, for limits per minute."""

from dataclasses import dataclass


@dataclass
class TokenBucket:
    """Holds at most a minute's worth. level: as of time `at`; below zero it is a debt, which shrinks with time."""

    per_minute: int
    level: float
    at: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> "TokenBucket":
        return cls(per_minute, per_minute, now)

    def used(self, now: float) -> float:
        """Returns how much the bucket lacks to be full."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return self.per_minute - self.level

    def seconds_until(self, level: float, now: float) -> float:
        """Returns the seconds until the bucket holds `level`, 0 if it does now."""
        missing = level - (self.per_minute - self.used(now))
        return max(0.0, missing * 60 / self.per_minute)
