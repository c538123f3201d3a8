"""Chooses the reader of a packed weight by its type, for workers/models."""

from ..bitsandbytes import TableWeight
from ..packed_weight import PackedWeight
from .scaled_tensor import ScaledTensor
from .table_tensor import TableTensor

READERS = {PackedWeight: ScaledTensor, TableWeight: TableTensor}
"""Readers by the type of the packed weight."""
