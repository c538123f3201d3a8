"""Linear attention by the gated delta rule, whose state has a fixed size: https://arxiv.org/abs/2412.06464."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from .mixer import Mixer
from .part import FLOAT32, CacheEntries, Divisible, Flops, Placement, Share, Weight, product_flops

_NAME = "linear_attn"
_ROWS, _COLUMNS = Placement("linear_attn", 0), Placement("linear_attn", 1)
_WHOLE_ROWS = Placement("linear_attn", 0, is_gathered=False)

# Tokens of the chunks at whose starts a pass keeps states (workers/ops/recurrences/gated_delta.py).
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Mixer):
    """A convolution over time, the gated delta rule, and a gated norm of each head.

    Each key head serves value_heads / key_heads consecutive value heads. key_dim, value_dim: features of a head.
    kernel: tokens that the convolution sees, the newest included.
    is_fused: whether one projection computes queries, keys, values and gates, key head by key head.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_fused: bool = False
    name: str = _NAME
    module: str = "GatedDeltaNet"
    placements: ClassVar[Mapping[str, Placement]] = {
        f"{_NAME}.in_proj_qkv.weight": _ROWS,
        f"{_NAME}.in_proj_z.weight": _ROWS,
        f"{_NAME}.in_proj_b.weight": _ROWS,
        f"{_NAME}.in_proj_a.weight": _ROWS,
        f"{_NAME}.in_proj_qkvz.weight": _ROWS,
        f"{_NAME}.in_proj_ba.weight": _ROWS,
        f"{_NAME}.conv1d.weight": _WHOLE_ROWS,
        f"{_NAME}.dt_bias": _WHOLE_ROWS,
        f"{_NAME}.A_log": _WHOLE_ROWS,
        f"{_NAME}.out_proj.weight": _COLUMNS,
    }

    def __str__(self) -> str:
        return f"{self.key_heads} key and {self.value_heads} value heads with the gated delta rule"

    @property
    def _sections(self) -> tuple[int, int, int]:
        """The features of all queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self._values

    @property
    def _values(self) -> int:
        return self.value_heads * self.value_dim

    def weights(self) -> Iterator[Weight]:
        sections, num_mixed = self._sections, sum(self._sections)
        yield self._weight("dt_bias", (self.value_heads,))
        yield self._weight("A_log", (self.value_heads,))
        yield self._weight("conv1d.weight", (num_mixed, 1, self.kernel), sections)
        yield self._weight("norm.weight", (self.value_dim,))
        yield self._weight("out_proj.weight", (self.hidden, self._values), (), "out_proj")
        if self.is_fused:
            yield self._weight("in_proj_qkvz.weight", (num_mixed + self._values, self.hidden), (), "in_proj_qkvz")
            yield self._weight("in_proj_ba.weight", (2 * self.value_heads, self.hidden))
            return
        pairs = "in_proj_q", "in_proj_k", "in_proj_v"
        yield self._weight("in_proj_qkv.weight", (num_mixed, self.hidden), sections, *pairs)
        yield self._weight("in_proj_z.weight", (self._values, self.hidden), (), "in_proj_z")
        yield self._weight("in_proj_b.weight", (self.value_heads, self.hidden))
        yield self._weight("in_proj_a.weight", (self.value_heads, self.hidden))

    def _weight(self, name: str, shape: tuple[int, ...], sections: tuple[int, ...] = (), *adapters: str) -> Weight:
        path = f"{_NAME}.{name}"
        return Weight(path, shape, self.placements.get(path), sections, adapters)

    def divisible(self) -> Iterator[Divisible]:
        yield Divisible("linear_attn", self.key_heads, "key heads with the gated delta rule", by_sp="divided")

    def cache_entries(self, spec: ParallelSpec) -> CacheEntries:
        tp = spec.tp_size_of("linear_attn")
        return CacheEntries(
            state_numbers=sum(self._sections) * (self.kernel - 1) // tp,
            float32_state_numbers=self._values * self.key_dim // tp,
        )

    def kept_bytes(self, share: Share) -> float:
        """Counts the convolution's input and output, the gates, the rule's output and its norm, and states."""
        tp = share.spec.tp_size_of("linear_attn")
        mixed, values = sum(self._sections) / tp, self._values / tp
        numbers = 2 * mixed + 5 * values  # z, its activation, the rule's output, its norm, and the product of the two
        float32 = 5 * self.value_heads / tp + values * self.key_dim / _CHUNK
        return share.inputs(self.hidden, 3 if self.is_fused else 5) + share.number_bytes * numbers + FLOAT32 * float32

    def working_bytes(self, share: Share) -> float:
        """Counts the float32 copies of a chunk's inputs and their gradients, and the systems of its tokens."""
        heads = self.value_heads / share.spec.tp_size_of("linear_attn")
        return FLOAT32 * heads * (6 * self.key_dim + 6 * self.value_dim + 8 * _CHUNK)

    def flops(self, spec: ParallelSpec = SINGLE) -> Flops:
        """Counts for each token what the state predicts for its key, the correction added to it, and what the query
        reads."""
        states = 6.0 * self._values * self.key_dim / spec.tp_size_of("linear_attn")
        return Flops(product_flops(self.weights(), spec), states=states)
