"""Runs the inputs that each layer of Gemma 3n and 4 has for each token, in addition to the residual stream."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from ...ops.fused import rms_norm
from .norms import norm_of


class TokenInputs:
    """Computes the inputs of all layers, of the tokens and of their embeddings.

    embed: looks up int64 [tokens] -> [tokens, layers * size].
    """

    def __init__(self, trunk: Any, size: int) -> None:
        """Takes transformers' module of the trunk, and the features of a layer's input."""
        self._trunk, self._size = trunk, size
        self.embed: Callable[[Tensor], Tensor] = trunk.embed_tokens_per_layer
        self._norm = norm_of(trunk.per_layer_projection_norm, adds_one=False)

    def refresh(self) -> None:
        """Updates the norm, after its parameter was replaced."""
        self._norm.refresh()

    def of_layers(self, tokens: Tensor, embedded: Tensor) -> Sequence[Tensor]:
        """Returns [tokens, size] for each layer, given int64 [tokens] and their embeddings [tokens, hidden].

        They have a gradient only if the weights are trained.
        """
        is_trained = self._trunk.per_layer_model_projection.weight.requires_grad
        with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
            return self._computed(tokens, embedded).unbind(1)

    def _computed(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Returns [tokens, layers, size]."""
        trunk = self._trunk
        projected = trunk.per_layer_model_projection(embedded) * trunk.per_layer_model_projection_scale
        normed = rms_norm(projected.view(-1, self._size), self._norm).view(len(tokens), -1, self._size)
        looked_up = self.embed(tokens).view_as(normed)
        return (normed + looked_up) * trunk.per_layer_input_scale


class LayerEnd:
    """Adds what a layer makes of its input, if it has one, and scales the residual stream by the layer's number."""

    def __init__(self, module: Any, has_input: bool) -> None:
        self._module = module
        self._norm = norm_of(module.post_per_layer_input_norm, adds_one=False) if has_input else None

    def refresh(self) -> None:
        if self._norm is not None:
            self._norm.refresh()

    def forward(self, hidden: Tensor, update: Tensor, token_input: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns hidden states and the update not yet added to them, given the same after the layer's parts.

        Args:
            token_input: [tokens, size], None if the layer has none.
        """
        module, scale = self._module, self._module.layer_scalar
        if self._norm is not None:
            assert token_input is not None
            hidden = hidden + update
            gate = gelu(module.per_layer_input_gate(hidden), approximate="tanh")
            update = rms_norm(module.per_layer_projection(gate * token_input), self._norm)
        return hidden * scale, update * scale
