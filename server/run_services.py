"""RunServices: what runs work with."""

from collections.abc import Callable
from dataclasses import dataclass

from .config import ServerConfig
from .copied import Copied
from .features import Features
from .futures import Futures
from .journal import Journal
from .loaded import Loaded
from .operations import Operations
from .quotas import Quotas
from .sessions import Sessions
from .snapshots import Snapshots


@dataclass(frozen=True)
class RunServices:
    """status: of a base model's runs of a role, in words."""

    config: ServerConfig
    futures: Futures
    journal: Journal
    snapshots: Snapshots
    loaded: Loaded
    features: Features
    operations: Operations
    sessions: Sessions
    quotas: Quotas
    status: Callable[[str, str], str | None]
    copied: Copied
