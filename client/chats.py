"""Turns chats and rows of datasets into tokens and weights, with a tokenizer of transformers."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

from ..schemas.chats.rows import read_chat
from ..schemas.chats.tokenizer import ChatTokenizer
from ..schemas.chats.weighted import TrainOn, WeightedTokens, weighted_chat, weighted_row
from .tokenizer import PreTrainedTokenizer

if TYPE_CHECKING:
    from ..schemas.chats.template import ChatTemplates

Message = Mapping[str, Any]


def weigh_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizer,
    train_on: TrainOn,
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any] | None,
) -> WeightedTokens:
    """Tokenizes a chat, with the weight of each token. See Datum.from_chat for arguments and errors."""
    _check_train_on(train_on)
    return weighted_chat(read_chat(messages, tools, variables), chat_tokenizer(tokenizer), train_on)


def weigh_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizer, train_on: TrainOn) -> WeightedTokens:
    """Tokenizes a row of a dataset, with the weight of each token. See Datum.from_row."""
    _check_train_on(train_on)
    if not hasattr(row, "items"):  # of a dict, or of a pandas Series
        raise TypeError(f"the row is of type {type(row).__name__}: pass a dict of columns; a chat is for from_chat")
    return weighted_row(row, chat_tokenizer(tokenizer), train_on)


def _check_train_on(train_on: TrainOn) -> None:
    if train_on not in (allowed := get_args(TrainOn)):
        raise ValueError(f"train_on is {train_on!r}: it should be one of {', '.join(map(repr, allowed))}")


def chat_tokenizer(tokenizer: PreTrainedTokenizer) -> ChatTokenizer:
    """Raises TypeError if it is not a tokenizer of transformers."""
    if not hasattr(tokenizer, "added_tokens_decoder"):
        raise TypeError(
            f"the tokenizer is a {type(tokenizer).__name__}: chats and rows need one of transformers (pip install "
            "transformers, then get_tokenizer())"
        )
    templates = tokenizer.chat_template or {}
    end = tokenizer.eos_token_id
    named = {"default": templates} if isinstance(templates, str) else templates
    return ChatTokenizer(
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        encode_whole=lambda text: tokenizer(text)["input_ids"],
        added_tokens={token.content: number for number, token in tokenizer.added_tokens_decoder.items()},
        end_token_id=end if isinstance(end, int) else None,
        templates=_templates(json.dumps(named), json.dumps(tokenizer.special_tokens_map, default=str)),
    )


@lru_cache(maxsize=8)
def _templates(sources: str, special_tokens: str) -> "ChatTemplates":
    # Imported here, since the client does without jinja2, which templates need.
    try:
        from ..schemas.chats.template import ChatTemplates
    except ImportError:
        raise ImportError("chat templates need the jinja2 package: pip install jinja2") from None
    return ChatTemplates(json.loads(sources), json.loads(special_tokens))
