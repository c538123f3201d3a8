"""Reads files of hf:// URLs, compares them with the hashes that the hub reports, and words its refusals.

Imports huggingface_hub only where an hf:// URL is used, since that takes half a second. Imports no torch.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

_SCHEME = "hf://"
_PIECE_BYTES = 32 << 20
_SHA256_LENGTH = 64
_REFUSED = (401, 403)
_CREDENTIALS = "in HF_TOKEN, or in the file that HF_TOKEN_PATH names"


def is_hub_url(url: str) -> bool:
    return url.startswith(_SCHEME)


def check_hub_url(url: str) -> None:
    """Raises ValueError, with the remedy, if the URL is not in a model repository."""
    from huggingface_hub import parse_hf_uri

    try:
        if parse_hf_uri(url).type == "model":
            return
    except ValueError:  # about all kinds of repositories, of which one is usable here
        pass
    raise ValueError(f"{url} names no model repository: expected hf://OWNER/REPO[@REVISION][/DIRECTORY]")


def open_options(url: str) -> Mapping[str, bool]:
    """Returns fsspec's options for a file system without cached listings."""
    fresh = {"use_listings_cache": False}
    return {**fresh, "skip_instance_cache": True} if is_hub_url(url) else fresh


def content_hash(info: Mapping[str, Any]) -> str:
    """Returns the hash in the hub's listing of a file: sha256 of what it stores with LFS, git's blob id of the rest."""
    return info["lfs"]["sha256"] if info.get("lfs") else info["blob_id"]


def has_hash(path: Path, expected: str) -> bool:
    """True if the local file's `content_hash` is the expected one."""
    if len(expected) == _SHA256_LENGTH:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest() == expected


def fetch_rest(files: fsspec.AbstractFileSystem, path: str, target: Path) -> None:
    """Appends what the local file lacks, so that an interrupted download continues in the middle of a file.

    huggingface_hub's own downloads start a file again after a crash.
    """
    with cast(BinaryIO, files.open(path, cache_type="none")) as remote, target.open("ab", buffering=0) as here:
        remote.seek(here.tell())
        shutil.copyfileobj(remote, here, _PIECE_BYTES)


def plain_error(error: Exception) -> Exception:
    """Returns a refusal of the hub as an error of Python that names the remedy, and other errors as they are.

    No message has the token, a signed URL or the number of a request.
    """
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        return plain_error(error.__cause__)  # its own message only says which upload failed
    answer = next((cause for cause in _causes(error) if isinstance(cause, HfHubHTTPError)), None)
    if answer is None:
        public = _without_secrets(str(error))
        return error if public == str(error) else OSError(public)
    status = answer.response.status_code
    words = _without_secrets(f"{status} {answer.server_message or answer.response.reason_phrase}")
    if status in _REFUSED:
        return PermissionError(f"the hub refuses access ({words}): give a token with the rights {_CREDENTIALS}")
    if status == 404:
        return FileNotFoundError(
            f"the hub does not have it, or not for this token ({words}): name what exists, or give a token with the "
            f"rights {_CREDENTIALS}"
        )
    return OSError(f"the hub answered {words}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _without_secrets(message: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    message = message.replace(token, "***") if token else message
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", message)
