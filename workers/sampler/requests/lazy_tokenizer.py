"""The model's tokenizer, loaded at the first request that needs it."""

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ....schemas.errors import OperationError
from ...models.model import BaseModel
from ...models.tokenizer_program import refuse_tokenizer_program

if TYPE_CHECKING:  # llguidance is imported only for constraints: training and sampling work without it
    from .structured_output import MatcherFactory


class LazyTokenizer:
    """Loads the tokenizer, and what is built from it, on first use."""

    def __init__(self, source: str, base: BaseModel) -> None:
        """Loads nothing yet. `source` is the model's directory or hub id."""
        self._source, self._base = source, base

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Raises OperationError if the model has none."""
        return _load_tokenizer(self._source)

    @cached_property
    def matchers(self) -> "MatcherFactory":
        """Raises OperationError if the model has no tokenizer, or one that does not support constraints."""
        from .structured_output import MatcherFactory

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise OperationError("this model's tokenizer does not support constraints: it is not a fast one")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return MatcherFactory(backend.to_str(), self._base.vocab_size, self._base.eos_token_ids)


def _load_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Raises OperationError if there is none. For some models transformers then builds one of special tokens only."""
    try:
        refuse_tokenizer_program(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        reason = None if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else "its vocabulary is empty"
    except (OSError, ValueError) as error:
        tokenizer, reason = None, str(error)
    if tokenizer is None or reason is not None:
        raise OperationError(
            f"stop strings and constraints need the model's tokenizer, which {source} does not have ({reason}): give"
            " stop token ids"
        )
    return tokenizer
