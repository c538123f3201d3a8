"""Runs a dense feed-forward part."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...ops.fused import GATES
from ...parallel.collectives import ResidualStream
from ...parallel.mesh import Mesh
from ...shapes.parts import Dense
from .merge import Merge, MergedProjection


class DenseFeedForward:
    """Implements FeedForward."""

    experts = None

    def __init__(self, part: Dense, module: Any, mesh: Mesh) -> None:
        self._part, self._module = part, module
        self._is_replicated = "mlp" in mesh.spec.replicated
        self._activated = GATES[part.activation]
        self._merged = MergedProjection()

    def refresh(self, are_original: bool) -> None:
        self._merged.refresh(are_original)

    def merge(self, merge: Merge) -> None:
        if not self._part.is_fused:
            self._merged.merge(merge, [self._module.gate_proj, self._module.up_proj])

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        x = stream.enter(x, self._is_replicated)
        update = self._module.down_proj(self._activated(*self._gate_and_up(x)))
        return stream.leave(update, self._is_replicated)

    def _gate_and_up(self, x: Tensor) -> Sequence[Tensor]:
        if self._part.is_fused:
            return self._module.gate_up_proj(x).chunk(2, dim=-1)
        if self._merged.suits(x):
            return self._merged.forward(x).split(self._merged.out_features, dim=-1)
        return self._module.gate_proj(x), self._module.up_proj(x)
