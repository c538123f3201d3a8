"""Reserves room for the features that an operation captures, when it is accepted."""

import logging

from ...schemas.errors import RequestError
from ...schemas.futures import Pending
from ..http.bodies import Body, RunRequest
from ..journal.journal import request_id_of
from ..operations.operation import Operation
from ..routes.services import Services
from ..routes.submission import count_as_refused
from ..runs.run import Run
from ..tenants.auth import Tenant
from ..tenants.quotas import Reservation
from .feature_store import store_of
from .operations import FeatureCapture
from .space import FeatureLimitExceeded

logger = logging.getLogger(__name__)

_FEATURE_HEADER_BYTES = 1024
_NOT_CREATED_SECONDS = 1.0


async def reserve_features(
    services: Services, tenant: Tenant, content: RunRequest, body: Body, operation: Operation, reservation: Reservation
) -> None:
    """Reserves room for the features that the operation captures. Raises RequestError: no room (the client retries), or
    the operation is wrong, which uses up its seq_id.

    A policy's pass runs without capturing if there is no room: it must not fail because of its draft, and waiting could
    deadlock, if the room is released only by operations behind this one.
    """
    assert isinstance(operation, FeatureCapture)
    try:
        run, draft = [await services.runs.get(tenant, one) for one in (content.model_id or "", operation.draft_id)]
        if content.seq_id and run.queue.arrived_before(content.seq_id):  # a retry has it; 0 requests the next free one
            return
        features = store_of(services.context.features)
        features.check_ttl(operation.ttl_seconds)
        of_token = await _feature_bytes(services, draft)
        num_bytes = sum(of_token * length + _FEATURE_HEADER_BYTES for length in operation.sequence_lengths if of_token)
        reservation.add_features(num_bytes, await features.space.reserve(tenant.id, num_bytes))
    except RequestError as error:
        if isinstance(error, FeatureLimitExceeded) and operation.can_skip:
            logger.warning("run %s captures nothing for %s: %s", content.model_id, operation.draft_id, error.message)
            operation.has_room = False
            return
        await count_as_refused(services, tenant, operation.kind, body, error)
        raise


async def _feature_bytes(services: Services, draft: Run) -> int:
    """Returns the bytes of captured features per token; 0 if the model is no draft or could not be created. Raises
    RequestError 429 if the draft is not created within feature_wait_seconds."""
    try:
        return (await draft.info()).feature_bytes
    except RequestError:
        record, seconds = draft.record, services.config.features.feature_wait_seconds
    created = await services.futures.wait(request_id_of(record.run_id, 0), record.tenant_id, seconds)
    if isinstance(created, Pending):
        message = f"draft {record.run_id} is not created yet: retry when its create_model has finished"
        raise RequestError(message, 429, retry_after_seconds=_NOT_CREATED_SECONDS)
    return 0 if created.is_error else (await draft.info()).feature_bytes
