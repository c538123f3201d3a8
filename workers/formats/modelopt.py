"""NVIDIA's ModelOpt: NVFP4, FP8 and MXFP8."""

from collections.abc import Iterator
from typing import Any

from ..shapes.packed_format import PackedFormat, ReleasedFormat
from .plain_codes import find_plain_codes


def _kept(given: Any) -> Iterator[ReleasedFormat]:
    algorithm = str(given.get("quant_algo"))
    if algorithm in ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"):
        yield ReleasedFormat("float4", "float8", (1, 16))
    if algorithm in ("FP8", "MIXED_PRECISION"):
        yield ReleasedFormat("float8", "float32", (1, None))
    if algorithm == "MXFP8":
        yield ReleasedFormat("float8", "power of two", (1, 32))


MODELOPT = PackedFormat(find_plain_codes, kept=_kept)
