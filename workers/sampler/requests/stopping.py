"""Stop strings: found in the text of a sample as it grows, over the borders of tokens."""

from typing import Protocol

# Text is decoded with a few tokens before it: some tokenizers drop the space in front of the first token they see.
_LEADING_TOKENS = 5
_MOST_BYTES = 4  # of a character
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    def decode(self, token_ids: list[int], **_: bool) -> str | list[str]: ...


class StopStrings:
    """Follows one sample. The prompt is context for decoding only: a match lies in the sampled text alone."""

    def __init__(self, tokenizer: Detokenizer, stops: tuple[str, ...], prompt_tail: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._tokens = prompt_tail[-_LEADING_TOKENS:]
        self._num_read = len(self._tokens)
        self._read_text = self._decode(self._tokens)
        self._tail = ""

    def found_after(self, token: int) -> bool:
        """Whether a stop string is complete with `token`, the next of the sample."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        fresh = text[len(self._read_text) :]
        searched = self._tail + fresh.rstrip(_INCOMPLETE)
        ends = [place + len(stop) for stop in self._stops if (place := searched.find(stop)) >= 0]
        if ends:
            # Who goes on all the same begins to search behind it.
            self._advance(searched[min(ends) :])
            return True
        # What is still incomplete after so many tokens is not going to be text.
        if not fresh.endswith(_INCOMPLETE) or len(self._tokens) - self._num_read > _MOST_BYTES:
            self._advance(searched)
        return False

    def _advance(self, searched: str) -> None:
        """What is read serves as the context of what follows, and only its end can still begin a match."""
        self._tail = searched[max(0, len(searched) - self._keep) :]
        self._tokens = self._from_whole_character(max(_LEADING_TOKENS, len(self._tokens) - self._num_read))
        self._num_read = len(self._tokens)
        self._read_text = self._decode(self._tokens)

    def _from_whole_character(self, num_tokens: int) -> list[int]:
        """At least the last `num_tokens`: bytes of half a character would spoil those behind them."""
        for more in range(_MOST_BYTES):
            if not self._decode(self._tokens[-num_tokens - more :]).startswith(_INCOMPLETE):
                return self._tokens[-num_tokens - more :]
        return self._tokens[-num_tokens:]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
