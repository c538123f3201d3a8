"""AMD's Quark: FP8, MXFP4 and INT8."""

from ..shapes.packed_format import PackedFormat
from .plain_codes import find_plain_codes

QUARK = PackedFormat(find_plain_codes)
