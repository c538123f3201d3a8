"""RunServices: what runs work with."""

from collections.abc import Callable
from dataclasses import dataclass

from ..config.knobs import ServerConfig
from ..features.captured import Features
from ..journal.futures import Futures
from ..journal.journal import Journal
from ..journal.restore_marker import Copied
from ..journal.snapshots import Snapshots
from ..tenants.quotas import Quotas
from ..tenants.sessions import Sessions
from .operations import Operations
from .pinned_checkpoints import Loaded


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
