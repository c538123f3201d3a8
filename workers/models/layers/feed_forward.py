"""Runs feed-forward parts, dense and sparse: routed experts, the projections around them, and shared experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.fused import GATES, UNGATED, RmsNorm
from ...ops.linear import Merge, MergedProjection
from ...parallel.collectives import ResidualStream
from ...parallel.mesh import Mesh
from ...shapes.families import Family
from ...shapes.parts import Dense, RoutedExperts
from .experts import GroupedExperts
from .norms import norm_of


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


class SparseFeedForward:
    """Implements FeedForward."""

    def __init__(self, part: RoutedExperts, layer: Any, mesh: Mesh) -> None:
        """Takes transformers' module of the layer."""
        self._is_replicated = "experts" in mesh.spec.replicated
        module, shared = getattr(layer, part.name), part.shared
        self._router = _router(part, module)
        self.experts = GroupedExperts(module.experts, mesh.expert_team("experts"), part.linears, self._router, part)
        self._shared: DenseFeedForward | None = None
        if shared is not None:
            self._shared = DenseFeedForward(shared, layer.get_submodule(shared.name), mesh)
        self._part, self._module = part, module

    def refresh(self, are_original: bool) -> None:
        if self._shared is not None:
            self._shared.refresh(are_original)

    def merge(self, merge: Merge) -> None:
        if self._shared is not None:
            self._shared.merge(merge)

    def forward(self, x: Tensor, stream: ResidualStream) -> Tensor:
        tokens = stream.enter(x, self._is_replicated)
        routed = stream.leave(self._routed(tokens, stream), self._is_replicated)
        routed = routed if self._part.scale == 1 else routed * self._part.scale
        if self._shared is None:
            return routed
        shared = self._shared.forward(x, stream)
        return routed + (shared * self._module.shared_expert_gate(x).sigmoid() if self._part.gates_shared else shared)

    def _routed(self, x: Tensor, stream: ResidualStream) -> Tensor:
        """Returns the experts' output [tokens, hidden], or this rank's part of the sum if ranks divide them."""
        if self._part.scales_inputs:
            weights, chosen = self._router(x)[0].max(dim=-1, keepdim=True)
            return self.experts.forward_routed(x * weights, chosen, torch.ones_like(weights), stream)
        if self._part.latent is None:
            return self.experts.forward(x, stream)
        latents = self._module.fc1_latent_proj(x)
        return self._module.fc2_latent_proj(self.experts.forward(x, stream, latents))


def _router(part: RoutedExperts, module: Any) -> Callable[[Tensor], Any]:
    """Returns transformers' router, which maps tokens [tokens, hidden] to logits, weights and experts."""
    router, correction = getattr(module, part.router), part.block_correction
    return router if correction is None else lambda x: router(x.unsqueeze(0), getattr(module, correction))


class NormedSparseFeedForward:
    """Implements FeedForward for experts next to a dense part, where both read the residual stream and have norms of
    their own."""

    def __init__(self, part: RoutedExperts, layer: Any, family: Family, mesh: Mesh) -> None:
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
        shared = self._shared.forward(before_shared(x), stream)
        # Routes this rank's tokens of the stream, since weights and numbers are less to gather than another norm of x.
        _, weights, chosen = self._router(x)
        routed = self.experts.forward_routed(
            stream.enter(before(x), self._is_replicated),
            stream.enter(chosen, self._is_replicated),
            stream.enter(weights, self._is_replicated),
            stream,
        )
        return after_shared(shared) + after(stream.leave(routed, self._is_replicated))


class NormedRouter:
    """Chooses experts by a norm of tokens with a factor for each feature, and scales each expert's weights."""

    def __init__(self, module: Any, per_token: int) -> None:
        """Takes transformers' module, and the number of experts of each token."""
        self._module, self._per_token = module, per_token
        self.norm = RmsNorm(module.scale, torch.tensor(module.eps, device=module.scale.device))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits [tokens, experts], and weights and numbers of the chosen experts, both [tokens, experts of
        each], for x [tokens, hidden]."""
        logits = self._module.proj(self.norm(x)).float() * self._module.scalar_root_size
        weights, chosen = logits.softmax(-1).topk(self._per_token, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * self._module.per_expert_scale[chosen], chosen
