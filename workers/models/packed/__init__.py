"""Reads parts of packed weights from files, dequantized."""

from .expert_stack import unstacked
from .fused_projections import split_projections
from .grouped_tensor import GroupedTensor
from .scaled_tensor import ScaledTensor
from .sparse_tensor import SparseTensor
from .stored_tensor import StoredTensor
from .table_tensor import TableTensor

__all__ = [
    "GroupedTensor",
    "ScaledTensor",
    "SparseTensor",
    "StoredTensor",
    "TableTensor",
    "split_projections",
    "unstacked",
]
