"""Downloads the tokenizer of a base model from the server."""

import asyncio
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.chats.tokenizer import tokens_before
from ..schemas.models import TokenizerFiles
from .connection import ServerConnection
from .errors import TrainhouseError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast as PreTrainedTokenizer
else:
    PreTrainedTokenizer = object

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
