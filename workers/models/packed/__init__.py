"""Reads parts of packed weights from files, dequantized."""

from .fused_projections import split_projections
from .scaled_tensor import ScaledTensor
from .stored_tensor import StoredTensor
from .table_tensor import TableTensor

__all__ = ["ScaledTensor", "StoredTensor", "TableTensor", "split_projections"]
