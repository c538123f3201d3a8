"""Kind: what completions and chats do each in their own way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from ...schemas.openai import Asked
from ..sampling.prompts import Prompt
from ..text.tokenizer import Tokenizer
from .answer import Answer


@dataclass(frozen=True)
class Kind(Generic[Asked]):
    """check: of what no single field shows; raises OpenAiError. prompts: raises RequestError, and may take long.

    The last argument of `prompts`: how many tokens the context has.
    """

    request: type[Asked]
    check: Callable[[Asked], None]
    prompts: Callable[[Asked, Tokenizer, int], list[Prompt]]
    answer: type[Answer]
