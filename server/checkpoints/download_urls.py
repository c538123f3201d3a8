"""Signatures with which files of checkpoints can be downloaded without a key."""

import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from ..files.directories import read_regular
from ..store import CheckpointRecord

URL_LIFETIME_SECONDS = 3600
_SECRET_BYTES = 32


@dataclass(frozen=True)
class SignedFile:
    """A file of a checkpoint, with what a download URL must carry to be served without a key."""

    name: str | None
    """Relative to the checkpoint; None for the archive of all files."""
    expires: int
    """Seconds since the epoch."""
    signature: str


class UrlSigner:
    """Signs files with the state directory's secret, so that URLs stay valid over restarts."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def signed(self, checkpoint: CheckpointRecord, file: str | None, expires: int) -> SignedFile:
        """Signs a file of this version of the checkpoint only, since a directory is never reused."""
        # No directory is called "archive": they are absolute paths and URLs. So neither is valid for the other.
        what = ("archive", checkpoint.directory) if file is None else (checkpoint.directory, file)
        message = "\n".join((*what, str(expires)))
        return SignedFile(file, expires, hmac.new(self._secret, message.encode(), "sha256").hexdigest())

    def is_valid(self, checkpoint: CheckpointRecord, signed: SignedFile) -> bool:
        expected = self.signed(checkpoint, signed.name, signed.expires).signature
        return hmac.compare_digest(expected.encode(), signed.signature.encode())


def load_secret(file: Path) -> bytes:
    """Returns the key that signs URLs. It is created once, readable by this user only."""
    if not file.exists():
        new = file.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(secrets.token_bytes(_SECRET_BYTES))
        new.rename(file)
    secret = read_regular(file)
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"{file} is damaged: delete it (download URLs issued before become invalid)")
    return secret
