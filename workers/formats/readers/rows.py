"""The rows of what reads packed weights."""

from ..bitsandbytes import TableWeight
from ..packed_weight import PackedWeight
from .scaled_tensor import ScaledTensor
from .table_tensor import TableTensor

READERS = {PackedWeight: ScaledTensor, TableWeight: TableTensor}
"""Readers by the type of the packed weight."""
