"""Groups the services that every run uses."""

from collections.abc import Callable
from dataclasses import dataclass

from ..config.server_config import ServerConfig
from ..journal.futures import Futures
from ..journal.journal import Journal
from ..journal.restore_marker import RestoreMarker
from ..journal.snapshot_store import SnapshotStore
from ..operations.context import OperationContext
from ..operations.features import Features
from ..operations.pinned_checkpoints import PinnedCheckpoints
from ..telemetry.telemetry import Telemetry
from ..tenants.quotas import Quotas
from ..tenants.sessions import Sessions


@dataclass(frozen=True)
class RunServices:
    """Holds the parts of the server that runs use.

    status: describes in words what runs of a base model and role wait for.
    """

    config: ServerConfig
    futures: Futures
    journal: Journal
    snapshot_store: SnapshotStore
    pinned_checkpoints: PinnedCheckpoints
    features: Features
    context: OperationContext
    sessions: Sessions
    quotas: Quotas
    status: Callable[[str, str], str | None]
    restore_marker: RestoreMarker
    telemetry: Telemetry
