"""Multi-head latent attention: keys and values of all heads are projections of one short vector for each token.

DeepSeek-V2 (2024), section 2.1, https://arxiv.org/abs/2405.04434.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from .indexer import NAME as _INDEXER
from .indexer import Indexer
from .mixer import Attention, QueryGrowth
from .part import (
    FLOAT32,
    INT32,
    INT64,
    CacheEntries,
    Divisible,
    Flops,
    IndexFlops,
    Placement,
    Share,
    View,
    Weight,
    product_flops,
)
from .windows import MAX_INDEX_SCORES, queries_of_choice, queries_of_index

_NAME = "self_attn"
_ROWS, _COLUMNS, _WHOLE = Placement("self_attn", 0), Placement("self_attn", 1), Placement("self_attn", None)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    """Latent attention. The features of queries and keys are some that do not rotate, and after them some that do.

    query_rank: features of the latent vector of queries; None if they have none. kv_rank: of that of keys and values.
    plain_dim, rotary_dim: features of each head's queries and keys without and with rotation. value_dim: of its values.
    is_interleaved: whether the rotated pairs of features are neighbours.
    bias: whether the projections to latent vectors and the one after attention have biases.
    growth: how queries grow with their positions, None if they do not. It is the same in all layers.
    indexer: chooses the tokens that a token attends to; None for all.
    """

    hidden: int
    heads: int
    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    is_interleaved: bool = True
    bias: bool = False
    growth: QueryGrowth | None = None
    indexer: Indexer | None = None
    module: str = "Attention"
    name: str = _NAME

    placements: ClassVar[Mapping[str, Placement]] = {
        f"{_NAME}.q_proj.weight": _ROWS,
        f"{_NAME}.q_a_proj.weight": _WHOLE,
        f"{_NAME}.q_b_proj.weight": _ROWS,
        f"{_NAME}.kv_a_proj_with_mqa.weight": _WHOLE,
        f"{_NAME}.kv_b_proj.weight": _ROWS,
        f"{_NAME}.o_proj.weight": _COLUMNS,
    }

    def __str__(self) -> str:
        seen = "" if self.indexer is None else f" for {self.indexer.most} tokens that an indexer chooses"
        return f"{self.heads} heads with latent keys and values of {self.kv_rank}{seen}"

    @property
    def kv_heads(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.heads

    @property
    def widest_dim(self) -> int:
        return max(self.key_dim, self.value_dim)

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rotary_dim

    @property
    def latent_dim(self) -> int:
        """Numbers of a token from which the keys and values of all heads follow."""
        return self.kv_rank + self.rotary_dim

    @property
    def own_indexer(self) -> Indexer | None:
        """The indexer whose weights the layer has, None if it has none."""
        return None if self.indexer is None or self.indexer.is_shared else self.indexer

    def weights(self) -> Iterator[Weight]:
        queries = self.heads * self.key_dim
        if self.query_rank is None:
            yield self._weight("q_proj.weight", (queries, self.hidden), "q_proj")
        else:
            yield self._weight("q_a_proj.weight", (self.query_rank, self.hidden), "q_a_proj")
            yield from self._biases("q_a_proj.bias", self.query_rank)
            yield self._weight("q_a_layernorm.weight", (self.query_rank,))
            yield self._weight("q_b_proj.weight", (queries, self.query_rank))
        yield self._weight("kv_a_proj_with_mqa.weight", (self.latent_dim, self.hidden), "kv_a_proj_with_mqa")
        yield from self._biases("kv_a_proj_with_mqa.bias", self.latent_dim)
        yield self._weight("kv_a_layernorm.weight", (self.kv_rank,))
        yield self._weight("kv_b_proj.weight", (self.heads * (self.plain_dim + self.value_dim), self.kv_rank))
        yield self._weight("o_proj.weight", (self.hidden, self.heads * self.value_dim), "o_proj")
        yield from self._biases("o_proj.bias", self.hidden)
        if self.indexer is not None:
            assert self.query_rank is not None
            yield from self.indexer.weights(self.hidden, self.query_rank)

    def _weight(self, name: str, shape: tuple[int, ...], *adapters: str) -> Weight:
        path = f"{_NAME}.{name}"
        return Weight(path, shape, self.placements.get(path), (), adapters)

    def _biases(self, name: str, size: int) -> Iterator[Weight]:
        if self.bias:
            yield self._weight(name, (size,))

    def divisible(self) -> Iterator[Divisible]:
        # In a ring of ranks along sp, no rank has the keys of a whole sequence.
        yield Divisible("self_attn", self.heads, "heads", by_sp=None if self.indexer is None else "divided")

    def cache_entries(self, spec: ParallelSpec) -> CacheEntries:
        """Counts the latent vector of a token, and its key for the indexer. All ranks keep both whole: each head reads
        all of them."""
        indexer = self.own_indexer
        return CacheEntries(numbers_per_token=self.latent_dim + (0 if indexer is None else indexer.head_dim))

    def kept_bytes(self, share: Share) -> float:
        """Counts the latent vectors and their norms, queries and keys, values as wide as keys, and the output."""
        heads = self.heads // share.spec.tp_size_of("self_attn")
        per_head = 2 * self.key_dim + 2 * self.widest_dim + self.plain_dim + 2 * self.value_dim
        latents = 2 * (self.query_rank or 0) + 2 * self.latent_dim
        numbers = heads * per_head + latents + (heads * self.widest_dim if share.ulysses > 1 else 0)
        of_latents = share.inputs(self.hidden, 3) + share.number_bytes * numbers + FLOAT32 * (heads + 2)
        return of_latents + self.shared_bytes(share)

    def shared_bytes(self, share: Share) -> float:
        """Counts the tokens that the layer's own indexer chooses for each token of the row; ranks along sp gather them
        for all tokens."""
        if self.own_indexer is None or not self._chooses(share):
            return 0.0
        return INT32 * self.own_indexer.most * share.spec.sp

    def working_bytes(self, share: Share) -> float:
        """Counts the gradients of keys and values, summed in float32 over blocks of queries with chosen tokens."""
        if not self._chooses(share):
            return 0.0
        heads = self.heads // share.spec.tp_size_of("self_attn")
        return 2 * (FLOAT32 + share.number_bytes) * heads * self.widest_dim

    def score_bytes(self, share: Share) -> int:
        """Counts the scores of an indexer's heads and their sum, sorted, for some queries, or the mask of what they
        attend to."""
        if self.indexer is None or not self._chooses(share):
            return 0
        heads, length = self.indexer.heads, share.longest
        rows = min(queries_of_index(heads, length), length)
        of_index = FLOAT32 * min(rows * heads * length, MAX_INDEX_SCORES) + (2 * FLOAT32 + INT64) * rows * length
        of_mask = (share.number_bytes + FLOAT32) * queries_of_choice(self.heads, length) * length
        return max(of_index, of_mask)

    def _chooses(self, share: Share) -> bool:
        """True if there are sequences of more tokens than the indexer chooses."""
        return self.indexer is not None and share.longest > self.indexer.most

    def flops(self, spec: ParallelSpec = SINGLE) -> Flops:
        """Counts projections to latent vectors and the indexer whole on each rank along tp."""
        linears = product_flops((each for each in self.weights() if not each.name.startswith(_INDEXER)), spec)
        scores = 2.0 * self.heads * (self.key_dim + self.value_dim) / spec.tp_size_of("self_attn")
        if self.indexer is None:
            return Flops(linears, scores=scores)
        return Flops(linears, scores=scores, view=View(self.indexer.most), index=self._index_flops())

    def _index_flops(self) -> IndexFlops | None:
        indexer = self.own_indexer
        if indexer is None or self.query_rank is None:
            return None
        tokens = product_flops(indexer.weights(self.hidden, self.query_rank))
        return IndexFlops(tokens, 2.0 * indexer.heads * (indexer.head_dim + 1), indexer.most)
