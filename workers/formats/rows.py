"""The formats' rows. Imports no torch."""

from collections.abc import Mapping

from ..shapes.packed_format import PackedFormat
from .awq import AWQ
from .bitsandbytes import BITSANDBYTES
from .compressed_tensors import COMPRESSED_TENSORS
from .fp8 import FP8, MXFP8
from .gptq import AUTO_ROUND, GPTQ
from .modelopt import MODELOPT
from .mxfp4 import MXFP4
from .quark import QUARK
from .torchao import TORCHAO

METHODS: Mapping[str, PackedFormat] = {
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "compressed-tensors": COMPRESSED_TENSORS,
    "modelopt": MODELOPT,
    "gptq": GPTQ,
    "awq": AWQ,
    "auto-round": AUTO_ROUND,
    "intel/auto-round": AUTO_ROUND,
    "bitsandbytes": BITSANDBYTES,
    "quark": QUARK,
    "torchao": TORCHAO,
}
"""Formats by `quant_method` in a config.json."""
