"""Encrypts exported checkpoints to age recipients (filippo.io/age), with pyrage."""

from collections.abc import Sequence
from pathlib import Path

import pyrage

from ...schemas.errors import OperationError

Recipient = pyrage.x25519.Recipient | pyrage.ssh.Recipient


def parse_recipients(texts: Sequence[str]) -> list[Recipient]:
    """Returns the public keys. Raises OperationError (user) that names the one that is none."""
    return [_parse(text) for text in texts]


def encrypt_files(directory: Path, recipients: Sequence[Recipient]) -> None:
    """Replaces each file by NAME.age, which any of the recipients can decrypt; no recipients: leaves all as it is."""
    if not recipients:
        return
    for plain in [path for path in directory.rglob("*") if path.is_file()]:
        # Not encrypt_file, which keeps the interpreter locked until the whole file is done.
        with plain.open("rb") as reader, plain.with_name(f"{plain.name}.age").open("xb") as writer:
            pyrage.encrypt_io(reader, writer, list(recipients))
        plain.unlink()


def _parse(text: str) -> Recipient:
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except pyrage.RecipientError as error:
        raise OperationError(
            f"age_encryption_recipients: {text[:80]!r} is no public key of age ({error}): give age1... of age-keygen,"
            " or ssh-ed25519 ... or ssh-rsa ... of ssh-keygen"
        ) from None
