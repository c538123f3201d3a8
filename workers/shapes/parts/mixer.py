"""Sequence mixers: the declarations of all of them, of those with softmax attention, and of how queries grow."""

from abc import abstractmethod
from dataclasses import dataclass

from ...protocol.parallel_spec import ParallelSpec
from .indexer import Indexer
from .part import FLOAT32, CacheEntries, Part, Share
from .windows import MAX_SCORES, queries_of_mask, queries_of_scores


@dataclass(frozen=True)
class QueryGrowth:
    """Multiplies queries by 1 + rate * log(1 + floor((position + first) / length))."""

    rate: float
    length: int
    first: int = 0


class Mixer(Part):
    """A part that mixes the tokens of a sequence.

    kv_source: the number of the layer whose keys and values it uses; None for its own.
    indexer: chooses the tokens that a token attends to; None if nothing does.
    """

    kv_source: int | None = None
    indexer: Indexer | None = None

    @abstractmethod
    def cache_entries(self, spec: ParallelSpec) -> CacheEntries:
        """Returns what the sampler keeps of a sequence on one rank."""

    def shared_bytes(self, share: Share) -> float:
        """Returns the bytes for each token of what other layers use of this one: keys and values, and their
        gradients."""
        return share.number_bytes * 2 * self.cache_entries(share.spec).numbers_per_token

    def score_bytes(self, share: Share) -> int:
        """Returns the bytes of scores, or of their masks, of some queries at a time, for any number of tokens."""
        return 0

    def score_gradient_bytes(self, share: Share) -> int:
        """Returns the bytes of such scores and their gradients in the backward pass, while no other part runs."""
        return 0


class Attention(Mixer):
    """Softmax attention of any form. Its properties are described where SoftmaxAttention has them as fields."""

    heads: int
    kv_heads: int
    rotary_dim: int
    rotation: str | None = ""
    rotary_scale: float | None = None
    growth: QueryGrowth | None = None
    window: int | None = None
    score_cap: float | None = None

    @property
    def head_features(self) -> int | None:
        """The features of each head of queries, keys and values; None if they differ."""
        return None

    def score_bytes(self, share: Share) -> int:
        """Counts for sliding windows the mask of some queries, or with a ring scores, their mask and their softmax.
        CUDA kernels for 16-bit dtypes need neither."""
        if self.window is None or self.window >= share.longest or share.number_bytes != FLOAT32:
            return 0
        if share.ring > 1:
            return 3 * FLOAT32 * MAX_SCORES
        queries = queries_of_mask(self.window)
        return queries * (queries + self.window) * (FLOAT32 + 1)

    def score_gradient_bytes(self, share: Share) -> int:
        """Counts for capped scores the scores of some queries, their gradient, and the derivative of their cap."""
        if self.score_cap is None:
            return 0
        length = -(-share.longest // share.ring)
        sequences = max(1, share.tokens // share.longest)
        num_heads = sequences * self.heads // share.spec.tp_size_of("self_attn") // share.ulysses
        window = min(self.window or length, length)
        queries = queries_of_scores(num_heads, length, window)
        return 3 * FLOAT32 * num_heads * queries * min(queries + window, length)
