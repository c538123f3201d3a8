"""Encrypts exported checkpoints to age recipients (filippo.io/age), with pyrage."""

from collections.abc import Sequence
from pathlib import Path

import pyrage

from ...schemas.errors import OperationError

Recipient = pyrage.x25519.Recipient | pyrage.ssh.Recipient


def parse_recipients(texts: Sequence[str]) -> list[Recipient]:
    """Parses age public keys. Raises OperationError (user), which names the text that is none."""
    recipients: list[Recipient] = []
    for text in texts:
        kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
        try:
            recipients.append(kind.from_str(text))
        except pyrage.RecipientError as error:
            raise OperationError(
                f"age_encryption_recipients: {text[:80]!r} is not an age public key ({error}): give an age1... key from"
                " age-keygen, or an ssh-ed25519 or ssh-rsa public key from ssh-keygen"
            ) from None
    return recipients


def encrypt_files(directory: Path, recipients: Sequence[Recipient]) -> None:
    """Replaces each file with NAME.age, which any of the recipients can decrypt. Does nothing without recipients."""
    if not recipients:
        return
    for plain in [path for path in directory.rglob("*") if path.is_file()]:
        # pyrage.encrypt_file would hold the GIL for the whole file.
        with plain.open("rb") as reader, plain.with_name(f"{plain.name}.age").open("xb") as writer:
            pyrage.encrypt_io(reader, writer, list(recipients))
        plain.unlink()
