"""Gradients of an adapter's matrices."""

from torch import Tensor
from trainhouse.workers.lora import Adapter


def pair_gradients(adapter: Adapter, name: str) -> tuple[Tensor, Tensor]:
    """Returns the gradients of A [rank, in] and B [out, rank] of a target in this thread's lane."""
    a, b_t = adapter.gradients.of_lane().views[name]
    return a, b_t.t()
