"""The model families, one file each (or one for a few that share their layers). Imports no torch."""

from collections.abc import Mapping

from .deepseek import DEEPSEEK_V3, GLM4_MOE_LITE
from .family import FIXED_ROTATIONS, Family
from .gemma3 import GEMMA3
from .gpt_oss import GPT_OSS
from .llama import LLAMA
from .mistral import MISTRAL, MIXTRAL
from .olmo2 import OLMO2
from .phi3 import PHI3
from .qwen import QWEN2, QWEN3, QWEN3_MOE
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

# By model_type.
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "olmo2": OLMO2,
    "gemma3_text": GEMMA3,
}

__all__ = ["FAMILIES", "FIXED_ROTATIONS", "Family"]
