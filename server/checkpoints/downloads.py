"""Downloads of files of checkpoints without a key, by signed URLs."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from ...schemas.errors import RequestError
from ..store import CheckpointRecord
from .archive import Archive
from .checkpoints import Checkpoints, as_request_errors
from .download_urls import URL_LIFETIME_SECONDS, SignedFile

T = TypeVar("T")


async def sign_files(checkpoints: Checkpoints, checkpoint: CheckpointRecord) -> list[SignedFile]:
    """Signs each file for URL_LIFETIME_SECONDS. Raises RequestError 503 if the manifest cannot be read."""
    expires = int(checkpoints.now()) + URL_LIFETIME_SECONDS
    with as_request_errors():
        files = (await checkpoints.manifest(checkpoint))["files"]
    return [checkpoints.signer.signed(checkpoint, file, expires) for file in files]


def sign_archive(checkpoints: Checkpoints, checkpoint: CheckpointRecord) -> SignedFile:
    return checkpoints.signer.signed(checkpoint, None, int(checkpoints.now()) + URL_LIFETIME_SECONDS)


def signed_archive(checkpoints: Checkpoints, path: str, signed: SignedFile) -> AbstractAsyncContextManager[Archive]:
    """Yields the archive that `sign_archive` signed, in PEFT's form, and keeps its files until the block ends. Raises
    RequestError like `signed_file`, and 429 if too many archives of the owner are being downloaded."""
    return _signed(checkpoints, path, signed, checkpoints.archives.reading)


@asynccontextmanager
async def signed_file(checkpoints: Checkpoints, path: str, signed: SignedFile) -> AsyncIterator[Path]:
    """Yields the local path of a file that `sign_files` signed, kept meanwhile. Raises RequestError: 403 if the
    signature is wrong or expired, 503 if the file cannot be read."""
    assert signed.name is not None, "an archive is no file"
    files = checkpoints.files
    async with _signed(checkpoints, path, signed, lambda one: files.reading(one.directory, rehash=False)) as here:
        yield here / signed.name


@asynccontextmanager
async def _signed(
    checkpoints: Checkpoints,
    path: str,
    signed: SignedFile,
    reading: Callable[[CheckpointRecord], AbstractAsyncContextManager[T]],
) -> AsyncIterator[T]:
    record = await checkpoints.find(path)
    if record is None or not checkpoints.signer.is_valid(record, signed):
        raise RequestError("this download URL is not valid, or its checkpoint was deleted: request a new URL", 403)
    if signed.expires <= checkpoints.now():
        raise RequestError("this download URL has expired: request a new URL", 403)
    async with AsyncExitStack() as kept:
        with as_request_errors():
            async with checkpoints.hiding_paths(record):
                found = await kept.enter_async_context(reading(record))
        yield found
