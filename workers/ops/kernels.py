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
from torch.nn.functional import gelu, silu

from ..protocol.plugins import plugin_rows
from .attention_kind import AttentionKind

if TYPE_CHECKING:
    from .fused import GatedActivation, RmsNorm, Rotation
    from .triton_kernels import TritonKernels

# With more rows for each matrix than this, torch's products are as fast as a kernel.
FEW_ROWS = 256

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


class TorchKernels:
    """Norms, rotations, gates and softmax, with their gradients, by torch's own operations. Norms and rotations compute
    in float32. The kernels of a device inherit those that they do not compute themselves.
    """

    def add_rms_norm(self, x: Tensor, update: Tensor | None, norm: "RmsNorm") -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns x + update, or x if there is none, and its norm; all [tokens, size].

        The last one is for `rms_norm_gradient`, None if that computes it again.
        """
        total = x if update is None else x + update
        inverse = inverse_rms(total, norm.eps)
        return total, (total * inverse).mul_(norm.weight).to(x.dtype), inverse

    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, norm: "RmsNorm", addend: Tensor | None, inverse: Tensor | None = None
    ) -> Tensor:
        """Returns the gradient of the input x of a norm, plus the addend; all [tokens, size].

        Adds to the gradient of the norm's parameter, if it has one.
        """
        wide, inverse = grad.float(), inverse_rms(x, norm.eps) if inverse is None else inverse
        norm.add_gradient(wide, x, inverse)
        gradient = norm_gradient(wide * norm.weight, x, inverse)
        return (gradient if addend is None else gradient.add_(addend)).to(grad.dtype)

    def rotate_heads(self, x: Tensor, rotation: "Rotation", norm: "RmsNorm | None") -> tuple[Tensor, Tensor | None]:
        """Returns the heads of x [tokens, heads, size] normed, if there is a norm, and rotated.

        The last one is for `rotate_heads_gradient`, None if that computes it again.
        """
        inverse = None if norm is None else inverse_rms(x, norm.eps)
        wide = x.float() if norm is None or inverse is None else (x * inverse).mul_(norm.weight)
        return rotation.apply(wide).to(x.dtype), inverse

    def rotate_heads_gradient(
        self,
        grad: Tensor,
        x: Tensor | None,
        rotation: "Rotation",
        norm: "RmsNorm | None",
        inverse: Tensor | None = None,
    ) -> Tensor:
        """Returns the gradient of the input x of `rotate_heads`, which is needed if there is a norm."""
        gradient = rotation.apply(grad.float(), sign=-1.0)
        if norm is not None and x is not None:
            inverse = inverse_rms(x, norm.eps) if inverse is None else inverse
            norm.add_gradient(gradient, x, inverse)
            gradient = norm_gradient(gradient.mul_(norm.weight), x, inverse)
        return gradient.to(grad.dtype)

    def gated(
        self, gate: Tensor, up: Tensor, kind: "GatedActivation", has_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output of a gate; all [tokens, size].

        The last one is for `gated_gradient` if that follows, None if it computes it again.
        """
        if kind.name != "clamped":
            active = _activated(gate, kind)
            return (active * up, active) if has_gradient else (active.mul_(up), None)
        # gate * sigmoid(alpha * gate) is silu(alpha * gate) / alpha.
        active = silu(gate.clamp(max=kind.limit).mul_(kind.alpha), inplace=True)
        return active.addcmul_(active, up.clamp(-kind.limit, kind.limit)).div_(kind.alpha), None

    def gated_gradient(
        self, grad: Tensor, gate: Tensor, up: Tensor, kind: "GatedActivation", active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of gate and up; all [tokens, size]. Without `active` they overwrite gate and up if the
        rows of both are equally far apart; with it, gate stays, since it may be a view of a saved tensor."""
        aten = torch.ops.aten
        if kind.name == "clamped":
            grad_active, is_over = up.clamp(-kind.limit, kind.limit).add_(1).mul_(grad), gate > kind.limit
            torch.mul(grad, up.abs_() <= kind.limit, out=up)
            inner = gate.clamp_(max=kind.limit).mul_(kind.alpha)
            up.mul_(silu(inner)).div_(kind.alpha)
            aten.silu_backward.grad_input(grad_active, inner, grad_input=gate).masked_fill_(is_over, 0)
            return gate, up
        if active is None:
            grad_active, grad_up, out = grad * up, torch.mul(_activated(gate, kind), grad, out=up), gate
        else:
            grad_active, grad_up = up.mul_(grad), active.mul_(grad)
            out = grad_active
        if kind.name == "silu":
            return aten.silu_backward.grad_input(grad_active, gate, grad_input=out), grad_up
        return aten.gelu_backward.grad_input(grad_active, gate, approximate="tanh", grad_input=out), grad_up

    def log_softmax(self, x: Tensor, out: Tensor) -> Tensor:
        """Returns, in `out`, which may be x, the logarithms of the softmax over each row; both [rows, n]."""
        return torch.log_softmax(x, dim=-1, out=out)

    def scaled_exponentials(self, x: Tensor, factors: Tensor) -> Tensor:
        """Replaces x [rows, n] by exp(x) times the factor of each row, [rows]."""
        return x.exp_().mul_(factors[:, None])


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """Returns 1 / sqrt(mean(x^2) + eps) over the last dimension, float32 [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def norm_gradient(grad: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """Returns the gradient of x, given the gradient of x * inverse, float32 [..., size], which it overwrites."""
    wide = x.float()
    along = inverse.pow(3).mul_(torch.linalg.vecdot(grad, wide).unsqueeze(-1)).mul_(-1 / x.shape[-1])
    return grad.mul_(inverse).addcmul_(wide, along)


def _activated(gate: Tensor, kind: "GatedActivation") -> Tensor:
    return silu(gate) if kind.name == "silu" else gelu(gate, approximate="tanh")


class Kernels(TorchKernels, ABC):
    """Kernels for float32 on the CPU. One has gradients only if it has a `_gradient` method."""

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


_TORCH = TorchKernels()


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
