"""Collects what differs between text completions and chat completions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from ...schemas.openai import Asked
from ..text.tokenizer import Tokenizer
from .prompts import Prompt
from .response_writer import ResponseWriter


@dataclass(frozen=True)
class CompletionKind(Generic[Asked]):
    """One of OpenAI's two kinds of completion.

    check: validates combinations of fields; raises OpenAiError. prompts: tokenizes the prompts, given the context
    length in tokens; raises RequestError; slow for long texts.
    """

    request: type[Asked]
    check: Callable[[Asked], None]
    prompts: Callable[[Asked, Tokenizer, int], list[Prompt]]
    writer: type[ResponseWriter]
