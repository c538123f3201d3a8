"""RunServices: the parts of the server that runs use."""

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
    """Holds the parts of the server that runs use.

    status: describes in words what runs of a base model and role wait for.
    """

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
