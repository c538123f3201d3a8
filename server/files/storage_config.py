"""Configures where checkpoints are stored."""

from dataclasses import dataclass

from ...workers.protocol.option import Positive, option


@dataclass(frozen=True)
class CheckpointOptions:
    """The directories and URLs of checkpoints and their copies."""

    checkpoints: str | None = option(
        None, "directory, s3://BUCKET/... or another fsspec URL (default: in --state-dir)", metavar="URL"
    )
    mirrors: tuple[str, ...] = option(
        (), "URL that receives a copy of every checkpoint; repeatable", metavar="URL", flag="--mirror"
    )
    checkpoint_cache_bytes: Positive = option(16 << 30, "local read cache for checkpoints at a URL")


@dataclass(frozen=True)
class CheckpointStorageConfig(CheckpointOptions):
    """Options of the storage of checkpoints and their copies, of retries, and of a tenant's limits."""

    retry_pauses_seconds: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Between attempts at a URL."""
    mirror_pause_seconds: float = 5.0
    """After the first failure to copy a checkpoint; doubles with each failure, up to an hour."""
    tenant_checkpoints: int = 10_000
    tenant_checkpoint_bytes: int = 4 << 40
