"""The forms in which vLLM 0.32 reads adapters and full models, by the architecture that the base model's config.json
names.

tests/workers/engines/test_vllm_adapters.py loads adapters of these models into vLLM, but of Kimi: its form follows from
what its class in vLLM declares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Experts = Literal["pairs", "joined", "mixed"]

# The values of --max-lora-rank that vLLM accepts.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class VllmForm:
    """The form of an adapter, and whether full models are read.

    refusal: what vLLM lacks for adapters of such models, None if it takes them.
    adapts_head: whether it may adapt the output head.
    experts: "pairs" of matrices for each linear layer of each expert, "joined" as peft has them for experts that are in
    one tensor in files, or "mixed", the same where vLLM reads it with --enable-mixed-moe-lora-format alone.
    ignored: parts of paths of layers that vLLM does not adapt, or adapts wrongly, and the flag without which adapters
    have none of them.
    renamed: parts of paths that have another name in vLLM. split: linear layers that vLLM adapts in parts of equal
    sizes. repeated: linear layers whose weight vLLM has a second time under another name, in layers of the model that
    have no linear layer of that name. halved: linear layers of whose heads vLLM has the rows with even numbers first.
    unread_full: a part of the names of a full model's weights that vLLM does not read, or not right; "" for all names,
    None if it reads all.
    """

    refusal: str | None = None
    adapts_head: bool = False
    experts: Experts = "pairs"
    ignored: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)
    halved: frozenset[str] = frozenset()
    unread_full: str | None = None


_WITHOUT_HEAD, _WITH_HEAD = VllmForm(), VllmForm(adapts_head=True)
# Files of full models have other names than those of releases, among them all of models with images, whose full models
# are of the text's type. Of gpt-oss vLLM reads other numbers, and its class of MiniMax M2 reads weights once alone.
_WITHOUT_FULL = VllmForm(unread_full="")
_EXPERTS = {".experts.": "train_mlp"}
_WITHOUT_EXPERTS = VllmForm(ignored=_EXPERTS)
_UNKNOWN = VllmForm(adapts_head=True, ignored=_EXPERTS)
# Module names that differ from those in today's transformers.
_BLOCK_SPARSE = {".mlp.experts.": ".block_sparse_moe.experts."}
# Llama 4 multiplies the input of an expert by the router's weight. vLLM's kernels leave that weight out before an
# adapter's gate and up, and multiply the output of its down by it.
_LLAMA4 = VllmForm(adapts_head=True, ignored=_EXPERTS, halved=frozenset({"q_proj", "k_proj"}))
# In Gemma 4, values may be keys, and vLLM projects both.
_GEMMA4 = VllmForm(repeated={"k_proj": "v_proj"})
_UNKNOWN_TO_VLLM = VllmForm(refusal="does not know this model")
_WITHOUT_ADAPTERS = VllmForm(refusal="takes no adapters of this model")

FORMS: Mapping[str, VllmForm] = {
    "AfmoeForCausalLM": _WITHOUT_HEAD,
    "BambaForCausalLM": VllmForm(refusal="does not run this model"),
    "CohereForCausalLM": _WITHOUT_HEAD,
    "Cohere2ForCausalLM": _WITHOUT_HEAD,
    "DeepseekV3ForCausalLM": _WITHOUT_HEAD,
    "Ernie4_5ForCausalLM": _WITH_HEAD,
    "Ernie4_5_MoeForCausalLM": _WITHOUT_FULL,
    "Exaone4ForCausalLM": _WITH_HEAD,
    "ExaoneMoeForCausalLM": replace(_WITHOUT_FULL, adapts_head=True),
    "FalconH1ForCausalLM": _WITH_HEAD,
    "GemmaForCausalLM": _WITHOUT_HEAD,
    "Gemma2ForCausalLM": _WITHOUT_HEAD,
    "Gemma3ForCausalLM": _WITHOUT_HEAD,
    "Gemma3ForConditionalGeneration": _WITHOUT_FULL,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, unread_full=""),
    "Glm4ForCausalLM": VllmForm(split={"gate_up_proj": ("gate_proj", "up_proj")}),
    "Glm4MoeForCausalLM": _WITHOUT_HEAD,
    "Glm4MoeLiteForCausalLM": _WITHOUT_HEAD,
    "GptOssForCausalLM": VllmForm(experts="joined", unread_full=""),
    "GraniteForCausalLM": _WITH_HEAD,
    "GraniteMoeForCausalLM": _WITH_HEAD,
    "GraniteMoeHybridForCausalLM": VllmForm(adapts_head=True, experts="mixed", unread_full=".experts."),
    "GraniteMoeSharedForCausalLM": VllmForm(adapts_head=True, ignored={".shared_mlp.": "train_mlp"}),
    "HYV3ForCausalLM": VllmForm(renamed={".shared_experts.": ".shared_mlp."}, unread_full=""),
    "HyperCLOVAXForCausalLM": _WITH_HEAD,
    "InternLM3ForCausalLM": _WITH_HEAD,
    "IQuestCoderForCausalLM": _WITH_HEAD,
    "KimiK25ForConditionalGeneration": _WITHOUT_ADAPTERS,
    "Kolibri1ForCausalLM": _UNKNOWN_TO_VLLM,
    "LagunaForCausalLM": _WITHOUT_FULL,
    "LlamaForCausalLM": _WITH_HEAD,
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(_LLAMA4, unread_full=""),
    "MiniMaxM2ForCausalLM": VllmForm(renamed=_BLOCK_SPARSE, unread_full=""),
    "MistralForCausalLM": _WITHOUT_HEAD,
    "Ministral3ForCausalLM": _WITHOUT_HEAD,
    "Mistral3ForConditionalGeneration": _WITHOUT_FULL,
    "MixtralForCausalLM": VllmForm(adapts_head=True, renamed=_BLOCK_SPARSE),
    "NemotronForCausalLM": _WITH_HEAD,
    "NemotronHForCausalLM": VllmForm(adapts_head=True, ignored={"latent_proj": "train_mlp"}),
    "OlmoeForCausalLM": _WITHOUT_HEAD,
    "Phi3ForCausalLM": _WITH_HEAD,
    # The name in releases, and the one that transformers writes.
    "PhiMoEForCausalLM": VllmForm(adapts_head=True, renamed=_BLOCK_SPARSE),
    "PhimoeForCausalLM": VllmForm(refusal="takes this model only if its config.json names PhiMoEForCausalLM"),
    "Qwen2ForCausalLM": _WITHOUT_HEAD,
    "Qwen2MoeForCausalLM": _WITHOUT_HEAD,
    "Qwen3ForCausalLM": _WITH_HEAD,
    "Qwen3MoeForCausalLM": _WITH_HEAD,
    "Qwen3NextForCausalLM": _WITHOUT_HEAD,
    "Qwen3_5ForCausalLM": _WITH_HEAD,
    "Qwen3_5ForConditionalGeneration": replace(_WITHOUT_FULL, adapts_head=True),
    "Qwen3_5MoeForCausalLM": _WITH_HEAD,
    "Qwen3_5MoeForConditionalGeneration": VllmForm(adapts_head=True, experts="joined", unread_full=""),
    "StableLmForCausalLM": _WITHOUT_ADAPTERS,
    # vLLM runs these by the layers of transformers.
    "ArceeForCausalLM": _WITHOUT_HEAD,
    "CwmForCausalLM": _WITHOUT_HEAD,
    "Dots1ForCausalLM": _WITHOUT_EXPERTS,
    "FlexOlmoForCausalLM": _WITHOUT_EXPERTS,
    "GlmForCausalLM": _WITHOUT_HEAD,
    "HeliumForCausalLM": _WITHOUT_HEAD,
    "HunYuanDenseV1ForCausalLM": _WITHOUT_HEAD,
    "HunYuanMoEV1ForCausalLM": _WITHOUT_EXPERTS,
    "Jais2ForCausalLM": _WITHOUT_HEAD,
    "MellumForCausalLM": _WITHOUT_EXPERTS,
    "MinistralForCausalLM": _WITHOUT_HEAD,
    "Olmo2ForCausalLM": _WITHOUT_HEAD,
    "Olmo3ForCausalLM": _WITHOUT_HEAD,
    "SeedOssForCausalLM": _WITHOUT_HEAD,
    "SmolLM3ForCausalLM": _WITHOUT_HEAD,
    "SolarOpenForCausalLM": _WITHOUT_EXPERTS,
    "Starcoder2ForCausalLM": _WITHOUT_HEAD,
}


def form_of(architecture: str | None) -> VllmForm:
    """Returns the form of adapters of an architecture. Of one that was not compared vLLM itself says what it adapts,
    but it would ignore adapters of experts whose names it does not know."""
    return FORMS.get(architecture or "", _UNKNOWN)


def room_for(rank: int) -> int:
    """Returns the value of vLLM's --max-lora-rank for adapters of this rank."""
    return next((each for each in _RANKS if each >= rank), _RANKS[-1])
