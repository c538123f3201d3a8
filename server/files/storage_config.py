"""Configures where checkpoints are stored."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointStorageConfig:
    """Says where checkpoints and their copies are stored, and how failures are retried.

    checkpoints: a directory or a URL; None for the state directory.
    mirrors: URLs that get a copy of each checkpoint.
    checkpoint_cache_bytes: for local copies of checkpoints that were read from URLs.
    retry_pauses_seconds: between attempts at a URL.
    tenant_checkpoints, tenant_checkpoint_bytes: the most that a tenant may have.
    mirror_pause_seconds: after the first failure to copy a checkpoint; doubles with each failure, up to an hour.
    """

    checkpoints: str | None = None
    mirrors: tuple[str, ...] = ()
    checkpoint_cache_bytes: int = 16 << 30
    retry_pauses_seconds: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    mirror_pause_seconds: float = 5.0
    tenant_checkpoints: int = 10_000
    tenant_checkpoint_bytes: int = 4 << 40
