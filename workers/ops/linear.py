"""How x W^T + bias is made with the frozen weights of a base."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from .threads import Threads


class Product(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        """x [tokens, in] W^T + bias + addend, weight [out, in]. The addend [tokens, out] is overwritten or left."""
        ...


class FrozenProduct:
    """The product with a base's frozen weights. is_torch: whether it is torch's own."""

    def __init__(self, device: torch.device, dtype: torch.dtype, threads: Threads) -> None:
        self._product, self._threads = frozen_product(device, dtype), threads
        self.is_torch = self._product is torch_linear

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        """As Product."""
        if self._threads.are_worth(weight.numel() * x.shape[0]):
            with self._threads.together():
                return self._product(x, weight, bias, addend)
        return self._product(x, weight, bias, addend)


def frozen_product(device: torch.device, dtype: torch.dtype) -> Product:
    """For weights there, of this type."""
    return mkldnn_linear if _mkl_is_slow(device, dtype) else torch_linear


def laid_out(weight: Tensor) -> Tensor:
    """A frozen weight [out, in] as the product of its kind reads it fastest: for MKL an input's weights side by side.

    With 8 to 32 rows that takes a fifth to two fifths less time, with hundreds the same.
    """
    if weight.device.type != "cpu" or frozen_product(weight.device, weight.dtype) is not torch_linear:
        return weight
    return weight.t().contiguous().t()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """left^T right, of [rows, p] and [rows, q], to total [p, q], float32 or what they are."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.t().float(), right.float())


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """The product is summed where the addend lies, which costs no pass over the result of its own."""
    if addend is None:
        return linear(x, weight, bias)
    addend.addmm_(x, weight.t())
    return addend if bias is None else addend.add_(bias)


def mkldnn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """The same by oneDNN, for float32 on the CPU."""
    if addend is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, addend, weight, bias, "add")


def _mkl_is_slow(device: torch.device, dtype: torch.dtype) -> bool:
    """MKL, behind torch's own linear, uses only half of the vector width of x86 processors that are not Intel's."""
    if device.type != "cpu" or dtype != torch.float32 or not torch.backends.mkl.is_available():
        return False
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "GenuineIntel" not in processors.read_text() and torch.backends.mkldnn.is_available()
