"""Products of rows with the matrices of their adapters, in every way, against a loop over the adapters."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from trainhouse.workers.lora.segmented_matmul import (
    EqualLengths,
    PaddedLengths,
    RaggedLengths,
    SegmentedMatmul,
    SingleAdapter,
    choose_matmul,
    stack,
)

from ..adapted import relative_error

CPU = torch.device("cpu")
TOLERANCE = 1e-6
RANKS = (8, 2, 13)
SCALES = (0.5, 4.0, 1.0)

# Each way, and the numbers of rows per adapter that it is for.
WAYS: dict[str, tuple[Callable[..., SegmentedMatmul], Sequence[int]]] = {
    "one": (lambda lengths, scales, device: SingleAdapter(scales[0]), [11]),
    "even": (EqualLengths, [5, 5, 5]),
    "padded": (PaddedLengths, [3, 7, 1]),
    "ragged": (RaggedLengths, [3, 7, 1]),
}


def arranged(way: str) -> tuple[SegmentedMatmul, list[slice]]:
    """Returns the rows, and each adapter's slice of them."""
    make, lengths = WAYS[way]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    rows = make(lengths, SCALES[: len(lengths)], CPU)
    return rows, [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def matrices(places: list[slice], columns: int) -> list[Tensor]:
    return [random(rank, columns) for rank, _ in zip(RANKS, places, strict=False)]


@pytest.mark.parametrize("way", WAYS)
def test_rows_times_their_own_matrices(way: str) -> None:
    rows, places = arranged(way)
    own = matrices(places, 12)
    stacked = stack(own)
    x = random(places[-1].stop, 12)

    down = rows.times(x, stacked.mT)
    for matrix, place in zip(own, places, strict=True):
        assert relative_error(down[place, : len(matrix)], x[place] @ matrix.t()) < TOLERANCE
        assert not down[place, len(matrix) :].any()

    wanted = torch.cat([down[p, : len(m)] @ m for m, p in zip(own, places, strict=True)])
    assert relative_error(rows.times(down, stacked), wanted) < TOLERANCE
    wide, narrow = torch.full((len(x), 20), torch.nan), torch.full((len(x), 12), torch.nan)
    assert rows.times(down, stacked, out=wide[:, 4:16]).data_ptr() == wide[:, 4:].data_ptr()
    assert relative_error(wide[:, 4:16], wanted) < TOLERANCE
    assert wide[:, :4].isnan().all() and wide[:, 16:].isnan().all()
    assert relative_error(rows.times(down, stacked, out=narrow), wanted) < TOLERANCE
    assert relative_error(rows.times(down, stacked * (1 + 1e-5)), wanted) > TOLERANCE


def sums(rows: SegmentedMatmul, places: list[slice], left: Tensor, right: Tensor) -> list[Tensor]:
    totals = [torch.ones(rank, right.shape[1]) for rank, _ in zip(RANKS, places, strict=False)]
    rows.add_outer(totals, left, right)
    return [total - 1 for total in totals]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_outer_products_are_summed_per_adapter_in_float32(way: str, dtype: torch.dtype) -> None:
    rows, places = arranged(way)
    # Column slices, as the parts of a merged layer are.
    width = 8 if way == "one" else 16
    left = random(places[-1].stop, 24).to(dtype)[:, 8 : 8 + width]
    right = random(places[-1].stop, 20).to(dtype)[:, :12]
    found = sums(rows, places, left, right)
    assert len(found) == len(places)
    for total, rank, place in zip(found, RANKS, places, strict=False):
        wanted = left[place, :rank].float().t() @ right[place].float()
        assert relative_error(total, wanted) < TOLERANCE
        assert relative_error(wanted.bfloat16().float(), wanted) > TOLERANCE


@pytest.mark.parametrize("way", WAYS)
def test_each_row_has_its_adapters_scale(way: str) -> None:
    rows, places = arranged(way)
    x = random(places[-1].stop, 4)
    before = x.clone()
    x.mul_(rows.scale)
    for place, scale in zip(places, SCALES, strict=False):
        assert torch.equal(x[place], scale * before[place])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "one"])
def test_nonfinite_values_stay_with_their_adapter(way: str, bad: float) -> None:
    rows, places = arranged(way)
    own = matrices(places, 12)
    x, left = random(places[-1].stop, 12), random(places[-1].stop, 16)
    products, gradients = rows.times(x, stack(own).mT), sums(rows, places, left, x)

    sick = places[1]
    x[sick], left[sick], own[1][:] = bad, bad, bad
    spoiled, spoiled_gradients = rows.times(x, stack(own).mT), sums(rows, places, left, x)
    well = [i for i in range(len(places)) if i != 1]
    assert all(torch.equal(spoiled[places[i]], products[places[i]]) for i in well)
    assert all(torch.equal(spoiled_gradients[i], gradients[i]) for i in well)
    assert not spoiled[sick, : RANKS[1]].isfinite().any()
    assert not spoiled_gradients[1].isfinite().any()


def test_bfloat16_is_within_its_rounding_in_every_way() -> None:
    for way in WAYS:
        rows, places = arranged(way)
        own = matrices(places, 16)
        x = random(places[-1].stop, 16)
        exact = rows.times(x, stack(own).mT)
        rounded = rows.times(x.bfloat16(), stack([matrix.bfloat16() for matrix in own]).mT)
        assert rounded.dtype == torch.bfloat16
        assert 1e-4 < relative_error(rounded.float(), exact) < 1e-2, way


def test_the_way_follows_from_the_lengths() -> None:
    def way(lengths: list[int], aligned: bool = True, device: str = "cpu") -> type:
        # The meta device represents any device but the CPU.
        return type(choose_matmul(lengths, [1.0] * len(lengths), torch.device(device), aligned))

    assert way([1000]) is SingleAdapter
    assert way([64] * 16) is EqualLengths
    assert way([1] * 5) is EqualLengths
    assert way([3, 5, 4]) is PaddedLengths
    assert way([60, 70, 64]) is RaggedLengths
    assert way([60, 70, 64], aligned=False) is PaddedLengths
    assert way([64] * 16, device="meta") is EqualLengths
    assert way([3, 5, 4], device="meta") is RaggedLengths


def test_grouped_product_restores_the_number_of_threads() -> None:
    rows, places = arranged("ragged")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows.times(random(places[-1].stop, 12), stack(matrices(places, 12)).mT)
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError):
            rows.times(random(places[-1].stop, 16), stack(matrices(places, 12)).mT)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
