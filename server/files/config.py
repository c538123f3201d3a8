"""PlaceConfig: where checkpoints lie."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlaceConfig:
    """checkpoints: a directory or a URL, None = in the state directory. mirrors: URLs that get a copy of each.

    checkpoint_cache_bytes: of those that were read from URLs. pauses_seconds: between two tries at a URL.
    mirror_pause_seconds: behind the first copy of a checkpoint that failed; it doubles, up to an hour.
    """

    checkpoints: str | None = None
    mirrors: tuple[str, ...] = ()
    checkpoint_cache_bytes: int = 16 << 30
    pauses_seconds: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    mirror_pause_seconds: float = 5.0
