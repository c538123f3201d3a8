"""Patience: how long a call to a worker may take; one that takes longer is of a worker that hangs.

Generous, for who is taken for hung is killed with everything in its memory. What calls took so far tells how long they
take.
"""

from collections.abc import Sequence

from ..protocol.config import WorkerConfig

# Of what a call of its size has taken, at the slowest.
_FACTOR = 4.0
# So much of the slowest call is remembered at each one that was faster.
_MEMORY = 0.98

# A backward pass takes as long as two forward; and attention as long as all else at about this length.
_BACKWARD, _LONG = 3.0, 4096.0

# Of a token, forward, before anything was seen: of a large model on a small CPU.
_UNSEEN_SECONDS = 0.2

# Of hang_seconds: of verbs that read, write or move what may be of any size, or wait for such; of runs, which may
# have to come from disk; and of a model that is loaded.
_FILES, _RUN, _LOADING = 10, 1 / 8, 120
_OF_FILES = frozenset(
    {"save_run", "load_run", "load_adapter", "read_adapter", "convert_adapter", "start_over", "offload"}
    | {"begin_snapshot", "export_adapter", "import_adapter"}
)


class Patience:
    """Of one group, in seconds. Every call has hang_seconds beyond its work, and more where that has to be fetched."""

    def __init__(self, config: WorkerConfig) -> None:
        self._base = config.hang_seconds
        self._moving_seconds = 0.0
        self.loading_seconds = _LOADING * self._base
        self.passes = Seen(_UNSEEN_SECONDS)
        self.slices = Seen(_UNSEEN_SECONDS * config.prefill_chunk_tokens)

    def with_pass(self, cost: float, num_runs: int) -> float:
        return self.with_steps(num_runs) + self.passes.bound(cost)

    def with_steps(self, num_runs: int) -> float:
        return self._moving_seconds + self._base * (1 + num_runs * _RUN)

    def with_slice(self, budget_milliseconds: float) -> float:
        return self._moving_seconds + self._base + budget_milliseconds / 1000 + self.slices.bound(1.0)

    def with_verb(self, method: str) -> float:
        return self._moving_seconds + self._base * (_FILES if method in _OF_FILES else 1)

    def moved(self, seconds: float) -> None:
        """So long it took to come to the device and to leave it, which every call may have to wait for."""
        self._moving_seconds = max(_FACTOR * seconds, _MEMORY * self._moving_seconds)


def cost_of(lengths: Sequence[int], forward_only: bool) -> float:
    """In tokens of a short sequence, forward."""
    if not lengths:
        return 1.0
    return sum(lengths) * (1 + max(lengths) / _LONG) * (1 if forward_only else _BACKWARD)


class Seen:
    """Calls of any size (at least 1), and how long they took: the slowest of those of about a size, while it is recent.

    unseen_seconds: for a size of 1, before the first.
    """

    def __init__(self, unseen_seconds: float) -> None:
        self._unseen_seconds = unseen_seconds
        # By the number of bits of the size.
        self._slowest: dict[int, float] = {}

    def took(self, size: float, seconds: float) -> None:
        bits = int(size).bit_length()
        self._slowest[bits] = max(seconds, _MEMORY * self._slowest.get(bits, 0.0))

    def bound(self, size: float) -> float:
        """Twice the size takes twice the time at most, and half of it no longer: of any size seen, that is a bound."""
        if not self._slowest:
            return size * self._unseen_seconds
        known = (seconds * max(1.0, size / 2 ** (bits - 1)) for bits, seconds in self._slowest.items())
        return _FACTOR * min(known)
