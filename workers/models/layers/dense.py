"""Runs a dense feed-forward part."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...ops.fused import GATES, UNGATED
from ...parallel.collectives import ResidualStream
from ...parallel.mesh import Mesh
from ...shapes.parts import Dense
from .merge import Merge, MergedProjection


class DenseFeedForward:
    """Implements FeedForward."""

    experts = None

    def __init__(self, part: Dense, module: Any, mesh: Mesh) -> None:
        self._part, self._module = part, module
        *self._before, self._down = part.linears
        self._is_replicated = "mlp" in mesh.spec.replicated
        self._activated: Callable[..., Tensor] = GATES[part.activation] if part.has_gate else UNGATED[part.activation]
        self._merged = MergedProjection()

    def refresh(self, are_original: bool) -> None:
        self._merged.refresh(are_original)

    def merge(self, merge: Merge) -> None:
        if self._part.has_gate and not self._part.is_fused:
            self._merged.merge(merge, [getattr(self._module, name) for name in self._before])

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        x = stream.enter(x, self._is_replicated)
        if self._merged.suits(x):
            features = self._merged.forward(x).split(self._merged.out_features, dim=-1)
        elif self._part.is_fused:
            features = getattr(self._module, self._before[0])(x).chunk(2, dim=-1)
        else:
            features = [getattr(self._module, name)(x) for name in self._before]
        if self._part.gate_scale != 1:
            features = features[0] * self._part.gate_scale, features[1]
        hidden = self._activated(*features)
        return stream.leave(getattr(self._module, self._down)(hidden), self._is_replicated)
