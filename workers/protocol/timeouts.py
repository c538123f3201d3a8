"""Decides how long the server waits for ranks, Ray and vLLM before it counts them as hung, in seconds.

Passes and slices have limits estimated from how long earlier ones took; all other calls of ranks have multiples of
`hang_seconds`, which is configured; the rest is fixed. Generous, because a rank that times out is killed and loses its
memory.
"""

import math
from collections.abc import Sequence
from typing import Any

from .methods import Method
from .worker_config import DEFAULT_PREFILL_CHUNK_TOKENS, WorkerConfig

GRACE_SECONDS = 5.0
"""Time to exit when asked, for ranks and vLLM, and for ranks to answer after another one has failed; then they are
killed."""

RAY_CONNECT_SECONDS = 5.0
"""Time for the head of a Ray cluster to accept a connection."""

RAY_PLACEMENT_SECONDS = 60.0
"""Time for a Ray cluster to find room for the ranks of a group."""

RAY_KEEPER_SECONDS = 30.0
"""Time for the keeper of ranks to answer, beyond that of what it waits for; then it is killed."""

VLLM_START_SECONDS = 1800.0
"""Time for a vLLM that we start to load its model."""

VLLM_SILENCE_SECONDS = 120.0
"""Time for which requests wait for a vLLM at a URL that is down or does not respond."""

VLLM_CONNECT_SECONDS, VLLM_SEND_SECONDS = 10.0, 60.0
"""Time for vLLM to accept a connection, and to read on in a request; responses may take any time."""

VLLM_HEALTH_SECONDS = 10.0
"""Time for vLLM to answer a health check."""

VLLM_UNLOAD_SECONDS = 5.0
"""Time for vLLM to unload all adapters at shutdown."""

# Limit, as a multiple of the slowest known call of that size.
_FACTOR = 4.0
# Decay of the slowest time with each faster call.
_MEMORY = 0.98

# A forward with backward costs three forwards; attention costs as much as everything else at about this length.
_BACKWARD, _LONG = 3.0, 4096.0

# Assumed forward time of a token before the first measurement: a large model on a small CPU.
_UNSEEN_SECONDS = 0.2

# Multiples of hang_seconds: for methods that read, write or move data of any size, or wait for that; for each run,
# which may have to be reloaded from disk; and for loading a model.
_DATA, _RUN, _LOADING = 10, 1 / 8, 120


class CallTimeouts:
    """The time limits of one group's calls.

    Every call may take hang_seconds beyond its work, and more if its models have to be reloaded.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._base = config.hang_seconds
        self._moving_seconds = 0.0
        self.passes = ObservedDurations(_UNSEEN_SECONDS)
        self.slices = ObservedDurations(_UNSEEN_SECONDS * (config.prefill_chunk_tokens or DEFAULT_PREFILL_CHUNK_TOKENS))

    def for_start(self, *, is_restart: bool) -> float:
        """Returns the limit for starting and loading. The first load may include a download, with someone watching, so
        it has none.
        """
        return _LOADING * self._base if is_restart else math.inf

    def for_runs(self, num_runs: int) -> float:
        """Returns the limit for optimizer steps of so many runs; a pass also has that of its cost (see `passes`)."""
        return self._moving_seconds + self._base * (1 + num_runs * _RUN)

    def for_slice(self, budget_milliseconds: float) -> float:
        return self._moving_seconds + self._base + budget_milliseconds / 1000 + self.slices.limit(1.0)

    def for_method(self, method: Method[Any]) -> float:
        return self._moving_seconds + self._base * (_DATA if method.moves_data else 1)

    def record_move(self, seconds: float) -> None:
        """Records how long it took to move on and off the device; every call may have to wait for that."""
        self._moving_seconds = max(_FACTOR * seconds, _MEMORY * self._moving_seconds)


def cost_of(lengths: Sequence[int], forward_only: bool) -> float:
    """Returns the cost of sequences in units of one token's forward in a short sequence."""
    if not lengths:
        return 1.0
    return sum(lengths) * (1 + max(lengths) / _LONG) * (1 if forward_only else _BACKWARD)


class ObservedDurations:
    """Records how long calls took, by size (at least 1): the slowest recent one of each power of two.

    unseen_seconds: assumed for a size of 1 before the first call.
    """

    def __init__(self, unseen_seconds: float) -> None:
        self._unseen_seconds = unseen_seconds
        # Keyed by the bit length of the size.
        self._slowest: dict[int, float] = {}

    def record(self, size: float, seconds: float) -> None:
        bits = int(size).bit_length()
        self._slowest[bits] = max(seconds, _MEMORY * self._slowest.get(bits, 0.0))

    def limit(self, size: float) -> float:
        """Returns a time limit for a call of this size.

        Time grows at most linearly with size and never shrinks with it, so every size seen gives a bound.
        """
        if not self._slowest:
            return size * self._unseen_seconds
        known = (seconds * max(1.0, size / 2 ** (bits - 1)) for bits, seconds in self._slowest.items())
        return _FACTOR * min(known)
