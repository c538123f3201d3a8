"""Weights are packed as their release held them, and give the same bits back."""

import pytest
import torch
from torch import Tensor
from trainhouse.workers.ops.frozen.packing import pack
from trainhouse.workers.shapes.packed_format import ReleasedFormat
from trainhouse.workers.shapes.packed_weights import ReleasedWeights

from .releases import RELEASES

KEPT_METHODS = ("fp8", "mxfp8", "modelopt", "compressed-tensors")
NOT_KEPT = ("INT8 with zero points", "INT8 in bytes", "INT4 in the order of activations", "MXFP6")
KEPT = [
    name
    for name, release in RELEASES.items()
    if release.config.get("quant_method") in KEPT_METHODS and name not in NOT_KEPT
]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def formats(release: str) -> tuple[ReleasedFormat, ...]:
    return ReleasedWeights.of({"quantization_config": RELEASES[release].config}).formats


def numbers_of(release: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return RELEASES[release].pack("a.b_proj.weight", shape)[1].to(dtype)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """True if all bits and the memory layouts are equal; signs of zeros count."""
    bits = BITS[ours.dtype]
    return ours.stride() == theirs.stride() and torch.equal(ours.view(bits), theirs.view(bits))


@pytest.mark.parametrize("release", RELEASES)
def test_only_releases_in_these_formats_stay_packed(release: str) -> None:
    assert bool(formats(release)) == (release in KEPT)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("release", KEPT)
def test_every_bit_comes_back_from_about_the_bytes_of_the_release(release: str, dtype: torch.dtype) -> None:
    (format,) = formats(release)
    for shape in [(192, 320), (256, 128)]:
        weight = numbers_of(release, shape, dtype)
        packed = pack(weight, [format])
        assert packed is not None and packed.shape == weight.shape and same(packed.dequantize(), weight)
        assert packed.nbytes == format.bytes_of(shape) and packed.nbytes < 0.75 * 2 * weight.numel()


@pytest.mark.parametrize("release", KEPT)
def test_a_transposed_weight_keeps_its_memory_layout(release: str) -> None:
    weight = numbers_of(release, (192, 320)).t().contiguous().t()
    packed = pack(weight, formats(release))
    assert packed is not None and same(packed.dequantize(), weight)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("release", KEPT)
def test_experts_of_several_matrices_are_packed(release: str, is_transposed: bool) -> None:
    """Experts' gates and ups, each with scales of its own, are one matrix; some families have it transposed."""
    halves = [[numbers_of(release, (96, 128), seed=2 * expert + half) for half in (0, 1)] for expert in range(3)]
    weight = torch.stack([torch.cat(each) for each in halves])
    weight = weight.mT.contiguous() if is_transposed else weight
    packed = pack(weight, formats(release))
    assert packed is not None and same(packed.dequantize(), weight)


@pytest.mark.parametrize("release", KEPT)
def test_parts_that_begin_within_blocks_are_packed_in_smaller_ones(release: str) -> None:
    whole = numbers_of(release, (320, 352))
    for weight in (whole[160:].contiguous(), whole[:, 176:].contiguous()):
        packed = pack(weight, formats(release))
        assert packed is not None and same(packed.dequantize(), weight)


@pytest.mark.parametrize("release", KEPT)
def test_other_numbers_are_not_packed(release: str) -> None:
    torch.manual_seed(0)
    for dtype in BITS:
        assert pack(torch.randn(64, 128).to(dtype), formats(release)) is None
        weight = numbers_of(release, (64, 128), dtype)
        weight[33, 70 + int(weight[33, 70:].nonzero()[0])] *= 1.03
        assert pack(weight, formats(release)) is None


@pytest.mark.parametrize("release", KEPT)
def test_a_changed_code_or_scale_changes_the_numbers(release: str) -> None:
    weight = numbers_of(release, (64, 128))
    packed = pack(weight, formats(release))
    assert packed is not None
    for tensor in packed.tensors:
        first = tensor.flatten().view(torch.uint8)[:8]
        kept = first.clone()
        first ^= 1
        assert not same(packed.dequantize(), weight)
        first.copy_(kept)
    assert same(packed.dequantize(), weight)


def test_blocks_of_zeros_and_of_one_size_are_packed() -> None:
    weight = numbers_of("NVFP4 of ModelOpt", (64, 128))
    weight[3] = 0.0
    weight[4, 16:32] = -0.0
    weight[5, :16] = weight[5, :16].abs().amax().copysign(weight[5, :16])
    packed = pack(weight, formats("NVFP4 of ModelOpt"))
    assert packed is not None and same(packed.dequantize(), weight)


def test_the_smallest_scales_of_nvfp4_are_packed() -> None:
    """Blocks whose scale is the smallest number of float8, and whose largest code is not the largest of all."""
    codes = torch.tensor([0.5, 1, 1.5, 2, 3, -0.5, -1, -3] * 2)
    rows = [torch.cat((6 * torch.ones(16) * 448, codes[: 2 * size].repeat(8 // size) * 2**-9)) for size in (1, 2, 4, 8)]
    for dtype in BITS:
        weight = (torch.stack(rows) * torch.tensor(1.7e-4)).to(dtype)
        packed = pack(weight, formats("NVFP4 of ModelOpt"))
        assert packed is not None and same(packed.dequantize(), weight)
