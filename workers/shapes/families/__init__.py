"""The model families, one file each (or one for a few that share their layers). Imports no torch."""

from collections.abc import Mapping

from .family import FIXED_ROTATIONS, Family
from .gemma3 import GEMMA3
from .llama import LLAMA
from .mistral import MISTRAL, MIXTRAL
from .olmo2 import OLMO2
from .phi3 import PHI3
from .qwen import QWEN2, QWEN3, QWEN3_MOE

# By model_type.
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "olmo2": OLMO2,
    "gemma3_text": GEMMA3,
}

__all__ = ["FAMILIES", "FIXED_ROTATIONS", "Family"]
