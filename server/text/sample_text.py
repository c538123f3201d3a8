"""SampleText: the text of one sample as its tokens come, and how much of it can be shown already."""

import codecs
from collections.abc import Collection, Iterable, Sequence

from .stop_strings import StopSearch, StopString
from .tokenizer import Tokenizer


class SampleText:
    """Feed it tokens with `add` and take the text that they complete; all that was taken is the whole text.

    A character comes once all of its bytes are there. Special tokens and the end token are no text; a stop string and
    what follows is left out, and what may be the beginning of one is held back until it is known not to be. stopped: a
    stop string is there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[StopString] = (),
        end_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """min_tokens: a stop string that is complete with fewer of them does not count."""
        self.stopped = False
        self._tokenizer = tokenizer
        self._searches = [StopSearch(stop) for stop in stop_strings]
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_tokens = 0
        self._held = ""  # searched, and not taken
        self._fresh: list[str] = []  # not searched
        self._num_characters = 0
        self._num_taken = 0
        self._num_searched = 0
        self._num_unstopped = 0

    def add(self, tokens: Iterable[int]) -> list[int]:
        """Characters of text in front of each of them."""
        offsets = []
        for token in tokens:
            is_text = token not in self._end_token_ids and not self._tokenizer.is_special(token)
            spelled = self._tokenizer.token_bytes(token) if is_text else b""
            if not is_text or not _continues_character(spelled):
                self._end_character()
            offsets.append(self._num_characters)
            self._append(self._decoder.decode(spelled))
            self._num_tokens += 1
            if self._num_tokens < self._min_tokens:
                self._num_unstopped = self._num_characters
        return offsets

    def take(self, last: bool = False) -> str:
        """The text that can be shown and was not taken yet. last: no tokens follow."""
        if last:
            self._end_character()
        if self.stopped:
            return ""
        stop = self._find_stop()
        self.stopped = stop is not None
        if stop is None:
            num_held = 0 if last else max((search.num_begun for search in self._searches), default=0)
            stop = self._num_characters - num_held
        num_taken, self._num_taken = stop - self._num_taken, stop
        text, self._held = self._held[:num_taken], self._held[num_taken:]
        return text

    def _find_stop(self) -> int | None:
        """Where the stop string begins that is complete first; of those that end there, the longest."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        self._held += fresh
        start, self._num_searched = self._num_searched, self._num_characters
        found = ((search.find(fresh, self._num_unstopped - start), search.stop.text) for search in self._searches)
        ends = [(end, end - len(stop)) for end, stop in found if end is not None]
        return start + min(ends)[1] if ends else None

    def _end_character(self) -> None:
        """One whose bytes are not all there is not going to be complete."""
        self._append(self._decoder.decode(b"", final=True))

    def _append(self, text: str) -> None:
        self._fresh.append(text)
        self._num_characters += len(text)


def _continues_character(spelled: bytes) -> bool:
    """Or may do so: it has no bytes."""
    return not spelled or spelled[0] & 0xC0 == 0x80
