"""Collects what differs between text completions and chat completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from ...schemas.openai import AnyCompletion
from ...workers.protocol.calls import ModelInfo
from ..text.tokenizer import Tokenizer
from .prompts import Prompt
from .response_writer import ResponseWriter


@dataclass(frozen=True)
class CompletionKind(Generic[AnyCompletion]):
    """One of OpenAI's two kinds of completion.

    check: validates combinations of fields; raises OpenAiError. prompts: tokenizes the prompts, given the context
    length in tokens; raises RequestError; slow for long texts. ends: the tokens that end a completion.
    """

    request: type[AnyCompletion]
    check: Callable[[AnyCompletion], None]
    prompts: Callable[[AnyCompletion, Tokenizer, int], list[Prompt]]
    ends: Callable[[Tokenizer, ModelInfo], Sequence[int]]
    writer: type[ResponseWriter]
