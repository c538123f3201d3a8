"""Reads parts of packed weights from files, dequantized."""

from .expert_stack import unstacked
from .scaled_tensor import ScaledTensor
from .sparse_tensor import SparseTensor
from .stored_tensor import StoredTensor
from .table_tensor import TableTensor

__all__ = ["ScaledTensor", "SparseTensor", "StoredTensor", "TableTensor", "unstacked"]
