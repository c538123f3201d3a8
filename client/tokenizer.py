"""Tokenizers of base models: downloaded from the server, and what they make of chats and rows of datasets."""

import asyncio
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..schemas.chats.rows import read_chat
from ..schemas.chats.tokenizer import ChatTokenizer, tokens_before
from ..schemas.chats.weighted import TrainOn, WeightedTokens, weighted_chat, weighted_row
from ..schemas.models import TokenizerFiles
from .connection import ServerConnection
from .errors import TrainhouseError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast as PreTrainedTokenizer

    from ..schemas.chats.template import ChatTemplates
else:
    PreTrainedTokenizer = object

Message = Mapping[str, Any]

_LOADING = threading.Lock()
"""transformers fills its namespace at the first access, and threads that access it at that moment get ImportError."""


async def load_tokenizer(connection: ServerConnection, model_name: str) -> PreTrainedTokenizer:
    """Downloads and loads a tokenizer with transformers; without it, a `tokenizers.Tokenizer` without chat template.

    Raises:
        TrainhouseError: neither package is installed.
    """
    if not find_spec("transformers") and not find_spec("tokenizers"):
        raise TrainhouseError("get_tokenizer needs the tokenizers or transformers package: pip install transformers")
    listing = await connection.get(f"models/{model_name}/tokenizer", TokenizerFiles)
    with tempfile.TemporaryDirectory() as directory:
        for name, url in listing.files.items():
            await connection.download(url, Path(directory, Path(name).name))
        return await asyncio.to_thread(load_directory, directory)


def load_directory(directory: str) -> PreTrainedTokenizer:
    """Loads a tokenizer that puts no end token behind a text, even if its files ask for that: texts are prompts."""
    if find_spec("transformers"):
        with _LOADING:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(directory)
        end = tokenizer.eos_token_id
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            _put_nothing_behind_texts(backend, end if isinstance(end, int) else None)
        return tokenizer
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(Path(directory, "tokenizer.json")))
    _put_nothing_behind_texts(backend, None)
    return backend  # pyright: ignore[reportReturnType]


def _put_nothing_behind_texts(backend: "Tokenizer", end_token_id: int | None) -> None:
    from tokenizers.processors import TemplateProcessing

    plain, whole = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    first = tokens_before(plain, whole, end_token_id)
    if whole != [*first, *plain]:
        names = [str(backend.id_to_token(token)) for token in first]
        special = list(dict(zip(names, first, strict=True)).items())
        backend.post_processor = TemplateProcessing([*names, "$A"], [*names, "$A", "$B"], special)


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
