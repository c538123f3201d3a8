"""Turns the tokens of one sample into text as they arrive, and decides how much of it can be shown already."""

import codecs
from collections.abc import Collection, Iterable, Sequence

from .tokenizer import Tokenizer


class StopString:
    """A text that ends samples, prepared for the search of Knuth, Morris and Pratt (https://doi.org/10.1137/0206024),
    which reads every character once.

    text: not empty.
    borders: for each prefix, the length of its longest proper prefix that is also its suffix.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = [0]
        for character in text[1:]:
            length = self.borders[-1]
            while length and text[length] != character:
                length = self.borders[length - 1]
            self.borders.append(length + (text[length] == character))


class StopSearch:
    """The state of the search for one stop string in one text.

    num_matched: length of the longest suffix of the text so far that is a prefix of the stop string.
    """

    def __init__(self, stop: StopString) -> None:
        self.stop = stop
        self.num_matched = 0

    def find(self, text: str, num_unstopped: int) -> int | None:
        """Returns how many characters of `text`, which continues the text searched so far, end with the stop string.

        None if it does not end in `text`, or only within the first `num_unstopped` characters.
        """
        stop, borders = self.stop.text, self.stop.borders
        place = 0
        while place < len(text):
            if not self.num_matched and (place := text.find(stop[0], place)) < 0:
                return None
            while self.num_matched and stop[self.num_matched] != text[place]:
                self.num_matched = borders[self.num_matched - 1]
            self.num_matched += stop[self.num_matched] == text[place]
            place += 1
            if self.num_matched == len(stop):
                if place > num_unstopped:
                    return place
                self.num_matched = borders[-1]
        return None


class SampleText:
    """Receives tokens with `add` and returns the text that they complete with `take`; all taken pieces make up the
    text.

    A character is returned when all of its bytes have arrived. Special tokens and the end token give no text. A stop
    string and everything after it is left out; a possible beginning of one is held back until the tokens decide.

    min_tokens: a stop string that is complete after fewer tokens does not count.
    shows_special: special tokens give text, too.
    found_stop: a stop string has been found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[StopString] = (),
        end_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        *,
        shows_special: bool = False,
    ) -> None:
        self.found_stop = False
        self._tokenizer = tokenizer
        self._searches = [StopSearch(stop) for stop in stop_strings]
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_tokens = 0
        self._held = ""  # searched but not taken
        self._fresh: list[str] = []  # not searched yet
        self._num_characters = 0
        self._num_taken = 0
        self._num_searched = 0
        self._num_unstopped = 0

    def add(self, tokens: Iterable[int]) -> list[int]:
        """Returns, for each token, the number of characters of text before it."""
        offsets = []
        for token in tokens:
            is_hidden = not self._shows_special and self._tokenizer.is_special(token)
            is_text = token not in self._end_token_ids and not is_hidden
            spelled = self._tokenizer.token_bytes(token) if is_text else b""
            continues_character = not spelled or spelled[0] & 0xC0 == 0x80
            if not is_text or not continues_character:
                self._end_character()
            offsets.append(self._num_characters)
            self._append(self._decoder.decode(spelled))
            self._num_tokens += 1
            if self._num_tokens < self._min_tokens:
                self._num_unstopped = self._num_characters
        return offsets

    def take(self, last: bool = False) -> str:
        """Returns the text that can be shown and was not taken yet. `last` means that no tokens follow."""
        if last:
            self._end_character()
        if self.found_stop:
            return ""
        stop = self._find_stop()
        self.found_stop = stop is not None
        if stop is None:
            num_held = 0 if last else max((search.num_matched for search in self._searches), default=0)
            stop = self._num_characters - num_held
        num_taken, self._num_taken = stop - self._num_taken, stop
        text, self._held = self._held[:num_taken], self._held[num_taken:]
        return text

    def _find_stop(self) -> int | None:
        """Returns where the first complete stop string begins; of those that end at the same place, the longest
        counts.
        """
        fresh = "".join(self._fresh)
        self._fresh.clear()
        self._held += fresh
        start, self._num_searched = self._num_searched, self._num_characters
        found = ((search.find(fresh, self._num_unstopped - start), search.stop.text) for search in self._searches)
        ends = [(end, end - len(stop)) for end, stop in found if end is not None]
        return start + min(ends)[1] if ends else None

    def _end_character(self) -> None:
        """Ends a character whose remaining bytes will not arrive."""
        self._append(self._decoder.decode(b"", final=True))

    def _append(self, text: str) -> None:
        self._fresh.append(text)
        self._num_characters += len(text)
