"""Runs a dense feed-forward part."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...ops.fused import GATES
from ...parallel.collectives import ResidualStream
from ...parallel.mesh import Mesh
from ...shapes.parts import Dense
from .activations import UNGATED
from .merge import Merge, MergedProjection


class DenseFeedForward:
    """Implements FeedForward."""

    experts = None

    def __init__(self, part: Dense, module: Any, mesh: Mesh) -> None:
        self._part, self._module = part, module
        self._is_replicated = "mlp" in mesh.spec.replicated
        self._activated: Callable[..., Tensor] = GATES[part.activation] if part.has_gate else UNGATED[part.activation]
        self._merged = MergedProjection()

    def refresh(self, are_original: bool) -> None:
        self._merged.refresh(are_original)

    def merge(self, merge: Merge) -> None:
        if self._part.has_gate and not self._part.is_fused:
            self._merged.merge(merge, [getattr(self._module, name) for name in self._part.linears[:2]])

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        x = stream.enter(x, self._is_replicated)
        *_, down = self._part.linears
        update = getattr(self._module, down)(self._inner(x))
        return stream.leave(update, self._is_replicated)

    def _inner(self, x: Tensor) -> Tensor:
        """Returns the features [tokens, features] of x [tokens, hidden]."""
        if not self._part.has_gate:
            return self._activated(getattr(self._module, self._part.linears[0])(x))
        gate, up = self._gate_and_up(x)
        return self._activated(gate if self._part.gate_scale == 1 else gate * self._part.gate_scale, up)

    def _gate_and_up(self, x: Tensor) -> Sequence[Tensor]:
        *before, _ = self._part.linears
        if self._part.is_fused:
            return getattr(self._module, before[0])(x).chunk(2, dim=-1)
        if self._merged.suits(x):
            return self._merged.forward(x).split(self._merged.out_features, dim=-1)
        return [getattr(self._module, name)(x) for name in before]
