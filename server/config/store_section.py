"""The section of the store, apart from the others: the store needs packages that `trainhouse plan` does without."""

from dataclasses import dataclass
from typing import Annotated

from ...workers.protocol.option import above, matching, option
from ..store import StoreConfig

OneUrl = Annotated[str, matching(r"https?://[^\s/?#]+/?", "http://HOST:PORT or https://HOST:PORT")]


@dataclass(frozen=True)
class StoreSection(StoreConfig):
    """The state directory and database, and the lease of servers that share a database."""

    advertise_url: OneUrl | None = option(
        None, "URL at which servers on the same database reach this one (default: as printed)"
    )
    lease_seconds: Annotated[float, above(0.5)] = option(
        10.0, "how long a server may fail to renew its lease before another takes over"
    )
