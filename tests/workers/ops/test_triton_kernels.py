"""Triton's kernels and their gradients against formulas in float64, on a GPU or in Triton's interpreter."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

pytest.importorskip("triton", reason="only CUDA builds of torch bring Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU: TRITON_INTERPRET=1 runs the kernels on the CPU", allow_module_level=True)

from trainhouse.workers.ops.attention_kind import AttentionKind, Sinks  # noqa: E402
from trainhouse.workers.ops.fused import GatedActivation, RmsNorm, Rotation  # noqa: E402
from trainhouse.workers.ops.triton_kernels import TritonKernels  # noqa: E402

pytestmark = pytest.mark.gpu

KERNELS = TritonKernels()
EPS = 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(DEVICE, dtype)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Asserts that they are close, and that three times the tolerance would fail."""
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            found * (1 + 3 * tolerance) + 3 * tolerance, wanted.to(found.dtype), rtol=tolerance, atol=tolerance
        )


def differentiate(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Returns the output in float64, and the gradients of the inputs."""
    wide = [x.double().requires_grad_() for x in inputs]
    out = function(*wide)
    return out.detach(), *torch.autograd.grad(out, wide, grad.double())


def naive_clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=1.5)
    return (up.clamp(-1.5, 1.5) + 1) * gate * torch.sigmoid(1.702 * gate)


GATES: dict[GatedActivation, Callable[..., Tensor]] = {
    GatedActivation("silu"): lambda gate, up: silu(gate) * up,
    GatedActivation("gelu"): lambda gate, up: gelu(gate, approximate="tanh") * up,
    GatedActivation("clamped", 1.702, 1.5): naive_clamped,
}


def naive_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 20), (5, 256), (40, 1025)])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    x, update, weight = (random(*shape, dtype=dtype, seed=n) for n, shape in enumerate([(rows, size)] * 2 + [(size,)]))
    grad, addend = random(rows, size, dtype=dtype, seed=4), random(rows, size, dtype=dtype, seed=5)
    norm = RmsNorm(weight, torch.tensor(EPS))
    out, of_x = differentiate(lambda x: naive_norm(x, weight), grad, x)
    assert_near(KERNELS.add_rms_norm(x, None, norm)[1], out)
    assert_near(KERNELS.rms_norm_gradient(grad, x, norm, None), of_x)
    assert_near(KERNELS.rms_norm_gradient(grad, x, norm, addend), of_x + addend.double())
    total, normed, _ = KERNELS.add_rms_norm(x, update, norm)
    assert_near(total, x.double() + update.double())
    # The interpreter does not round to the nearest bfloat16, as a GPU does.
    assert DEVICE == "cpu" or torch.equal(total, x + update)
    assert_near(normed, naive_norm(total.double(), weight))


@DTYPES
@pytest.mark.parametrize(("heads", "size"), [(1, 4), (3, 20), (16, 128), (9, 80)])
@pytest.mark.parametrize("norm", [None, "shared", "of each head"])
def test_rotation_of_part_of_a_wider_row(dtype: torch.dtype, heads: int, size: int, norm: str | None) -> None:
    x = random(7, heads + 2, size, dtype=dtype)[:, :heads]
    grad = random(7, heads + 1, size, dtype=dtype, seed=1)[:, :heads]
    angles = random(7, 1, size // 2, dtype=torch.float32, seed=2)
    cos, sin = torch.cat((angles, angles), -1).cos(), angles.sin()
    shape = () if norm == "shared" else (heads,)
    weight = None if norm is None else random(*shape, size, dtype=dtype, seed=3)

    def rotate(x: Tensor) -> Tensor:
        first, second = (x if weight is None else naive_norm(x, weight)).chunk(2, -1)
        wide_cos, wide_sin = angles.double().cos(), angles.double().sin()
        return torch.cat((first * wide_cos - second * wide_sin, second * wide_cos + first * wide_sin), -1)

    out, of_x = differentiate(rotate, grad, x)
    rotation, norms = Rotation(cos, sin), None if weight is None else RmsNorm(weight, torch.tensor(EPS))
    assert_near(KERNELS.rotate_heads(x, rotation, norms)[0], out)
    kept = None if weight is None else x
    assert_near(KERNELS.rotate_heads_gradient(grad, kept, rotation, norms), of_x)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 1024), (3, 1500)])
@pytest.mark.parametrize("kind", GATES, ids=lambda kind: kind.name)
def test_gates_of_a_wider_row(dtype: torch.dtype, rows: int, size: int, kind: GatedActivation) -> None:
    both = random(rows, 2 * size, dtype=dtype).mul_(2)
    gate, up = both.chunk(2, -1)
    grad = random(rows, size, dtype=dtype, seed=1)
    out, of_gate, of_up = differentiate(GATES[kind], grad, gate, up)
    assert_near(KERNELS.gated(gate, up, kind)[0], out)
    KERNELS.gated_gradient(grad, gate, up, kind)
    assert_near(both, torch.cat((of_gate, of_up), -1))


# The interpreter multiplies the bits of bfloat16 matrices as integers.
@pytest.mark.parametrize("dtype", list(TOLERANCES) if DEVICE == "cuda" else [torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 1, 100, 600])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "lengths"),
    [
        (4, 2, 16, [0, 1, 63, 64, 65]),
        (3, 3, 20, [300, 5]),
        (16, 2, 128, [1100]),
        (2, 1, 64, [900, 0, 511]),
        (1, 1, 8, [20]),
        (2, 1, 256, [70]),
    ],
)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 0.8])
def test_decode_attention(
    dtype: torch.dtype,
    window: int | None,
    heads: int,
    kv_heads: int,
    size: int,
    lengths: list[int],
    has_sinks: bool,
    cap: float | None,
) -> None:
    """The cache has other slots, and numbers behind the sequences that must not be read."""
    rows, capacity = len(lengths), max(lengths) + 5
    slots = torch.tensor([2 * row + 1 for row in reversed(range(rows))], device=DEVICE)
    keys, values = (random(2 * rows + 1, kv_heads, capacity, size, dtype=dtype, seed=n) for n in (1, 2))
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        keys[slot, :, length:] = values[slot, :, length:] = torch.inf
    packed = random(rows, heads + 2 * kv_heads, size, dtype=dtype, seed=3)
    query, key, value = packed.split([heads, kv_heads, kv_heads], 1)
    before = keys.clone(), values.clone()
    sinks = random(heads, dtype=dtype, seed=4).mul_(5) if has_sinks else None
    kind = AttentionKind(0, 0.3, window, None if sinks is None else Sinks(sinks), cap=cap)
    found = KERNELS.decode_attention(
        query, key, value, keys, values, slots, torch.tensor(lengths, device=DEVICE), max(lengths) + 1, kind
    )
    for cached, old, new in zip((keys, values), before, (key, value), strict=True):
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            old[slot, :, length] = new[row]
        assert torch.equal(cached, old)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
        seen = slice(max(0, length + 1 - window) if window else 0, length + 1)
        k, v = (cached[slot, :, seen].double() for cached in (keys, values))
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        scores = (k @ query[row, :, :, None].double()).squeeze(-1) * 0.3
        scores = scores if cap is None else cap * (scores / cap).tanh()
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].double()], -1)
        weights = scores.softmax(-1)[:, : k.shape[1]]
        assert_near(found[row], (weights[:, None] @ v).squeeze(1))
