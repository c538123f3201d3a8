"""Runs the inputs that each layer of Gemma 3n and 4 has for each token, in addition to the residual stream."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from ...parallel.collectives import ResidualStream
from ...parallel.mesh import Team
from .norms import rms_norm_of


class TokenInputs:
    """Computes the inputs of all layers, of the tokens and of their embeddings.

    embed: looks up rows, int64 [tokens] -> [tokens, layers * size], of the embedding or of this rank's part of it.
    """

    def __init__(self, trunk: Any, size: int, team: Team) -> None:
        """Takes transformers' module of the trunk, the features of a layer's input, and the team along tp, which
        divides the rows of the embedding if it can."""
        self._trunk, self._size = trunk, size
        num_rows = trunk.embed_tokens_per_layer.num_embeddings
        self._own_rows = (
            None if team.size == 1 or num_rows % team.size else _OwnRows(trunk.embed_tokens_per_layer, num_rows, team)
        )
        self.embed: Callable[[Tensor], Tensor] = trunk.embed_tokens_per_layer
        self._norm = rms_norm_of(trunk.per_layer_projection_norm)

    def refresh(self) -> None:
        self._norm.refresh()

    def of_layers(
        self, tokens: Tensor, own: slice | None, embedded: Tensor, stream: ResidualStream
    ) -> Sequence[Tensor]:
        """Returns [own tokens, size] for each layer.

        They have a gradient only if the weights are trained.

        Args:
            tokens: int64 [tokens].
            own: this rank's tokens as `stream` lays them out; None for all.
            embedded: the embeddings of its tokens, [own tokens, hidden].
        """
        is_trained = self._trunk.per_layer_model_projection.weight.requires_grad
        with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
            return self._computed(self._looked_up(tokens, own, stream), embedded).unbind(1)

    def _looked_up(self, tokens: Tensor, own: slice | None, stream: ResidualStream) -> Tensor:
        """Returns the rows of this rank's tokens, [own tokens, layers * size]."""
        if self._own_rows is None:
            return self.embed(tokens if own is None else tokens[own])
        places, is_other = self._own_rows.places(tokens)
        return stream.leave(self.embed(places).masked_fill(is_other[:, None], 0), is_replicated=False)

    def _computed(self, looked_up: Tensor, embedded: Tensor) -> Tensor:
        """Returns [own tokens, layers, size]."""
        trunk = self._trunk
        projected = trunk.per_layer_model_projection(embedded) * trunk.per_layer_model_projection_scale
        normed = self._norm(projected.view(-1, self._size)).view(len(embedded), -1, self._size)
        return (normed + looked_up.view_as(normed)) * trunk.per_layer_input_scale


class _OwnRows:
    """This rank's consecutive rows of an embedding that a team divides."""

    def __init__(self, embedding: Any, num_rows: int, team: Team) -> None:
        self._number = num_rows // team.size
        self._first = team.index * self._number
        if (padding := embedding.padding_idx) is not None:
            # The row of the padding token is never trained; only the rank that has it must know.
            embedding.padding_idx = padding - self._first if 0 <= padding - self._first < self._number else None

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the place of each token's row among these, 0 if another rank has it, and whether that is so."""
        places = tokens - self._first
        is_other = (places < 0) | (places >= self._number)
        return places.masked_fill(is_other, 0), is_other


class LayerEnd:
    """Adds what a layer makes of its input, if it has one, and scales the residual stream by the layer's number."""

    def __init__(self, module: Any, has_input: bool) -> None:
        self._module = module
        self._norm = rms_norm_of(module.post_per_layer_input_norm) if has_input else None

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
            update = self._norm(module.per_layer_projection(gate * token_input))
        return hidden * scale, update * scale
