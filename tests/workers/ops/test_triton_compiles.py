"""Compiles each of Triton's kernels for a GPU, without one: the interpreter accepts what the compiler refuses."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="only CUDA builds of torch bring Triton")

from trainhouse.workers.ops import triton_kernels  # noqa: E402
from trainhouse.workers.ops.attention_kind import AttentionKind, Sinks  # noqa: E402
from trainhouse.workers.ops.fused import GatedActivation, RmsNorm, Rotation, swiglu  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
KERNELS = triton_kernels.TritonKernels()
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}


def wide(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


ROTATION = Rotation(torch.zeros(4, 1, 64), torch.zeros(4, 1, 32))
NORM, HEAD_NORM = (RmsNorm(wide(size), torch.tensor(1e-6)) for size in (96, 64))
GELU, CLAMPED = GatedActivation("gelu"), GatedActivation("clamped", 1.7, 7.0)
CALLS = {
    "norm": lambda: KERNELS.add_rms_norm(wide(4, 96), None, NORM),
    "norm of a sum": lambda: KERNELS.add_rms_norm(wide(4, 96), wide(4, 96), NORM),
    "gradient of a norm": lambda: KERNELS.rms_norm_gradient(wide(4, 96), wide(4, 96), NORM, None),
    "rotation": lambda: KERNELS.rotate_heads(wide(4, 3, 64), ROTATION, HEAD_NORM),
    "gradient of a rotation": lambda: KERNELS.rotate_heads_gradient(
        wide(4, 3, 64), wide(4, 3, 64), ROTATION, HEAD_NORM
    ),
    "swiglu": lambda: KERNELS.gated(wide(4, 96), wide(4, 96), swiglu),
    "gradient of swiglu": lambda: KERNELS.gated_gradient(wide(4, 96), wide(4, 96), wide(4, 96), swiglu),
    "geglu": lambda: KERNELS.gated(wide(4, 96), wide(4, 96), GELU),
    "gradient of geglu": lambda: KERNELS.gated_gradient(wide(4, 96), wide(4, 96), wide(4, 96), GELU),
    "clamped swiglu": lambda: KERNELS.gated(wide(4, 96), wide(4, 96), CLAMPED),
    "gradient of clamped swiglu": lambda: KERNELS.gated_gradient(wide(4, 96), wide(4, 96), wide(4, 96), CLAMPED),
    "attention": lambda: attend(100),
    "attention in parts": lambda: attend(4000),
    "attention with sinks and a cap": lambda: attend(100, sinks=Sinks(torch.zeros(4), None), cap=30.0, window=8),
}


def attend(span: int, **options: Any) -> torch.Tensor:
    cache = wide(2, 2, 4096, 64)
    numbers = torch.zeros(2, dtype=torch.int64)
    kind = AttentionKind(0, 0.125, **options)
    new = wide(2, 2, 64)
    return KERNELS.decode_attention(wide(2, 4, 64), new, new, cache, cache, numbers, numbers, span, kind)


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_for_hopper(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        by_name = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        constants = {param.name: by_name[param.name] for param in kernel.params if param.is_constexpr}
        signature = {name: "constexpr" if name in constants else type_of(by_name[name]) for name in kernel.arg_names}
        compiled.append(triton.compile(ASTSource(kernel, signature, constants), target=HOPPER))

    monkeypatch.setattr(triton_kernels, "launch", compile_for_hopper)
    CALLS[name]()
    assert compiled and all("ptx" in each.asm for each in compiled)


def type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"*{TYPES[argument.dtype]}"
    return "fp32" if isinstance(argument, float) else "i32"
