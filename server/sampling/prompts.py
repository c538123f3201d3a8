"""Prompt: what a sample continues, in tokens, and as the text that it was sent as."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """text: None = it was sent as tokens, or made by a chat template."""

    token_ids: Sequence[int]
    text: str | None = None

    def num_marks(self, shown: str, tokenizer: Tokenizer) -> int:
        """How many spaces in front of `shown`, the text of the tokens, are none of the prompt's."""
        if self.text is not None and shown.lstrip(" ") == self.text.lstrip(" "):
            return max(0, len(shown) - len(self.text))
        return tokenizer.num_marks if shown.startswith(" ") else 0
