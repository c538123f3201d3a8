"""The weights of a sparse layer's experts, in the layout of their module in transformers, and the products with them.

Features are in one order for all layouts: all gates, then all ups, or ups alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations as of_transformers
from transformers.integrations.moe import _default_apply_gate

from ...ops.frozen.quantized import dequantized
from ...ops.fused import EXPERT_ACTIVATIONS, Activation, GatedActivation
from ...ops.grouped_gemm import GroupedRows
from ...shapes.parts import RoutedExperts

_NAMES: Mapping[type[nn.Module], str] = {
    nn.SiLU: "silu",
    of_transformers.SiLUActivation: "silu",
    of_transformers.GELUTanh: "gelu_pytorch_tanh",
    of_transformers.ReLUSquaredActivation: "relu2",
}

# The attributes with alpha and limit of clamped gates, by the home of the function that computes them.
_CLAMPED: Mapping[str, tuple[str, str]] = {
    "transformers.models.gpt_oss.modeling_gpt_oss": ("alpha", "limit"),
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl": ("swiglu_alpha", "swiglu_limit"),
}


def activation_of(experts: Any, part: RoutedExperts | None = None) -> Activation | None:
    """Returns the activation of transformers' experts, None if ExpertWeights does not compute what they compute.

    Args:
        part: declares the layout of their matrices; None if their class does.
    """
    if part is not None and not part.marks_transposed:
        return _plain_activation(experts)
    if not hasattr(experts, "is_concatenated") or experts.has_post_expert_norm:
        return None
    gate = type(experts)._apply_gate
    if gate is not _default_apply_gate:
        clamped = _CLAMPED.get(gate.__module__)
        return None if clamped is None else GatedActivation("clamped", *(getattr(experts, name) for name in clamped))
    activation = _plain_activation(experts)
    return (
        activation if activation is not None and isinstance(activation, GatedActivation) == experts.has_gate else None
    )


def _plain_activation(experts: Any) -> Activation | None:
    names = [name for kind, name in _NAMES.items() if type(experts.act_fn) is kind]
    return EXPERT_ACTIVATIONS[names[0]] if names else None


class ExpertWeights:
    """The matrices, and biases if there are any, of experts whose activation is known.

    The first matrices, `gate_up_proj` or `up_proj`, are [experts, features, hidden], with gates first or in turns with
    ups; the second, `down_proj`, are [experts, hidden, features]. Both may be transposed.
    """

    def __init__(self, experts: Any, activation: Activation, part: RoutedExperts | None) -> None:
        """Takes the part as activation_of does."""
        self.activation, has_gates = activation, isinstance(activation, GatedActivation)
        self.names = "gate_up_proj" if has_gates else "up_proj", "down_proj"
        self._experts = experts
        self._is_transposed = experts.is_transposed if part is None else part.is_transposed
        self._alternates = has_gates and not experts.is_concatenated if part is None else part.alternates

    @property
    def num_own(self) -> int:
        return self._parameter(self.names[0]).shape[0]

    @property
    def hidden_size(self) -> int:
        """Size of the experts' inputs and outputs."""
        return self._parameter(self.names[0]).shape[1 if self._is_transposed else 2]

    @property
    def are_learned(self) -> bool:
        return self._parameter(self.names[0]).requires_grad

    @property
    def plain(self) -> tuple[Tensor, Tensor] | None:
        """The matrices [experts, in, out], if silu gates are all that is between their products."""
        if self.activation is not EXPERT_ACTIVATIONS["silu"] or self._alternates:
            return None
        gate_up, down = (self._parameter(name) for name in self.names)
        has_bias = any(self._bias(name) is not None for name in self.names)
        if has_bias or not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)):
            return None
        return (gate_up, down) if self._is_transposed else (gate_up.mT, down.mT)

    def features(self, groups: GroupedRows, rows: Tensor) -> Tensor:
        """Returns the features [rows, features] of rows [rows, hidden], sorted by expert."""
        features = self._product(groups, rows, self.names[0])
        return _gates_first(features) if self._alternates else features

    def output(self, groups: GroupedRows, hidden: Tensor) -> Tensor:
        """Returns the experts' outputs for what their activation returned; rows of no expert are zeros."""
        return self._product(groups, hidden, self.names[1])

    def output_backward(self, groups: GroupedRows, grad: Tensor) -> Tensor:
        return groups.matmul(grad, self._matrices(self.names[1]).mT)

    def features_backward(self, groups: GroupedRows, grad: Tensor) -> Tensor:
        """Returns the gradient of `features`' input; `grad` has gates first."""
        return groups.matmul(self._in_order(grad), self._matrices(self.names[0]).mT)

    def add_output_gradients(self, groups: GroupedRows, grad: Tensor, hidden: Tensor) -> None:
        """Adds to the gradients of the second matrices and their biases, if they have any."""
        self._add_gradients(groups, grad, hidden, self.names[1])

    def add_features_gradients(self, groups: GroupedRows, grad: Tensor, rows: Tensor) -> None:
        """Adds to the gradients of the first matrices and their biases, if they have any."""
        self._add_gradients(groups, self._in_order(grad), rows, self.names[0])

    def _product(self, groups: GroupedRows, x: Tensor, name: str) -> Tensor:
        y = groups.matmul(x, self._matrices(name))
        if (bias := self._bias(name)) is not None:
            groups.add_vectors(y, bias)
        return y

    def _add_gradients(self, groups: GroupedRows, grad: Tensor, x: Tensor, name: str) -> None:
        of_matrices, bias = self._parameter(name).grad, self._bias(name)
        if of_matrices is not None:
            sides = (x, grad) if self._is_transposed else (grad, x)
            groups.add_outer([of_matrices], *sides)
        if bias is not None and bias.grad is not None:
            groups.add_sums(bias.grad, grad)

    def _matrices(self, name: str) -> Tensor:
        """Returns the matrices [experts, in, out]."""
        matrices = dequantized(self._parameter(name))
        return matrices if self._is_transposed else matrices.mT

    def _parameter(self, name: str) -> Any:
        return getattr(self._experts, name)

    def _bias(self, name: str) -> Tensor | None:
        """Returns the biases [experts, out]; None too where another rank adds them."""
        return getattr(self._experts, f"{name}_bias", None)

    def _in_order(self, features: Tensor) -> Tensor:
        """Returns features, whose gates are first, in the order of the weights."""
        return torch.stack(features.chunk(2, dim=-1), dim=-1).flatten(-2) if self._alternates else features


def _gates_first(features: Tensor) -> Tensor:
    return features.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
