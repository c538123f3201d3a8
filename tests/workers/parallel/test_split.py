"""A dimension with sections is split over ranks, joined again, and read in slices from files."""

import pytest
import torch
from trainhouse.workers.parallel.split import Split

SECTIONS = (8, 4, 4)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_join_to_the_whole(size: int) -> None:
    whole = torch.arange(16 * 3).view(16, 3)
    splits = [Split("tp", size, index, SECTIONS) for index in range(size)]
    parts = [split.part(whole, 0) for split in splits]
    assert [len(part) for part in parts] == [split.own_size for split in splits]
    assert torch.equal(splits[0].whole(parts, 0), whole)
    assert size == 1 or not torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2])
def test_slices_select_the_parts_of_the_file(size: int, num_parts: int) -> None:
    whole = torch.arange(16)
    for index in range(size):
        split = Split("tp", size, index, SECTIONS)
        for number, wanted in enumerate(split.part(whole, 0).chunk(num_parts)):
            slices = split.slices(number, num_parts)
            assert torch.equal(torch.cat([whole[each] for each in slices]), wanted)
            assert all(each.start < each.stop for each in slices)
