"""Inverses of batches of small triangular matrices by matrix products, which use all cores; torch solves one by one."""

import torch
from torch import Tensor

_BLOCK = 8


def inverse_of_unit_lower(x: Tensor) -> Tensor:
    """Returns the inverse of 1 plus the part of x [..., size, size] that is below the diagonal.

    Blocks on the diagonal are inverted by forward substitution. Then pairs of them are joined: the inverse of
    [[a, 0], [b, c]] is [[1/a, 0], [-1/c b 1/a, 1/c]], which is as exact as forward substitution.

    Args:
        x: size is 8 times a power of two.
    """
    size, flat = x.shape[-1], x.flatten(0, -3)
    out = torch.zeros_like(flat)
    _diagonal_blocks(out, _BLOCK).copy_(_small_inverses(_diagonal_blocks(flat, _BLOCK)))
    block = _BLOCK
    while block < size:
        pairs, between = _diagonal_blocks(out, 2 * block), _diagonal_blocks(flat, 2 * block)[..., block:, :block]
        first, second = pairs[..., :block, :block], pairs[..., block:, block:]
        pairs[..., block:, :block] = (second @ between @ first).neg_()
        block *= 2
    return out.view(x.shape)


def _small_inverses(x: Tensor) -> Tensor:
    out = x.tril(-1).neg_()
    for row in range(2, x.shape[-1]):
        out[..., row : row + 1, :row] += out[..., row : row + 1, :row] @ out[..., :row, :row]
    out.diagonal(dim1=-2, dim2=-1).fill_(1)
    return out


def _diagonal_blocks(x: Tensor, block: int) -> Tensor:
    """Returns a view [n, size / block, block, block] of x [n, size, size], which is contiguous."""
    n, size, _ = x.shape
    return x.as_strided((n, size // block, block, block), (size * size, block * (size + 1), size, 1))
