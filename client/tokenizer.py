"""Downloads the tokenizer of a base model from the server."""

import asyncio
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.models import TokenizerFiles
from .connection import ServerConnection
from .errors import TrainhouseError

if TYPE_CHECKING:
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
    if find_spec("transformers"):
        with _LOADING:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(directory)
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(directory, "tokenizer.json")))  # pyright: ignore[reportReturnType]
