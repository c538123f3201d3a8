"""Chooses the kernels that compute an operation. A decode step is hundreds of short operations; a kernel does in one
pass what torch does in two to ten. Float32 on the CPU has C kernels (the plugin cpu/), GPUs have Triton's. Where there
are none, torch's own operations compute the same.
"""

import logging
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..protocol.plugins import plugin_rows
from .attention_kind import AttentionKind
from .torch_kernels import TorchKernels

if TYPE_CHECKING:
    from .triton_kernels import TritonKernels

# With more rows for each matrix than this, torch's products are as fast as a kernel.
FEW_ROWS = 256

_TORCH = TorchKernels()

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertFactors:
    """The terms of adapters between the products that all experts of a token share, see ../lora/shared_factors.py.

    reduced: the tokens' products with A of gate, then of up, [tokens, 2 * width]. gate, up, down: B^T of gate and of
    up, and A of down, of each expert and adapter: contiguous [experts * adapters, rank, features].
    """

    reduced: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class PrefixGroups:
    """Rows of a decode step grouped by a shared prefix of their sequences.

    order: int64 [rows], group by group. bounds: int64 [groups + 1], where each group begins in `order`. num_shared:
    int64 [groups], the tokens that all sequences of a group share.
    """

    order: Tensor
    bounds: Tensor
    num_shared: Tensor


class StepRecorder(Protocol):
    """Records the operations of a decode step, and repeats them from and to the same tensors."""

    can_repeat: bool
    """False if a result depends on more than what is overwritten in place from step to step."""

    def record(self, compute: Callable[[], Tensor]) -> Tensor:
        """Calls the function and returns its result."""
        ...

    def repeat(self) -> Tensor:
        """Returns the tensor that `record` returned, overwritten."""
        ...


