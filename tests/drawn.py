"""Sampled tokens, equal to others up to ties: which of two tokens wins one depends on the processor's rounding."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LOGPROBS = 1e-4
"""The largest difference of the log-probabilities of the same tokens."""
TIE = 2e-5
"""The largest difference of those of the two likeliest tokens in a tie, in nats."""


_borders: set[tuple[int, ...]] = set()
"""Ties between neighbours in the running test: the tokens up to there."""


def forget_borders() -> None:
    """Prepares for the next test."""
    _borders.clear()


class Drawn(list[int]):
    """The tokens of one sample. They equal those of another sample that went the other way at a tie.

    Up to there both must have the same tokens, with the same log-probabilities. A tie is between two tokens that are as
    likely, or between two neighbours in the vocabulary, if a random number lies on the border of their probabilities;
    of these a test may have one. After a tie nothing can be compared. A plain list equals only the same tokens.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, tokens: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray) -> None:
        super().__init__(int(token) for token in tokens)
        self.logprobs = np.asarray(logprobs, dtype=np.float64)

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return Drawn(part, self.logprobs[index]) if isinstance(index, slice) else part

    def __eq__(self, other: object) -> bool:
        if list.__eq__(self, other) is not False or not isinstance(other, Drawn):
            return list.__eq__(self, other) is True
        place = self.num_shared(other)
        if place == min(len(self), len(other)):
            return False
        if np.abs(self.logprobs[:place] - other.logprobs[:place]).max(initial=0) > LOGPROBS:
            return False
        return bool(abs(self.logprobs[place] - other.logprobs[place]) < TIE) or self._is_border(other, place)

    def _is_border(self, other: "Drawn", place: int) -> bool:
        if abs(self[place] - other[place]) == 1:
            _borders.add((*list(self)[:place], min(self[place], other[place])))
            return len(_borders) == 1
        return False

    def num_shared(self, other: Sequence[int]) -> int:
        """Returns how many tokens are the same before the first that is not."""
        differ = (i for i, (ours, theirs) in enumerate(zip(self, other, strict=False)) if ours != theirs)
        return next(differ, min(len(self), len(other)))

    def __ne__(self, other: object) -> bool:
        return not self == other


def as_drawn(sample: Any) -> Drawn:
    """Returns the tokens of a sampled sequence, as an object or in JSON."""
    if isinstance(sample, Mapping):
        return Drawn(sample["tokens"], sample["logprobs"])
    return Drawn(sample.tokens, sample.logprobs)


def assert_same_sample(found: Any, wanted: Any, atol: float = LOGPROBS) -> None:
    """Fails unless two samples have the same tokens, up to a tie, and until there the same log-probabilities."""
    ours, theirs = as_drawn(found), as_drawn(wanted)
    assert ours == theirs
    end = ours.num_shared(theirs)
    np.testing.assert_allclose(ours.logprobs[:end], theirs.logprobs[:end], rtol=0, atol=atol)


def all_drawn(response: Any) -> list[Drawn]:
    """Returns the tokens of each sample of a response, an object or JSON."""
    sequences = response["sequences"] if isinstance(response, Mapping) else response.sequences
    return [as_drawn(each) for each in sequences]
