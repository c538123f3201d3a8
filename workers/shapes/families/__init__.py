"""The model families, one file each (or one for a few that share their layers). Imports no torch."""

from collections.abc import Mapping

from .afmoe import AFMOE
from .arcee import ARCEE
from .bamba import BAMBA
from .cohere import COHERE, COHERE2
from .deepseek import DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA, MISTRAL4, SARVAM_MLA
from .defaults import TYPES
from .dots1 import DOTS1
from .ernie import ERNIE4_5, ERNIE4_5_MOE
from .exaone import EXAONE4, EXAONE_MOE
from .falcon_h1 import FALCON_H1
from .family import FIXED_ROTATIONS, Family
from .gemma import GEMMA, GEMMA2, GEMMA3
from .gemma4 import GEMMA4
from .glm import GLM, GLM4, GLM4_MOE, SARVAM_MOE
from .gpt_oss import GPT_OSS
from .granite import GRANITE, GRANITE4, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_SWA, GRANITE_SWA, HYPERCLOVAX
from .helium import HELIUM
from .hunyuan import HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE
from .hy_v3 import HY_V3
from .kolibri1 import KOLIBRI1
from .laguna import LAGUNA
from .llama import CWM, EXAONE, INTERNLM3, IQUESTCODER, LLAMA
from .llama4 import LLAMA4
from .mellum import MELLUM
from .minimax import MINIMAX_M2
from .mistral import MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL
from .nemotron import JAIS2, NEMOTRON
from .nemotron_h import NEMOTRON_H
from .olmo import FLEX_OLMO, OLMO2, OLMO3, OLMOE
from .phi3 import PHI3
from .phimoe import PHIMOE
from .qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .solar_open import SOLAR_OPEN
from .stablelm import STABLELM
from .starcoder2 import STARCODER2

DECLARED: Mapping[str, Family] = {
    "llama": LLAMA,
    "llama4_text": LLAMA4,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "mixtral": MIXTRAL,
    "phi3": PHI3,
    "phimoe": PHIMOE,
    "starcoder2": STARCODER2,
    "nemotron": NEMOTRON,
    "stablelm": STABLELM,
    "jais2": JAIS2,
    "internlm3": INTERNLM3,
    "iquestcoder": IQUESTCODER,
    "cwm": CWM,
    "hyperclovax": HYPERCLOVAX,
    "flex_olmo": FLEX_OLMO,
    "mellum": MELLUM,
    "kolibri1": KOLIBRI1,
    "hy_v3": HY_V3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "sarvam_mla": SARVAM_MLA,
    "mistral4": MISTRAL4,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": GLM_MOE_DSA,
    "granite": GRANITE,
    "granite_swa": GRANITE_SWA,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE_SHARED,
    "granitemoe_swa": GRANITE_MOE_SWA,
    "granitemoehybrid": GRANITE4,
    "falcon_h1": FALCON_H1,
    "bamba": BAMBA,
    "nemotron_h": NEMOTRON_H,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
    "exaone": EXAONE,
    "exaone4": EXAONE4,
    "exaone_moe": EXAONE_MOE,
    "dots1": DOTS1,
    "solar_open": SOLAR_OPEN,
    "minimax_m2": MINIMAX_M2,
    "glm": GLM,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "sarvam_moe": SARVAM_MOE,
    "ernie4_5": ERNIE4_5,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "helium": HELIUM,
    "afmoe": AFMOE,
    "laguna": LAGUNA,
    "hunyuan_v1_dense": HUNYUAN_V1_DENSE,
    "hunyuan_v1_moe": HUNYUAN_V1_MOE,
    "arcee": ARCEE,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
}
# A new family has no defaults until `make families` has imported this.
FAMILIES: Mapping[str, Family] = {name: family.with_defaults(TYPES.get(name, {})) for name, family in DECLARED.items()}
"""The families by model_type."""

__all__ = ["FAMILIES", "FIXED_ROTATIONS", "Family"]
