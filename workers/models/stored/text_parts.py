"""Finds the part for text of models that also take images or sound: its config, and its weights in their files."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...shapes.other_models import TEXT_MODELS, TRANSPOSED_EXPERTS, WITH_HEAD, text_settings, text_type_of
from .stored_tensor import Index, StoredTensor, converting, spans


@dataclass(frozen=True)
class TextModel:
    """The part for text of a model. whole: the model_type of the whole."""

    whole: str

    @property
    def name(self) -> str:
        """The name of the part in the whole."""
        return "text_model" if self.whole in TEXT_MODELS else "language_model"

    @property
    def has_transposed_experts(self) -> bool:
        """True if files have the matrices of experts of a layer in one tensor of [experts, in, out]."""
        return self.whole in TRANSPOSED_EXPERTS

    @property
    def renamings(self) -> Mapping[str, str]:
        """Renames weights from files of current and earlier versions of transformers to those of the part alone."""
        trunk = rf"^(?:model\.)?{self.name}\.(?:model\.|backbone\.)?(?:encoder\.)?"
        return {rf"^{self.name}\.lm_head": "lm_head", trunk: "model."}

    def name_in_whole(self, name: str, prefix: str) -> str:
        """Returns the name in the whole of a parameter or module of the part.

        Args:
            prefix: of the part's trunk, with a dot.
        """
        if self.whole in WITH_HEAD:
            return f"{self.name}.{name}"
        return f"{prefix}{self.name}.{name.removeprefix(prefix)}" if name.startswith(prefix) else name


def text_config_of(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the part for text, of a type of causal models that computes the same for text.

    Fields that neither names have the values that they have in the text part, not the defaults of that type.
    """
    text: Any = whole.get_text_config()
    given = whole.to_dict()
    if (found := text_type_of(given)) == text.model_type:
        return text
    unsaid = {"head_dim": text.hidden_size // text.num_attention_heads, "partial_rotary_factor": 1.0}
    return CONFIG_MAPPING[found].from_dict({**unsaid, **text.to_dict(), **text_settings(given), "model_type": found})


def transposing_experts(part: TextModel | None, config: PreTrainedConfig) -> AbstractContextManager[None]:
    """Makes `from_pretrained` read experts' matrices of [experts, in, out] as [experts, out, in], while inside.

    Args:
        config: of the part for text.
    """
    if part is None or not part.has_transposed_experts:
        return nullcontext()
    settings: Any = config
    features, hidden = settings.moe_intermediate_size, settings.hidden_size
    sizes = {"gate_up_proj": [2 * features, hidden], "down_proj": [hidden, features]}

    def turned(name: str, stored: StoredTensor) -> StoredTensor:
        wanted = sizes.get(name.rpartition(".experts.")[2])
        return stored if wanted is None or list(stored.get_shape()[1:]) == wanted else _Transposed(stored)

    return converting(lambda tensors: {name: turned(name, stored) for name, stored in tensors.items()})


class _Transposed:
    """Implements StoredTensor for the matrices of a stored one [experts, columns, rows]."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        experts, columns, rows = self._stored.get_shape()
        return [experts, rows, columns]

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        experts, rows, columns = spans(index, self.get_shape())
        return self._stored[experts, columns, rows].mT.contiguous()
