"""Finds the weights of which files hold the numbers that are not zero, and bits that say where these are, as releases
of compressed-tensors do (`sparse-24-bitmask`, `sparse-bitmask`). Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from .packed_weights import TensorHeader, packed_weights, unfitting, unpacked_names
from .quantization import Quantization


@dataclass(frozen=True)
class SparseWeight:
    """A matrix of which files hold some numbers. Names are those of tensors in files.

    numbers: two of each four in a row, [rows, columns / 2], or all of all rows. mask: bits, the lowest first, of each
    row. rows: the place of each row's first number; None if each four have two. true_shape: a tensor that holds the
    rows and columns. shape: without it; the columns may be up to 7 too many.
    """

    numbers: str
    mask: str
    true_shape: str
    rows: str | None
    shape: tuple[int, int]

    @property
    def names(self) -> set[str]:
        """The tensors in files that make up this weight."""
        return {name for name in (self.numbers, self.mask, self.true_shape, self.rows) if name is not None}


def sparse_weights(tensors: Mapping[str, TensorHeader]) -> dict[str, SparseWeight]:
    """Returns the sparse weights among the tensors of files, by the names that they have in other models.

    Raises:
        ValueError: tensors do not fit together.
    """
    found = dict[str, SparseWeight]()
    for mask in (name for name in tensors if name.endswith(".bitmask")):
        path = mask.removesuffix(".bitmask")
        numbers, true_shape, rows = f"{path}.compressed", f"{path}.shape", f"{path}.row_offsets"
        if missing := [name for name in (numbers, true_shape) if name not in tensors]:
            raise ValueError(f"{mask} has no {missing[0]}: download the model again")
        found[path if path.endswith(".weight") else f"{path}.weight"] = _checked(
            numbers, mask, true_shape, rows if rows in tensors else None, tensors
        )
    return found


def dense_headers(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Returns the headers of the tensors with sparse weights as if files held all their numbers."""
    sparse = sparse_weights(tensors)
    used = {name for each in sparse.values() for name in each.names}
    dense = {name: TensorHeader(tensors[each.numbers].dtype, each.shape) for name, each in sparse.items()}
    return {name: header for name, header in tensors.items() if name not in used} | dense


def num_elements(tensors: Mapping[str, TensorHeader], quantization: Quantization) -> int:
    """Returns how many numbers the weights in these files have when none is packed."""
    tensors = dense_headers(tensors)
    packed = packed_weights(tensors, quantization)
    plain = sum(prod(tensors[name].shape) for name in unpacked_names(tensors, packed))
    return plain + sum(each.num_numbers for each in packed.values())


def _checked(
    numbers: str, mask: str, true_shape: str, rows: str | None, tensors: Mapping[str, TensorHeader]
) -> SparseWeight:
    of_numbers, of_mask = tensors[numbers].shape, tensors[mask].shape
    expected = 1 if rows is not None else 2
    if (len(of_mask), len(of_numbers), tensors[mask].dtype) != (2, expected, "U8") or not of_mask[0]:
        raise unfitting((numbers, mask), tensors)
    if rows is not None:
        if tensors[rows].shape != of_mask[:1]:
            raise unfitting((mask, rows), tensors)
        return SparseWeight(numbers, mask, true_shape, rows, (of_mask[0], 8 * of_mask[1]))
    columns = 2 * of_numbers[1]
    if columns % 4 or of_mask != (of_numbers[0], -(-columns // 8)):
        raise unfitting((numbers, mask), tensors)
    return SparseWeight(numbers, mask, true_shape, None, (of_mask[0], columns))