class Kernels(TorchKernels, ABC):
    """Kernels for float32 on the CPU. Those without a `_gradient` of their own are without gradients."""

    outdo_torch: bool
    """False where torch's products of many rows are as fast."""

    @abstractmethod
    def new_tape(self) -> StepRecorder: ...

    @abstractmethod
    def combine_pairs_gradient(self, grad: Tensor, x: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x [pairs, size] and weights [tokens, experts of each] of Kernels.combine_pairs,
        given that of its result [tokens, size]."""
        ...

    @abstractmethod
    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, kind: AttentionKind
    ) -> tuple[Tensor, Tensor]:
        """Computes the causal attention of the sequences of a packed row, without sinks.

        Args:
            query: [tokens, heads, size].
            key: [tokens, kv_heads, size].
            value: [tokens, kv_heads, value_size].
            bounds: the start of each sequence, and the end, int32 [sequences + 1].
        Returns:
            the output [tokens, heads, value_size], and the log-sum-exp of the scores, [heads, tokens].
        """
        ...

    @abstractmethod
    def attention_gradient(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sums: Tensor,
        bounds: Tensor,
        kind: AttentionKind,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value, given that of the output and the results of `attention`."""
        ...

    @abstractmethod
    def decode_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        lengths: Tensor,
        groups: PrefixGroups,
        kind: AttentionKind,
        num_threads: int,
    ) -> Tensor:
        """Runs the attention of a decode step, and stores the new keys and values. Returns the query's shape.

        Args:
            query: [rows, heads, size].
            key: [rows, kv_heads, size], like `value`.
            keys: the cache, contiguous [slots, kv_heads, capacity, size], like `values`.
            slots: the slot of each row's sequence, int64 [rows].
            lengths: its tokens so far, int64 [rows].
        """
        ...

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        """Returns x W^T + bias + addend with torch's number of threads.

        Args:
            x: [rows, in].
            weight: [out, in]; one of its dimensions is contiguous.
            addend: [rows, out]; may be overwritten.
        """
        ...

    @abstractmethod
    def grouped_matmul(self, y: Tensor, x: Tensor, matrices: Tensor, bounds: Tensor, adds: bool) -> None:
        """Multiplies rows sorted by group with their groups' matrices.

        Args:
            y: [rows, q]; overwritten by the products, with zeros for rows of no group, or `adds` them.
            x: [rows, p].
            matrices: [groups, p, q]; of their last two dimensions one is contiguous.
            bounds: where the rows of each group begin, and those of the last end, int64 [groups + 1].
        """
        ...

    @abstractmethod
    def add_low_rank(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        """Adds x a b to y [rows, q], for x [rows, p], a [p, rank] and b [rank, q]; the rows of y are contiguous."""
        ...

    @abstractmethod
    def sort_pairs(self, keys: Tensor, first: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts pairs of token and expert by group.

        Args:
            keys: `first` plus the group of each pair, int64 [tokens, experts of each]; others belong to no group.
        Returns:
            the token of each sorted pair, int64 [pairs], those of no group last; the place of each pair among the
            sorted ones, int64 [pairs]; and the pairs of each group, int64 [num_groups].
        """
        ...

    @abstractmethod
    def combine_pairs(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sums [tokens, size] of the rows x [pairs, size] of each token's experts.

        Args:
            places: the row of each pair, int64 [tokens * experts of each].
            weights: [tokens, experts of each].
        """
        ...

    @abstractmethod
    def run_experts(
        self,
        x: Tensor,
        keys: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        first: int,
        factors: ExpertFactors | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs experts with silu gates.

        Args:
            x: [tokens, hidden].
            keys: `first` plus the expert of each pair, int64 [tokens, experts of each], or with factors plus expert *
                (adapters + 1) + adapter. Pairs of other experts count as zeros.
            weights: of the experts' outputs, [tokens, experts of each].
            gate_up: [experts, hidden, 2 * features], gates first.
            down: [experts, features, hidden]; of both one of the last two dimensions is contiguous.
        Returns:
            the weighted sums of the outputs, [tokens, hidden], and of the products with A of down, [tokens, width].
        """
        ...

    @abstractmethod
    def convolve_step(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, is_silu: bool
    ) -> Tensor:
        """Returns a causal convolution's output for one more token of each sequence, [rows, channels].

        Args:
            x: [rows, channels].
            weight: [channels, width].
            bias: [channels].
            states: the last inputs, contiguous [slots, channels, width - 1]; updated.
            slots: of each row's sequence, int64 [rows].
        """
        ...

    @abstractmethod
    def delta_step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        """Returns the gated delta rule's output for one more token of each sequence, [rows, value_heads, value_dim].

        Args:
            inputs: those of DeltaInputs.
            states: contiguous [slots, value_heads, key_dim, value_dim]; updated.
            slots: of each row's sequence, int64 [rows].
        """
        ...

    @abstractmethod
    def sample(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Samples a token for each row, int64 [n].

        Also returns its log-probability at temperature 1, float32 [n], NaN if any logit is.

        Args:
            logits: [n, vocab].
            temperature: [n]; 0 takes the most likely token.
            uniform: [n]; the sampled token is the first at which the cumulative probability exceeds it.
        """
        ...


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """Returns the kernels, or None if one of the tensors needs torch's own operations."""
    for x in tensors:
        if x.dtype != torch.float32 or not x.is_cpu:
            return None
    return load_kernels()


def layer_kernels(x: Tensor) -> TorchKernels:
    """Returns what computes the norms, rotations and gates of x: Triton's kernels on a GPU, those in C for float32 on
    the CPU, else torch's own operations."""
    found = None
    if x.is_cuda:
        found = load_triton_kernels(x.device)
    elif x.is_cpu and x.dtype == torch.float32:
        found = load_kernels()
    return _TORCH if found is None else found


def load_kernels_for(dtype: torch.dtype, device: torch.device) -> None:
    """Compiles kernels.c, or one of Triton's kernels; the others are compiled when they are first used."""
    if device.type == "cuda":
        load_triton_kernels(device)
    else:
        kernels_for(torch.empty(0, dtype=dtype, device=device))


def new_step_tape() -> StepRecorder | None:
    """Returns a tape that repeats decode steps on the CPU, or None where there are no kernels."""
    return None if (kernels := load_kernels()) is None else kernels.new_tape()


@cache
def load_kernels() -> Kernels | None:
    """Compiles the CPU's kernels, which takes a second or two, unless an earlier process already has."""
    load = plugin_rows("workers.ops.cpu.kernels", "KERNELS").get("cpu")
    return None if load is None else load()


@cache
def load_triton_kernels(device: torch.device) -> "TritonKernels | None":
    """Compiles one of the kernels for a GPU, and returns all; None, with a warning, if Triton does not work here."""
    x = torch.ones(1, 16, device=device)
    try:
        from .fused import RmsNorm
        from .triton_kernels import TritonKernels

        TritonKernels().add_rms_norm(x, None, RmsNorm(x[0], x.new_zeros(())))
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "Triton's kernels do not run here, so passes on %s take up to twice as long: %s. Install gcc or clang, and"
            " a CUDA build of torch, which brings Triton",
            device,
            error,
        )
        return None
    return TritonKernels()


def with_rows(x: Tensor) -> Tensor:
    """Returns x, or a copy if the numbers of a row are not contiguous."""
    rest = x.stride()[1:]
    return x if rest in ((1,), (x.shape[-1], 1)) else x.contiguous()
