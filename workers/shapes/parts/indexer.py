"""The indexer of sparse attention."""

from collections.abc import Iterator
from dataclasses import dataclass

from .part import Placement, Weight

NAME = "self_attn.indexer"
_WHOLE = Placement("self_attn", None)


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
        yield Weight(f"{NAME}.wq_b.weight", (self.heads * self.head_dim, query_rank), _WHOLE)
        yield Weight(f"{NAME}.wk.weight", (self.head_dim, hidden), _WHOLE)
        yield Weight(f"{NAME}.k_norm.weight", (self.head_dim,))
        yield Weight(f"{NAME}.k_norm.bias", (self.head_dim,))
        yield Weight(f"{NAME}.weights_proj.weight", (self.heads, hidden))
