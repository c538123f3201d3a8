"""Computes x W^T + bias with the frozen weights of a base, of one linear layer or of several as one."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..resources.memory import release_freed_memory
from ..resources.threads import WORTH_ALL, ThreadCount
from .kernels import FEW_ROWS, kernels_for

# Rows and columns of matrices that are large enough for the highest rate, by the type of the device; for how long their
# products are timed.
_MEASURED_SIZES = {"cpu": 512, "cuda": 8192}
_LEAST_PRODUCTS, _MEASURING_SECONDS = 3, 0.03

# Kernels are as fast as torch, or faster, on all processors with so few rows, and with more of them if the weights stay
# in a cache.
_FEWEST_ROWS, _FEW_ROWS, _CACHED_WEIGHTS = 4, 64, 2 << 20

# With more tokens than this a merged product is no faster on the CPU, and its parts, strided views, are slower to read.
_MAX_MERGED_TOKENS = 256

# Makes one linear layer of several of the same input; `out_features` of the result says how to split its output.
Merge = Callable[[Sequence[Any]], Any]


class Product(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        """Returns x W^T + bias + addend for x [tokens, in], weight [out, in].

        The addend [tokens, out] may be overwritten.
        """
        ...


class FrozenProduct:
    """Multiplies with a base's frozen weights. is_torch: whether it uses torch's own product."""

    def __init__(self, device: torch.device, dtype: torch.dtype, threads: ThreadCount) -> None:
        self._product, self._threads = frozen_product(device, dtype), threads
        self.is_torch = self._product is torch_linear

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        if self._threads.alone and weight.numel() * x.shape[0] > WORTH_ALL:
            with self._threads.all_threads():
                return self._product(x, weight, bias, addend)
        return self._product(x, weight, bias, addend)


class MergedProjection:
    """Several linear layers of one input as one product, once they are merged; decides when that is faster."""

    def __init__(self) -> None:
        self._merged: Any = None
        self._is_current = True

    def merge(self, merge: Merge, linears: Sequence[Any]) -> None:
        self._merged = merge(linears)

    def refresh(self, are_original: bool) -> None:
        """Updates whether the merged weights are those of the parameters."""
        self._is_current = are_original

    @property
    def out_features(self) -> tuple[int, ...]:
        """The output features of each linear layer, or of each part of one that adapters adapt."""
        return self._merged.out_features

    def suits(self, x: Tensor) -> bool:
        """True if the merged product should run for x [tokens, in]."""
        if self._merged is None or not self._is_current or torch.is_grad_enabled():
            return False
        return not x.is_cpu or x.shape[0] <= _MAX_MERGED_TOKENS

    def forward(self, x: Tensor) -> Tensor:
        """Returns the concatenated outputs of all layers."""
        return self._merged(x)


def frozen_product(device: torch.device, dtype: torch.dtype) -> Product:
    """Returns the fastest product for weights of this device and dtype.

    MKL, behind torch's own linear, uses only half of the vector width of x86 processors that are not Intel's. There
    oneDNN is faster.
    """
    processors = Path("/proc/cpuinfo")
    is_mkl = device.type == "cpu" and dtype == torch.float32 and torch.backends.mkl.is_available()
    if not (is_mkl and torch.backends.mkldnn.is_available() and processors.exists()):
        return torch_linear
    return torch_linear if "GenuineIntel" in processors.read_text() else compiled_linear


@cache
def product_rate(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
    """Measures the operations per second of large products on a device, two for each multiplication and its addition.

    On the CPU it measures one thread, by the time that it runs, since on a busy machine threads wait for a core and for
    each other, and returns the rate of as many.

    Args:
        num_threads: of this process on the CPU.
    """
    torch.set_num_threads(1)
    try:
        size = _MEASURED_SIZES[device.type]
        rate = 2 * size**3 / min(_product_seconds(size, device, dtype))
    finally:
        torch.set_num_threads(num_threads)
    release_freed_memory(device)
    return rate * num_threads if device.type == "cpu" else rate


def _product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> Iterator[float]:
    """Yields the seconds of products of two square matrices, until they have taken long enough together."""
    product, (x, weight) = frozen_product(device, dtype), torch.rand(2, size, size, device=device).to(dtype)
    weight = to_product_layout(weight)
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    began, num = clock(), 0
    while num < _LEAST_PRODUCTS or clock() - began < _MEASURING_SECONDS:
        started = clock()
        product(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield clock() - started
        num += 1


def to_product_layout(weight: Tensor) -> Tensor:
    """Returns a frozen weight [out, in] in the memory layout that its product reads fastest.

    For MKL the weights of an input are contiguous. With 8 to 32 rows that takes a fifth to two fifths less time, with
    hundreds the same.
    """
    if weight.device.type != "cpu" or frozen_product(weight.device, weight.dtype) is not torch_linear:
        return weight
    return weight.t().contiguous().t()


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(logits / cap), computed in place; the logits as they are without a cap."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def soft_cap_derivatives(capped: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    """Returns the derivatives of `soft_capped`, given its result."""
    return torch.div(capped, cap, out=out).square_().neg_().add_(1)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left^T right, of [rows, p] and [rows, q], to total [p, q], which is float32 or of their dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.t().float(), right.float())


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """Multiplies by torch. The product is summed into the addend, which saves a pass over the result."""
    if addend is None:
        return linear(x, weight, bias)
    addend.addmm_(x, weight.t())
    return addend if bias is None else addend.add_(bias)


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """Multiplies by a kernel or, if there are many rows, by oneDNN, for float32 on the CPU."""
    kernels = kernels_for(x, weight) if len(x) <= FEW_ROWS and 1 in weight.stride() else None
    most_rows = _FEW_ROWS if weight.numel() <= _CACHED_WEIGHTS else _FEWEST_ROWS
    if kernels is not None and (kernels.outdo_torch or len(x) <= most_rows):
        return kernels.linear(x, weight, bias, addend)
    if addend is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, addend, weight, bias, "add")
