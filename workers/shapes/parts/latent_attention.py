"""Multi-head latent attention: keys and values of all heads are projections of one short vector for each token.

DeepSeek-V2 (2024), section 2.1, https://arxiv.org/abs/2405.04434.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from .part import (
    FLOAT32,
    INT32,
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
from .query_growth import QueryGrowth

_NAME, _INDEXER = "self_attn", "self_attn.indexer"
_ROWS, _COLUMNS, _WHOLE = Placement("self_attn", 0), Placement("self_attn", 1), Placement("self_attn", None)


@dataclass(frozen=True)
class Indexer:
    """Chooses the tokens that a token attends to: https://arxiv.org/abs/2512.02556.

    heads, head_dim: of its queries; all heads have the same keys. most: how many tokens it chooses for each; in
    sequences of no more it chooses all. is_interleaved: whether the rotated pairs of its features are neighbours.
    is_shared: whether the layer has no weights of its own, and takes what the last layer with some has chosen.
    """

    heads: int
    head_dim: int
    most: int
    is_interleaved: bool = False
    is_shared: bool = False

    def weights(self, hidden: int, query_rank: int) -> Iterator[Weight]:
        if self.is_shared:
            return
        yield Weight(f"{_INDEXER}.wq_b.weight", (self.heads * self.head_dim, query_rank), _WHOLE)
        yield Weight(f"{_INDEXER}.wk.weight", (self.head_dim, hidden), _WHOLE)
        yield Weight(f"{_INDEXER}.k_norm.weight", (self.head_dim,))
        yield Weight(f"{_INDEXER}.k_norm.bias", (self.head_dim,))
        yield Weight(f"{_INDEXER}.weights_proj.weight", (self.heads, hidden))


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
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

    rotation: ClassVar[str] = ""
    window: ClassVar[None] = None
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
    def kv_heads(self) -> int:
        return self.heads

    @property
    def key_dim(self) -> int:
        """Features of a query or key of one head."""
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

    def adapter_pairs(self, spec: ParallelSpec) -> Iterator[tuple[int, int]]:
        for weight in self.weights():
            yield from weight.adapter_pairs(spec)

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
        widest = max(self.key_dim, self.value_dim)
        per_head = 2 * self.key_dim + 2 * widest + self.plain_dim + 2 * self.value_dim
        latents = 2 * (self.query_rank or 0) + 2 * self.latent_dim
        numbers = heads * per_head + latents + (heads * widest if share.ulysses > 1 else 0)
        of_latents = share.inputs(self.hidden, 3) + share.number_bytes * numbers + FLOAT32 * (heads + 2)
        return of_latents + self.choice_bytes(share)

    def choice_bytes(self, share: Share) -> float:
        """Counts the tokens that the layer's own indexer chooses for each token of the row; ranks along sp gather them
        for all tokens."""
        indexer = self.own_indexer
        if indexer is None or share.longest <= indexer.most:
            return 0.0
        return INT32 * indexer.most * share.spec.sp

    def working_bytes(self, share: Share) -> float:
        """Counts the gradients of keys and values, summed in float32 over blocks of queries with chosen tokens."""
        if self.indexer is None or share.longest <= self.indexer.most:
            return 0.0
        heads = self.heads // share.spec.tp_size_of("self_attn")
        return 2 * (FLOAT32 + share.number_bytes) * heads * max(self.key_dim, self.value_dim)

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
