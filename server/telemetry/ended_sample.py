"""EndedSample: what is recorded of a sampling request."""

from dataclasses import dataclass

from ...schemas.sampling import GuessCounts


@dataclass(frozen=True, slots=True)
class EndedSample:
    """A sampling request that has ended, without its tokens.

    num_tokens: that were sampled; None if it failed or was cancelled.
    guesses: of its draft; None without one.
    ended_at: in seconds since 1970.
    reason: why it failed; None if it did not.
    """

    base_model: str
    prompt_tokens: int
    num_tokens: int | None
    guesses: GuessCounts | None
    seconds: float
    ended_at: float
    reason: str | None
