"""Compiles kernels.c and training.c for this machine at first use, if it has a C compiler, and calls the first on
tensors (training_kernels.py the second); loads Triton's.

A decode step is hundreds of short operations; a kernel does in one pass what torch does in two to ten. Those in C are
for float32 on the CPU, Triton's for a GPU. Where there are none, torch's own operations compute the same.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..protocol.cache_directory import cache_directory
from ..resources.lanes import lane_threads
from ..resources.threads import WORTH_ALL
from .attention_kind import AttentionKind

if TYPE_CHECKING:
    from .triton_kernels import TritonKernels

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "training.c"))
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("products.h", "vectors.h"))
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_SECONDS = 120
# With fewer numbers than this, waking up other threads does not pay.
_WORTH_THREADS = 65536

# With more rows for each matrix than this, torch's products are as fast as a kernel.
FEW_ROWS = 256

_WIDE_REGISTER = 16

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "add_rms_norm": [*[_POINTER] * 5, _FLOAT, *[_SIZE] * 2, _INT],
    "rotate_heads": [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _FLOAT, _POINTER, _POINTER, *[_SIZE] * 4, _INT],
    "swiglu": [*[_POINTER] * 3, *[_SIZE] * 3, _INT],
    "decode_attention": [_POINTER, *[_POINTER, _SIZE] * 3, *[_POINTER] * 8, *[_SIZE] * 6, _FLOAT, _FLOAT, _INT],
    "grouped_matmul": [*[_POINTER, _SIZE] * 2, _POINTER, *[_SIZE] * 2, _INT, _POINTER, *[_SIZE] * 4, _INT, _INT],
    "register_size": [],
    "add_low_rank": [*[_POINTER, _SIZE] * 4, *[_SIZE] * 4],
    "sort_pairs": [*[_POINTER] * 4, *[_SIZE] * 4],
    "combine_pairs": [*[_POINTER] * 4, *[_SIZE] * 3],
    "run_experts": [*[_POINTER] * 8, *[_SIZE] * 6, _INT],
    "convolve_step": [_POINTER, _POINTER, _SIZE, *[_POINTER] * 4, *[_SIZE] * 3, _INT, _INT],
    "delta_step": [_POINTER, *[_POINTER, _SIZE] * 3, *[_POINTER] * 4, *[_SIZE] * 5, _INT],
    "choose": [*[_POINTER] * 5, *[_SIZE] * 2, _INT],
}

# Return 1 if they get no memory for what they compute on the way.
_FALLIBLE = ("decode_attention", "add_low_rank", "sort_pairs", "run_experts", "delta_step")

_log = logging.getLogger(__name__)

Recorder = Callable[[Callable[[], object]], None]


class CompiledLibrary:
    """The compiled functions, as attributes. A thread can record its calls, to repeat them later."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._recording = library, _Recording()

    def declare(self, arguments: Mapping[str, Sequence[object]], fallible: Sequence[str]) -> None:
        """Declares the types of functions' arguments, and the functions that return 1 if they get no memory."""
        for name, types in arguments.items():
            function = getattr(self._library, name)
            function.argtypes = types
            if name in fallible:
                function.errcheck = _raise_if_failed
            setattr(self, name, partial(self._call, function))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...

    @contextmanager
    def recorded_by(self, record: Recorder) -> Iterator[None]:
        """Calls `record` on this thread, while inside, with a function that repeats the call, at each call."""
        self._recording.record = record
        try:
            yield
        finally:
            self._recording.record = None

    def _call(self, function: Callable[..., int], *arguments: object) -> int:
        if (record := self._recording.record) is not None:
            record(partial(function, *arguments))
        return function(*arguments)


class _Recording(threading.local):
    record: Recorder | None = None


def _raise_if_failed(failed: int, function: Any, arguments: Sequence[object]) -> int:
    if failed:
        raise MemoryError(f"kernel {function.__name__}: the host has no memory for what it computes on the way")
    return failed


class _Matrices(ctypes.Structure):
    """The struct matrices of kernels.c."""

    _fields_ = [("numbers", _POINTER), ("group_stride", _SIZE), ("row_stride", _SIZE), ("transposed", _INT)]

    @staticmethod
    def of(matrices: Tensor) -> "_Matrices":
        """Describes [groups, p, q], of whose last two dimensions one is contiguous."""
        transposed = matrices.stride(2) != 1
        return _Matrices(matrices.data_ptr(), matrices.stride(0), matrices.stride(2 if transposed else 1), transposed)


