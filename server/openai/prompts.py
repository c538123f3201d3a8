"""Represents the prompt of an OpenAI request as token ids, with the text as sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt. text: as sent; None if it was sent as token ids or rendered by a chat template."""

    token_ids: Sequence[int]
    text: str | None = None

    def num_added_spaces(self, shown: str, tokenizer: Tokenizer) -> int:
        """Returns how many leading spaces of `shown`, the decoded tokens, the tokenizer has added to the prompt."""
        if self.text is not None and shown.lstrip(" ") == self.text.lstrip(" "):
            return max(0, len(shown) - len(self.text))
        return tokenizer.num_prefix_spaces if shown.startswith(" ") else 0
