"""SampleText: the text of one sample as its tokens come, and how much of it can be shown already."""

import codecs
from collections.abc import Collection, Iterable, Sequence

from .tokenizer import Tokenizer


class SampleText:
    """Feed it tokens with `add` and take the text that they complete; all that was taken is the whole text.

    A character comes once all of its bytes are there. Special tokens and the end token are no text; a stop string and
    what follows is left out, and what may be the beginning of one is held back until it is known not to be.
    offsets: characters of text in front of each token. stopped: a stop string is there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        end_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """min_tokens: with fewer of them, nothing stops the sample."""
        self.offsets: list[int] = []
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[str] = []
        self._num_characters = 0
        self._num_taken = 0
        self._num_unstopped = 0

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            is_text = token not in self._end_token_ids and not self._tokenizer.is_special(token)
            spelled = self._tokenizer.token_bytes(token) if is_text else b""
            if not is_text or not _continues_character(spelled):
                self._end_character()
            self.offsets.append(self._num_characters)
            self._hold(self._decoder.decode(spelled))
            if len(self.offsets) < self._min_tokens:
                self._num_unstopped = self._num_characters

    def take(self, last: bool = False) -> str:
        """The text that can be shown and was not taken yet. last: no tokens follow."""
        if last:
            self._end_character()
        if self.stopped:
            return ""
        text = "".join(self._held)
        searched = text[max(0, self._num_unstopped - self._num_taken) :]
        stop = find_stop(searched, self._stop_strings)
        self.stopped = stop is not None
        if stop is None:
            stop = len(searched) - (0 if last else longest_beginning(searched, self._stop_strings))
        num_taken = len(text) - len(searched) + stop
        self._num_taken += num_taken
        self._held = [text[num_taken:]]
        return text[:num_taken]

    def _end_character(self) -> None:
        """One whose bytes are not all there is not going to be complete."""
        self._hold(self._decoder.decode(b"", final=True))

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_characters += len(text)


def _continues_character(spelled: bytes) -> bool:
    """Or may do so: it has no bytes."""
    return not spelled or spelled[0] & 0xC0 == 0x80


def find_stop(text: str, stop_strings: Iterable[str]) -> int | None:
    """Where the stop string begins that is complete first; of those that end there, the longest."""
    found = ((text.find(stop), len(stop)) for stop in stop_strings)
    ends = [(start + length, start) for start, length in found if start >= 0]
    return min(ends)[1] if ends else None


def longest_beginning(text: str, stop_strings: Iterable[str]) -> int:
    """How many characters at the end of a text begin one of the stop strings, at the most."""
    lengths = (
        length
        for stop in stop_strings
        for length in range(1, min(len(stop) - 1, len(text)) + 1)
        if text.endswith(stop[:length])
    )
    return max(lengths, default=0)
