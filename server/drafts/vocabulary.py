"""Draft vocabulary: the tokens that a draft model can produce, which are the most frequent ones."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ...schemas.drafts import BuildVocabMapRequest, BuildVocabMapResponse
from ...schemas.errors import OperationError
from ...workers.shapes.draft_sizes import vocabulary_hash


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The tokens of a draft model."""

    token_ids: np.ndarray
    """int64 [size], ascending."""
    num_tokens: int
    """Tokens counted, at least 1."""
    num_covered: int
    """Those of them that are in the vocabulary."""

    def described(self) -> BuildVocabMapResponse:
        return BuildVocabMapResponse(
            num_tokens=self.num_tokens,
            covered=self.num_covered / self.num_tokens,
            size=len(self.token_ids),
            hash=vocabulary_hash(self.token_ids.astype("<i8").tobytes()),
        )


def build_vocabulary(request: BuildVocabMapRequest, size: int, vocab_size: int) -> DraftVocabulary:
    """Returns the `size` most frequent of `vocab_size` tokens; ties, also at frequency 0, go to the lower id. Raises
    OperationError if a token id is outside the vocabulary, or no token was counted."""
    counts = _counts(request, vocab_size)
    if not (num_tokens := int(counts.sum())):
        raise OperationError("no token was counted: give some, with weights other than 0, or counts above 0")
    # Stable, so that ties go to the lower id.
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64)
    return DraftVocabulary(chosen, num_tokens, int(counts[chosen].sum()))


def _counts(request: BuildVocabMapRequest, vocab_size: int) -> np.ndarray:
    """Returns the frequency of each token, int64 [vocab_size]."""
    if request.counts is None:
        tokens = _joined(request.tokens or (), np.int64)
        if request.weights is not None:
            tokens = tokens[_joined(request.weights, np.float64) != 0]
        return np.bincount(_checked(tokens, vocab_size), minlength=vocab_size)
    counts = np.zeros(vocab_size, np.int64)
    counts[_checked(_joined([request.counts], np.int64), vocab_size)] = list(request.counts.values())
    return counts


def _joined(rows: Iterable[Iterable[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype)


def _checked(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    if token_ids.size and (highest := int(token_ids.max())) >= vocab_size:
        raise OperationError(f"token id {highest} is not in the base model's vocabulary of {vocab_size}")
    return token_ids
