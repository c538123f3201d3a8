"""Softmax attention over the tokens of a sequence, or over a window of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from .mixer import Attention, QueryGrowth
from .part import FLOAT32, CacheEntries, Divisible, Flops, Placement, Share, View, Weight, product_flops

_NAME = "self_attn"
_ROWS, _COLUMNS = Placement("self_attn", 0), Placement("self_attn", 1)
_WHOLE_ROWS = Placement("self_attn", 0, is_gathered=False)


@dataclass(frozen=True)
class OutputGate:
    """A linear layer of a token whose activated output multiplies that of attention.

    name: where it is below the attention. activation: "sigmoid" or "softplus". is_by_head: whether it has one number
    for each head, not for each feature. is_adapted: whether adapters adapt it.
    """

    name: str
    activation: str = "sigmoid"
    is_by_head: bool = False
    is_adapted: bool = True


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttention(Attention):
    """Softmax attention with grouped queries and rotations.

    rotary_dim: how many features of each head rotate, the first ones. rotation: the kind of its rotations, if layers
    differ in that; None if nothing rotates. is_interleaved: whether the rotated pairs of features are neighbours.
    rotary_scale: of cosines and sines, None for that of the rotations' kind. growth: how queries grow with their
    positions, None if they do not. Layers with the same rotations have the same of both.
    qkv_bias, output_bias: whether the projections to queries, keys and values, and the one after attention, have
    biases.
    norms_heads: whether queries and keys have a norm: over each head with weights that all heads share, or that are
    each head's own, in one parameter ("apart") or in one for each head ("listed"), or over all heads together.
    head_norms: where these norms are, and norm_module the ending of the name of their class, if not that of others.
    norms_after_rotation: whether they are applied to rotated heads. learns_norms: whether they have weights.
    is_fused: whether one projection computes queries, keys and values.
    is_gated: whether the projection to queries also computes gates for the output, head by head. gate: a layer of its
    own that does so, None if there is none.
    window: how many tokens a token sees, itself included; None for all before it. part_size: the tokens of the parts of
    a sequence that do not see each other; None for no parts.
    projects_values: whether values have a projection; else they are the keys before their norm. norms_values: whether
    they have a norm over each head, without weights.
    kv_source: the number of the layer whose keys and values are used; None for the layer's own.
    has_sinks: whether each head has a learned score that takes part in its softmax.
    score_scale: by which scores are multiplied in addition to the module's scaling. score_cap: the absolute value that
    scaled scores approach, None for no limit.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rotation: str | None = ""
    is_interleaved: bool = False
    rotary_scale: float | None = None
    growth: QueryGrowth | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    norms_heads: Literal["each", "apart", "listed", "together"] | None = None
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    norm_module: str | None = None
    norms_after_rotation: bool = False
    learns_norms: bool = True
    is_fused: bool = False
    is_gated: bool = False
    gate: OutputGate | None = None
    window: int | None = None
    part_size: int | None = None
    projects_values: bool = True
    norms_values: bool = False
    kv_source: int | None = None
    has_sinks: bool = False
    score_scale: float = 1.0
    score_cap: float | None = None
    name: str = _NAME
    module: str = "Attention"

    placements: ClassVar[Mapping[str, Placement]] = {
        f"{_NAME}.q_proj.weight": _ROWS,
        f"{_NAME}.q_proj.bias": _ROWS,
        f"{_NAME}.k_proj.weight": _ROWS,
        f"{_NAME}.k_proj.bias": _ROWS,
        f"{_NAME}.v_proj.weight": _ROWS,
        f"{_NAME}.v_proj.bias": _ROWS,
        f"{_NAME}.qkv_proj.weight": _ROWS,
        f"{_NAME}.o_proj.weight": _COLUMNS,
        f"{_NAME}.sinks": _WHOLE_ROWS,
    }

    def __str__(self) -> str:
        return f"{self.heads} query and {self.kv_heads} key/value heads"

    @property
    def head_features(self) -> int:
        return self.head_dim

    @property
    def _queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def _keys(self) -> int:
        return self.kv_heads * self.head_dim

    def weights(self) -> Iterator[Weight]:
        queries = self._queries * (2 if self.is_gated else 1)
        projections = {"q_proj": queries}
        if self.kv_source is None:
            projections |= {"k_proj": self._keys} | ({"v_proj": self._keys} if self.projects_values else {})
        if self.is_fused:
            sections = tuple(projections.values())
            yield self._weight("qkv_proj.weight", (sum(sections), self.hidden), sections, "qkv_proj")
        else:
            for name, size in projections.items():
                yield self._weight(f"{name}.weight", (size, self.hidden), (), name)
                if self.qkv_bias:
                    yield self._weight(f"{name}.bias", (size,))
        yield self._weight("o_proj.weight", (self.hidden, self._queries), (), "o_proj")
        if self.output_bias:
            yield self._weight("o_proj.bias", (self.hidden,))
        if self.has_sinks:
            yield self._weight("sinks", (self.heads,))
        if self.norms_heads == "apart":
            for name, heads in zip(self.head_norms, (self.heads, self.kv_heads), strict=True):
                yield Weight(f"{self.name}.{name}.weight", (heads, self.head_dim), _WHOLE_ROWS)
        elif self.norms_heads == "listed":
            for name, heads in zip(self.head_norms, (self.heads, self.kv_heads), strict=True):
                yield from (self._weight(f"{name}.norms.{head}.weight", (self.head_dim,)) for head in range(heads))
        elif self.norms_heads and self.learns_norms:
            is_joint = self.norms_heads == "together"
            sizes = (self._queries, self._keys) if self.kv_source is None else (self._queries,)
            for name, size in zip(self.head_norms, sizes, strict=False):
                yield self._weight(f"{name}.weight", (size if is_joint else self.head_dim,))

        if (gate := self.gate) is not None:
            size, adapters = self.heads if gate.is_by_head else self._queries, (gate.name,) * gate.is_adapted
            yield Weight(f"{self.name}.{gate.name}.weight", (size, self.hidden), _ROWS, (), adapters)

    def _weight(self, name: str, shape: tuple[int, ...], sections: tuple[int, ...] = (), *adapters: str) -> Weight:
        return Weight(f"{self.name}.{name}", shape, self.placements.get(f"{_NAME}.{name}"), sections, adapters)

    def divisible(self) -> Iterator[Divisible]:
        yield Divisible("self_attn", self.heads, "query heads")
        # A ring of ranks along sp has no parts of sequences.
        by_sp = None if self.part_size is None else "divided"
        yield Divisible("self_attn", self.kv_heads, "key/value heads", by_sp)

    def cache_entries(self, spec: ParallelSpec) -> CacheEntries:
        if self.kv_source is not None:
            return CacheEntries()
        return CacheEntries(numbers_per_token=2 * self._keys // spec.tp_size_of("self_attn"))

    def kept_bytes(self, share: Share) -> float:
        """Counts queries and keys rotated, values and the output of attention, and inputs of norms and gates."""
        tp = share.spec.tp_size_of("self_attn")
        heads, kv_heads = self.heads // tp, self.kv_heads // tp
        repeated = max(1.0, share.ulysses / kv_heads)  # each rank has at least one head
        queries, keys = 2 * heads * self.head_dim, 2 * kv_heads * self.head_dim * repeated
        norms = 0
        if self.norms_values:
            keys += kv_heads * self.head_dim
        if self.norms_heads:
            queries, keys = queries + heads * self.head_dim, keys + kv_heads * self.head_dim
            norms = FLOAT32 * (2 if self.norms_heads == "together" else heads + kv_heads)
        if self.is_gated or self.gate is not None:
            queries += 2 * heads * self.head_dim  # the gates' sigmoids, and the output before it is gated
        if share.ulysses > 1:
            queries += heads * self.head_dim  # the output of attention again, by tokens
        sums = FLOAT32 * heads  # of the scores' exponentials
        if self.kv_source is not None:
            keys = 0
        inputs = share.inputs(self.hidden, sum(bool(weight.adapters) for weight in self.weights()))
        return inputs + share.number_bytes * (queries + keys) + norms + sums

    def flops(self, spec: ParallelSpec = SINGLE) -> Flops:
        norms = tuple(f"{self.name}.{name}." for name in self.head_norms)
        linears = (each for each in self.weights() if not each.name.startswith(norms))
        scores = 4.0 * self._queries / spec.tp_size_of("self_attn")
        return Flops(product_flops(linears, spec), scores=scores, view=View(self.window, self.part_size))