class _ExpertTerms(ctypes.Structure):
    """The struct expert_terms of kernels.c."""

    _fields_ = [
        *((name, _POINTER) for name in ("reduced", "gate", "up", "down")),
        *((name, _SIZE) for name in ("width", "rank", "adapters")),
    ]


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


class Kernels:
    """Calls the kernels on float32 tensors on the CPU, without gradients.

    The numbers of a row must be contiguous; a copy is made if they are not. The class is long because it has a method
    for each kernel.
    """

    def __init__(self, library: CompiledLibrary) -> None:
        library.declare(_ARGUMENTS, _FALLIBLE)
        self.library, self._most_threads = library, torch.get_num_threads()
        # On registers of 16 numbers (AVX-512) torch's products are as fast, and faster if all dimensions are large.
        self.outdo_torch = library.register_size() < _WIDE_REGISTER

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the norm of x [tokens, size] with weight [size]."""
        x, out = x.contiguous(), x.new_empty(x.shape)
        self.library.add_rms_norm(
            out.data_ptr(), None, x.data_ptr(), None, weight.data_ptr(), eps, *x.shape, threads_for(x)
        )
        return out

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns x + update, and its norm; all [tokens, size]."""
        x, update = x.contiguous(), update.contiguous()
        total, out = x.new_empty(x.shape), x.new_empty(x.shape)
        pointers = (tensor.data_ptr() for tensor in (out, total, x, update, weight))
        self.library.add_rms_norm(*pointers, eps, *x.shape, threads_for(x))
        return total, out

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Returns the heads normed, if there is a weight, and rotated.

        Args:
            x: [tokens, heads, size].
            cos: [tokens, 1, rotated], for the first features of each head.
            sin: [tokens, 1, rotated / 2].
            weight: [size] or [heads, size].
        """
        tokens, heads, size = x.shape
        x, out = with_rows(x), x.new_empty(x.shape)
        pointer, stride = (None, 0) if weight is None else (weight.data_ptr(), size if weight.dim() > 1 else 0)
        angles = cos.data_ptr(), sin.data_ptr()
        self.library.rotate_heads(
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            pointer,
            stride,
            eps,
            *angles,
            tokens,
            heads,
            size,
            cos.shape[-1],
            threads_for(x),
        )
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up; all [tokens, size]."""
        gate, up = with_rows(gate), with_rows(up)
        if gate.stride(0) != up.stride(0):
            gate, up = gate.contiguous(), up.contiguous()
        out = gate.new_empty(gate.shape)
        self.library.swiglu(
            out.data_ptr(), gate.data_ptr(), up.data_ptr(), gate.stride(0), *gate.shape, threads_for(gate)
        )
        return out

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
        query, key, value, out = with_rows(query), with_rows(key), with_rows(value), query.new_empty(query.shape)
        new = (part for tensor in (query, key, value) for part in (tensor.data_ptr(), tensor.stride(0)))
        where = (tensor.data_ptr() for tensor in (slots, lengths, groups.order, groups.bounds, groups.num_shared))
        sizes = len(groups.num_shared), query.shape[1], key.shape[1], query.shape[2], keys.shape[2], kind.window or 0
        sinks = None if kind.sinks is None else kind.sinks.scores
        cache = keys.data_ptr(), values.data_ptr(), None if sinks is None else sinks.data_ptr()
        scales = kind.scaling, kind.cap or 0.0
        self.library.decode_attention(out.data_ptr(), *new, *cache, *where, *sizes, *scales, num_threads)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        """Returns x W^T + bias + addend with torch's number of threads.

        Args:
            x: [rows, in].
            weight: [out, in]; one of its dimensions is contiguous.
            addend: [rows, out]; may be overwritten.
        """
        x, (columns, inner) = with_rows(x), weight.shape
        y = x.new_empty(len(x), columns) if addend is None else with_rows(addend)
        if bias is not None:
            y = y.copy_(bias.expand_as(y)) if addend is None else y.add_(bias)
        transposed = weight.stride(1) == 1
        pointers = y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), weight.data_ptr()
        self.library.grouped_matmul(
            *pointers,
            0,
            weight.stride(0 if transposed else 1),
            transposed,
            (_SIZE * 2)(0, len(x)),
            len(x),
            1,
            inner,
            columns,
            addend is not None or bias is not None,
            torch.get_num_threads() if y.numel() * inner > WORTH_ALL else 1,
        )
        return y

    def grouped_matmul(self, y: Tensor, x: Tensor, matrices: Tensor, bounds: Tensor, adds: bool) -> None:
        """Multiplies rows sorted by group with their groups' matrices.

        Args:
            y: [rows, q]; overwritten by the products, with zeros for rows of no group, or `adds` them.
            x: [rows, p].
            matrices: [groups, p, q]; of their last two dimensions one is contiguous.
            bounds: where the rows of each group begin, and those of the last end, int64 [groups + 1].
        """
        x, (groups, inner, columns) = with_rows(x), matrices.shape
        transposed = matrices.stride(2) != 1
        apart = matrices.stride(0), matrices.stride(2 if transposed else 1)
        threads = self._threads_for_product(len(x) * inner * columns)
        pointers = y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), matrices.data_ptr()
        self.library.grouped_matmul(
            *pointers,
            *apart,
            transposed,
            bounds.data_ptr(),
            len(x),
            groups,
            inner,
            columns,
            adds,
            threads,
        )

    def add_low_rank(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        """Adds x a b to y [rows, q], for x [rows, p], a [p, rank] and b [rank, q]; the rows of y are contiguous."""
        x, a, b = with_rows(x), with_rows(a), with_rows(b)
        pointers = (part for tensor in (y, x, a, b) for part in (tensor.data_ptr(), tensor.stride(0)))
        self.library.add_low_rank(*pointers, *x.shape, *b.shape)

    def _threads_for_product(self, num_multiplications: int) -> int:
        return (lane_threads() or self._most_threads) if num_multiplications > WORTH_ALL else 1

    def sort_pairs(self, keys: Tensor, first: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts pairs of token and expert by group.

        Args:
            keys: `first` plus the group of each pair, int64 [tokens, experts of each]; others belong to no group.
        Returns:
            the token of each sorted pair, int64 [pairs], those of no group last; the place of each pair among the
            sorted ones, int64 [pairs]; and the pairs of each group, int64 [num_groups].
        """
        keys, num_pairs = keys.contiguous(), keys.numel()
        tokens, places, counts = (keys.new_empty(size) for size in (num_pairs, num_pairs, num_groups))
        pointers = (x.data_ptr() for x in (tokens, places, counts, keys))
        self.library.sort_pairs(*pointers, first, num_pairs, keys.shape[1], num_groups)
        return tokens, places, counts

    def combine_pairs(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sums [tokens, size] of the rows x [pairs, size] of each token's experts.

        Args:
            places: the row of each pair, int64 [tokens * experts of each].
            weights: [tokens, experts of each].
        """
        x, weights, (num_tokens, of_each) = x.contiguous(), weights.contiguous(), weights.shape
        out = x.new_empty(num_tokens, x.shape[1])
        pointers = (tensor.data_ptr() for tensor in (out, x, places, weights))
        self.library.combine_pairs(*pointers, num_tokens, of_each, x.shape[1])
        return out

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
        x, keys, weights = x.contiguous(), keys.contiguous(), weights.expand(keys.shape).contiguous()
        (num_tokens, hidden), (experts, features, _) = x.shape, down.shape
        out, between, terms = torch.empty_like(x), None, None
        if factors is not None:
            width, rank = factors.reduced.shape[1] // 2, factors.gate.shape[1]
            between = x.new_empty(num_tokens, width)
            pointers = (each.data_ptr() for each in (factors.reduced, factors.gate, factors.up, factors.down))
            terms = ctypes.byref(_ExpertTerms(*pointers, width, rank, len(factors.gate) // experts))
        threads = self._threads_for_product(keys.numel() * hidden * 3 * features)
        pointers = (None if each is None else each.data_ptr() for each in (out, between, x, keys, weights))
        matrices = (ctypes.byref(_Matrices.of(each)) for each in (gate_up, down))
        sizes = first, num_tokens, keys.shape[1], experts, hidden, features
        self.library.run_experts(*pointers, *matrices, terms, *sizes, threads)
        return out, between

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
        x, weight, out = with_rows(x), weight.contiguous(), x.new_empty(x.shape)
        where = states.data_ptr(), slots.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()
        self.library.convolve_step(
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            *where,
            *x.shape,
            weight.shape[1],
            is_silu,
            torch.get_num_threads(),
        )
        return out

    def delta_step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        """Returns the gated delta rule's output for one more token of each sequence, [rows, value_heads, value_dim].

        Args:
            inputs: those of DeltaInputs.
            states: contiguous [slots, value_heads, key_dim, value_dim]; updated.
            slots: of each row's sequence, int64 [rows].
        """
        q, k, v = (with_rows(x) for x in inputs[:3])
        g, beta = (x.contiguous() for x in inputs[3:])
        out = v.new_empty(v.shape)
        pointers = (part for x in (q, k, v) for part in (x.data_ptr(), x.stride(0)))
        others = (x.data_ptr() for x in (g, beta, states, slots))
        sizes = len(q), q.shape[1], v.shape[1], q.shape[2], v.shape[2]
        self.library.delta_step(out.data_ptr(), *pointers, *others, *sizes, torch.get_num_threads())
        return out

    def sample(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Samples a token for each row, int64 [n].

        Also returns its log-probability at temperature 1, float32 [n], NaN if any logit is.

        Args:
            logits: [n, vocab].
            temperature: [n]; 0 takes the most likely token.
            uniform: [n]; the sampled token is the first at which the cumulative probability exceeds it.
        """
        rows, vocab = logits.shape
        logits = logits.contiguous()
        tokens, logprobs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
        pointers = (tensor.data_ptr() for tensor in (tokens, logprobs, logits, temperature, uniform))
        self.library.choose(*pointers, rows, vocab, threads_for(logits))
        return tokens, logprobs


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """Returns the kernels, or None if one of the tensors needs torch's own operations."""
    return load_kernels() if all(x.dtype == torch.float32 and x.is_cpu for x in tensors) else None


def load_kernels_for(dtype: torch.dtype, device: torch.device) -> None:
    """Compiles kernels.c, or one of Triton's kernels; the others are compiled when they are first used."""
    if device.type == "cuda":
        load_triton_kernels(device)
    else:
        kernels_for(torch.empty(0, dtype=dtype, device=device))


def triton_kernels_for(x: Tensor) -> "TritonKernels | None":
    """Returns Triton's kernels, or None if x needs torch's own operations."""
    return load_triton_kernels(x.device) if x.is_cuda else None


@cache
def load_kernels() -> Kernels | None:
    """Compiles the kernels, which takes a second or two, unless an earlier process already has."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _log.warning(
            "no C compiler found: sampling and training on the CPU take up to twice as long. Install gcc or clang"
        )
        return None
    try:
        return Kernels(CompiledLibrary(ctypes.CDLL(str(_compiled(compiler)))))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning(
            "%s cannot compile kernels.c: sampling and training on the CPU take up to twice as long: %s", compiler, said
        )
        return None


@cache
def load_triton_kernels(device: torch.device) -> "TritonKernels | None":
    """Compiles one of the kernels for a GPU, and returns all; None, with a warning, if Triton does not work here."""
    x = torch.ones(1, 16, device=device)
    try:
        from .triton_kernels import TritonKernels

        TritonKernels().rms_norm(x, x[0], 0.0)
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "Triton's kernels do not run here, so passes on %s take up to twice as long: %s. Install gcc or clang, and"
            " a CUDA build of torch, which brings Triton",
            device,
            error,
        )
        return None
    return TritonKernels()


def _compiled(compiler: str) -> Path:
    library = _directory() / f"kernels-{_digest(compiler)}.so"
    if not library.exists():
        # Compiled under another name first, because other processes may compile it at the same time.
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            command = [compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
            made.replace(library)
    return library


def _directory() -> Path:
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="trainhouse-"))
    return directory if os.access(directory, os.W_OK) else Path(tempfile.mkdtemp(prefix="trainhouse-"))


def _digest(compiler: str) -> str:
    """Returns a hash of everything that the compiled code depends on.

    A home directory may be shared by machines with different processors.
    """
    processors = Path("/proc/cpuinfo")
    lines = processors.read_text().splitlines() if processors.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    parts = (*(path.read_text() for path in (*_SOURCES, *_HEADERS)), compiler, *_FLAGS, platform.machine(), features)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def threads_for(x: Tensor) -> int:
    """Returns the number of threads that should share an operation on x: at most those of torch on this thread."""
    return torch.get_num_threads() if x.numel() > _WORTH_THREADS else 1


def with_rows(x: Tensor) -> Tensor:
    """Returns x, or a copy if the numbers of a row are not contiguous."""
    rest = x.stride()[1:]
    return x if rest in ((1,), (x.shape[-1], 1)) else x.contiguous()
