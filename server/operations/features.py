"""The interface to captured features, which only draft models have."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ...schemas.errors import OperationError
from ...schemas.models import FeatureStock, Limit
from ...schemas.training import ForwardBackwardRequest
from ..store import RunRecord


class Features:
    """The store of captured features of a server without draft models: always empty. See FeatureStore."""

    async def open(self) -> None: ...

    async def sweep(self, live: Collection[str]) -> None: ...

    async def delete_unneeded(self) -> None: ...

    def stock(self) -> FeatureStock | None:
        return None

    def limits(self, tenant_id: str) -> Mapping[str, Limit]:
        return {}

    def reserve_again(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        return lambda: None

    def hold(self, run: RunRecord, seq_id: int, uses: Counter[str]) -> None: ...

    def restore_hold(self, run: RunRecord, seq_id: int, uses: Mapping[str, int]) -> None: ...

    def pending_uses(self, run: RunRecord, seq_id: int) -> Mapping[int, Mapping[str, int]]:
        return {}

    def with_feature_location(self, run: RunRecord, request: ForwardBackwardRequest) -> ForwardBackwardRequest:
        raise OperationError(f"feature_ref is only for draft models, and this is a {run.role}: leave it out")

    async def release_hold(self, run: RunRecord, seq_id: int) -> None: ...

    async def release_holds_before(self, run: RunRecord, seq_id: int, *, were_used: bool) -> None: ...

    async def end_run(self, run: RunRecord) -> None: ...
