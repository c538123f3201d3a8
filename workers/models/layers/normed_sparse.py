"""Runs routed experts next to a dense part, where both read the residual stream and have norms of their own."""

from typing import Any

import torch
from torch import Tensor

from ...ops.fused import RmsNorm, rms_norm
from ...parallel.collectives import ResidualStream
from ...parallel.mesh import Mesh
from ...shapes.families import Family
from ...shapes.parts import RoutedExperts as Part
from .dense import DenseFeedForward
from .experts import GroupedExperts
from .merge import Merge
from .norms import norm_of


class NormedSparseFeedForward:
    """Implements FeedForward for a part with norms. Its input is the residual stream."""

    def __init__(self, part: Part, layer: Any, family: Family, mesh: Mesh) -> None:
        """Takes transformers' module of the layer."""
        assert part.norms is not None and part.shared is not None
        self._is_replicated = "experts" in mesh.spec.replicated
        self._router = NormedRouter(getattr(layer, part.router), part.per_token)
        experts = layer.get_submodule(part.below("experts"))
        self.experts = GroupedExperts(experts, mesh.expert_team("experts"), part.linears, self._router, part)
        self._shared = DenseFeedForward(part.shared, layer.get_submodule(part.shared.name), mesh)
        self._norms = [norm_of(getattr(layer, name), family) for name in part.norms.names]

    def refresh(self, are_original: bool) -> None:
        for norm in (*self._norms, self._router.norm):
            norm.refresh()
        self._shared.refresh(are_original)

    def merge(self, merge: Merge) -> None:
        self._shared.merge(merge)

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        before_shared, after_shared, before, after = self._norms
        shared = self._shared.forward(rms_norm(x, before_shared), stream)
        # Routes this rank's tokens of the stream, since weights and numbers are less to gather than another norm of x.
        _, weights, chosen = self._router(x)
        routed = self.experts.forward_routed(
            stream.enter(rms_norm(x, before), self._is_replicated),
            stream.enter(chosen, self._is_replicated),
            stream.enter(weights, self._is_replicated),
            stream,
        )
        return rms_norm(shared, after_shared) + rms_norm(stream.leave(routed, self._is_replicated), after)


class NormedRouter:
    """Chooses experts by a norm of tokens with a factor for each feature, and scales each expert's weights."""

    def __init__(self, module: Any, per_token: int) -> None:
        """Takes transformers' module, and the number of experts of each token."""
        self._module, self._per_token = module, per_token
        self.norm = RmsNorm(module.scale, torch.tensor(module.eps, device=module.scale.device))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits [tokens, experts], and weights and numbers of the chosen experts, both [tokens, experts of
        each], for x [tokens, hidden]."""
        logits = self._module.proj(rms_norm(x, self.norm)).float() * self._module.scalar_root_size
        weights, chosen = logits.softmax(-1).topk(self._per_token, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * self._module.per_expert_scale[chosen], chosen
