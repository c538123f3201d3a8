"""The text of samples: the model's tokenizer, loaded at the first request that needs it, and stop strings."""

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ....schemas.adapters.model_files import refuse_tokenizer_program
from ....schemas.errors import OperationError
from ...models.model import BaseModel

if TYPE_CHECKING:  # llguidance is imported only for constraints: training and sampling work without it
    from .structured_output import MatcherFactory

# Text is decoded with a few tokens before it: some tokenizers drop a space before the first token.
_LEADING_TOKENS = 5
_MAX_BYTES = 4  # in one character
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class LazyTokenizer:
    """Loads the tokenizer, and what is built from it, on first use."""

    def __init__(self, source: str, base: BaseModel) -> None:
        self._source, self._base = source, base

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Raises OperationError if the model has none."""
        return _load_tokenizer(self._source)

    @cached_property
    def matchers(self) -> "MatcherFactory":
        """Raises OperationError if the tokenizer is missing or does not support constraints."""
        from .structured_output import MatcherFactory

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise OperationError("this model's tokenizer does not support constraints: it is not a fast one")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return MatcherFactory(backend.to_str(), self._base.vocab_size, self._base.loaded.eos_token_ids)


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


class Detokenizer(Protocol):
    def decode(self, token_ids: list[int], **_: bool) -> str | list[str]: ...


class StopStrings:
    """Follows one sample. The prompt only helps decoding: a match must be within the sampled text."""

    def __init__(self, tokenizer: Detokenizer, stops: tuple[str, ...], prompt_tail: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._tokens = prompt_tail[-_LEADING_TOKENS:]
        self._num_read = len(self._tokens)
        self._read_text = self._decode(self._tokens)
        self._tail = ""
        self._num_searched = 0  # characters of the tail

    def found_after(self, token: int) -> bool:
        """True if `token`, the next of the sample, completes a stop string."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        fresh = text[len(self._read_text) :]
        searched = self._tail + fresh.rstrip(_INCOMPLETE)
        # Only where a match can be new: str.find takes up to the product of both lengths.
        starts = [(stop, max(0, self._num_searched - len(stop) + 1)) for stop in self._stops]
        ends = [place + len(stop) for stop, start in starts if (place := searched.find(stop, start)) >= 0]
        if ends:
            # If the sample continues (min_tokens), the search continues after the match.
            self._advance(searched[min(ends) :])
            self._num_searched = 0
            return True
        # Bytes that are still incomplete after this many tokens are not text.
        if not fresh.endswith(_INCOMPLETE) or len(self._tokens) - self._num_read > _MAX_BYTES:
            self._advance(searched)
        return False

    def _advance(self, searched: str) -> None:
        """Drops text that has been searched, except the end, where a match may begin, and context for decoding."""
        self._tail = searched[max(0, len(searched) - self._keep) :]
        self._num_searched = len(self._tail)
        self._tokens = self._from_whole_character(max(_LEADING_TOKENS, len(self._tokens) - self._num_read))
        self._num_read = len(self._tokens)
        self._read_text = self._decode(self._tokens)

    def _from_whole_character(self, num_tokens: int) -> list[int]:
        """Returns at least the last `num_tokens` tokens.

        Starts at a whole character: the bytes of half a character would corrupt the text after them.
        """
        for more in range(_MAX_BYTES):
            if not self._decode(self._tokens[-num_tokens - more :]).startswith(_INCOMPLETE):
                return self._tokens[-num_tokens - more :]
        return self._tokens[-num_tokens:]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
