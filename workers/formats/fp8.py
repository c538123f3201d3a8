"""FP8 with a scale for each block, row or matrix (DeepSeek, Qwen), and MXFP8, with a power of two for each 32."""

from collections.abc import Iterator
from typing import Any

from ..shapes.packed_format import PackedFormat, ReleasedFormat
from .plain_codes import find_plain_codes


def _kept(given: Any) -> Iterator[ReleasedFormat]:
    block = given.get("weight_block_size")
    yield ReleasedFormat("float8", "float32", (int(block[0]), int(block[1])) if block else (1, None))


FP8 = PackedFormat(find_plain_codes, kept=_kept)
MXFP8 = PackedFormat(find_plain_codes, kept=lambda given: [ReleasedFormat("float8", "power of two", (1, 32))])
