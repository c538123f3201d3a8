"""Mamba-2, a state-space model whose state has a fixed size: https://arxiv.org/abs/2405.21060."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...protocol.parallel_spec import SINGLE, ParallelSpec
from .mixer import Mixer
from .part import FLOAT32, CacheEntries, Divisible, Flops, Placement, Share, Weight, product_flops

_NAME = "mamba"
_ROWS, _COLUMNS = Placement("mamba", 0), Placement("mamba", 1)
_WHOLE_ROWS = Placement("mamba", 0, is_gathered=False)
_WHOLE = Placement("mamba", None, is_gathered=False)

# Tokens of the chunks at whose starts a pass keeps states (workers/ops/recurrences/state_space.py).
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Mamba(Mixer):
    """A projection to gates, x, b, c and time steps, a convolution over x, b and c, the state-space recurrence, and a
    gated norm of each group.

    Each group has its own b and c, which serve heads / groups consecutive heads. head_dim: features of x of a head.
    state_dim: features of b and c of a group. kernel: tokens that the convolution sees, the newest included.
    conv_bias, bias: whether the convolution, and the projections, have biases.
    has_norm, gates_first: whether there is a norm, and whether it follows the gate.
    scales: by which gates, x, b, c and time steps are multiplied.
    """

    hidden: int
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    has_norm: bool = True
    gates_first: bool = True
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    name: str = _NAME
    module: str = "Mixer"
    placements: ClassVar[Mapping[str, Placement]] = {
        f"{_NAME}.dt_bias": _WHOLE_ROWS,
        f"{_NAME}.A_log": _WHOLE_ROWS,
        f"{_NAME}.D": _WHOLE_ROWS,
        f"{_NAME}.conv1d.weight": _WHOLE_ROWS,
        f"{_NAME}.conv1d.bias": _WHOLE_ROWS,
        f"{_NAME}.in_proj.weight": _ROWS,
        f"{_NAME}.in_proj.bias": _ROWS,
        f"{_NAME}.norm.weight": _WHOLE_ROWS,
        f"{_NAME}.out_proj.weight": _COLUMNS,
        f"{_NAME}.out_proj.bias": _WHOLE,
    }

    def __str__(self) -> str:
        return f"{self.heads} state-space heads in {self.groups} group{'' if self.groups == 1 else 's'}"

    @property
    def sections(self) -> tuple[int, int, int, int, int]:
        """The features of gates, x, b, c and time steps."""
        features, states = self.heads * self.head_dim, self.groups * self.state_dim
        return features, features, states, states, self.heads

    def weights(self) -> Iterator[Weight]:
        features, num_mixed = self.sections[0], sum(self.sections[1:4])
        for name in ("dt_bias", "A_log", "D"):
            yield self._weight(name, (self.heads,))
        yield self._weight("conv1d.weight", (num_mixed, 1, self.kernel), self.sections[1:4])
        if self.conv_bias:
            yield self._weight("conv1d.bias", (num_mixed,), self.sections[1:4])
        yield self._weight("in_proj.weight", (sum(self.sections), self.hidden), self.sections, "gate_proj", "x_proj")
        if self.bias:
            yield self._weight("in_proj.bias", (sum(self.sections),), self.sections)
        if self.has_norm:
            yield self._weight("norm.weight", (features,))
        yield self._weight("out_proj.weight", (self.hidden, features), (), "out_proj")
        if self.bias:
            yield self._weight("out_proj.bias", (self.hidden,))

    def _weight(self, name: str, shape: tuple[int, ...], sections: tuple[int, ...] = (), *adapters: str) -> Weight:
        return Weight(f"{self.name}.{name}", shape, self.placements.get(f"{_NAME}.{name}"), sections, adapters)

    def divisible(self) -> Iterator[Divisible]:
        yield Divisible("mamba", self.groups, "groups of state-space heads", by_sp="copied", or_whole=True)
        yield Divisible("mamba", self.heads, "state-space heads", by_sp="divided", or_whole=True)

    def cache_entries(self, spec: ParallelSpec) -> CacheEntries:
        tp = spec.tp_size_of("mamba")
        return CacheEntries(
            state_numbers=sum(self.sections[1:4]) * (self.kernel - 1) // tp,
            float32_state_numbers=self.sections[0] * self.state_dim // tp,
        )

    def kept_bytes(self, share: Share) -> float:
        """Counts the projection, the convolution's output, that of the recurrence and its norm, time steps, and
        states."""
        tp = share.spec.tp_size_of("mamba")
        numbers = sum(self.sections) + 3 * self.sections[0] + 2 * self.sections[2] * self.copies_along_sp(share.spec)
        float32 = 3 * self.heads + self.sections[0] * self.state_dim / _CHUNK
        return share.inputs(self.hidden, 3) + (share.number_bytes * numbers + FLOAT32 * float32) / tp

    def working_bytes(self, share: Share) -> float:
        """Counts the float32 copies of the chunks' inputs and their gradients, what pairs of tokens have of each other,
        and the gradients of states."""
        tp = share.spec.tp_size_of("mamba")
        pairs, states = self.heads * _CHUNK, self.sections[0] * self.state_dim / _CHUNK
        return FLOAT32 * (7 * self.sections[0] + 6 * self.sections[2] + 4 * pairs + 3 * states) / tp

    def copies_along_sp(self, spec: ParallelSpec) -> int:
        """Returns how many ranks along sp have the b and c of a group: 1 unless they are more than the groups."""
        return max(1, spec.sp * spec.tp_size_of("mamba") // self.groups)

    def flops(self, spec: ParallelSpec = SINGLE) -> Flops:
        """Counts for each token what it adds to the state, and what it reads."""
        states = 4.0 * self.sections[0] * self.state_dim / spec.tp_size_of("mamba")
        return Flops(product_flops(self.weights(), spec), states=states)
