"""The two matrices of one target, and their products."""

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .adapter import Adapter


class LoraPair:
    """Applies one target's matrices: y += scale * (x A^T) B^T."""

    def __init__(self, adapter: "Adapter", name: str) -> None:
        self.scale = adapter.scale
        # Weak: the adapter holds its pairs, and a cycle would keep a dropped one in memory until garbage collection.
        self._adapter: Adapter = weakref.proxy(adapter)
        self._name = name

    @property
    def a(self) -> Tensor:
        """A: float32 [rank, in], a view of the adapter's weights."""
        return self._adapter.matrices(self._name)[0]

    @property
    def b(self) -> Tensor:
        """B: float32 [out, rank], a view of the adapter's weights."""
        return self._adapter.matrices(self._name)[1].t()

    @property
    def a_grad(self) -> Tensor:
        """The gradient of A in this thread's lane: float32 [rank, in]."""
        return self._adapter.gradients.of_lane().views[self._name][0]

    @property
    def b_grad(self) -> Tensor:
        """The gradient of B in this thread's lane: float32 [out, rank]."""
        return self._adapter.gradients.of_lane().views[self._name][1].t()

    def project_down(self, x: Tensor) -> Tensor:
        """Returns x A^T [tokens, rank] for x [tokens, in]. x has the base's dtype, as in the other products."""
        a, _ = self._adapter.vectors.weight_views()[self._name]
        return x @ a.t()

    def add_projection_up(self, y: Tensor, reduced: Tensor) -> None:
        """Adds scale * reduced B^T to y [tokens, out]."""
        _, b_t = self._adapter.vectors.weight_views()[self._name]
        y.addmm_(reduced, b_t, alpha=self.scale)

    def backward_of_x(self, grad: Tensor, grad_x: Tensor) -> None:
        """Adds to the gradient of x alone, for a pair that is not trained."""
        a, b_t = self._adapter.vectors.weight_views()[self._name]
        grad_x.addmm_((grad @ b_t.t()).mul_(self.scale), a)

    def backward(self, grad: Tensor, x: Tensor, reduced: Tensor, grad_x: Tensor | None) -> None:
        """Adds to the gradients of A and B, and to `grad_x` [tokens, in] unless it is None.

        `grad` [tokens, out] is the gradient of y; x and reduced are those of `project_down` and `add_projection_up`.
        """
        a, b_t = self._adapter.vectors.weight_views()[self._name]
        grad_reduced = (grad @ b_t.t()).mul_(self.scale)
        _add_product(self.a_grad, grad_reduced.t(), x, 1.0)
        _add_product(self.b_grad.t(), reduced.t(), grad, self.scale)
        if grad_x is not None:
            grad_x.addmm_(grad_reduced, a)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Adds scale * left @ right to `total`, summed in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right, alpha=scale)
    elif left.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=torch.float32), alpha=scale)
    else:
        total.addmm_(left.float(), right.float(), alpha=scale)
