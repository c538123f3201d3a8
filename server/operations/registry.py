"""Finds the operation that a request asks for, and reads operations back from the journal."""

from collections.abc import Mapping
from dataclasses import replace

from ...schemas.errors import RequestError
from ...schemas.training import SEED, ForwardBackwardRequest
from ...workers.protocol.plugins import plugin_rows
from ..files.segment_log import RecordPosition
from ..http.bodies import RunRequest
from ..journal.journal import Header, Journal, draw_seed
from ..journal.request_decoding import decode_entry
from .loading import CreateRun, CreateRunFromCheckpoint, LoadWeights
from .operation import Operation, Outcome, RefusedOperation
from .saving import SaveWeights, SaveWeightsExternal, SaveWeightsForSampler
from .schedules import CreateEvaluation, DeleteEvaluation, ScheduleCheckpoints
from .training import Forward, ForwardBackward, OptimStep

_ALL = (
    *(CreateRun, CreateRunFromCheckpoint, LoadWeights),
    *(ForwardBackward, Forward, OptimStep),
    *(SaveWeights, SaveWeightsForSampler, SaveWeightsExternal),
    *(CreateEvaluation, DeleteEvaluation, ScheduleCheckpoints),
)
OPERATIONS: Mapping[str, type[Operation]] = {
    **{each.kind: each for each in _ALL},
    **plugin_rows("server.drafts.operations", "OPERATIONS"),
}
"""Operations by their kind in the journal."""

STATE_KINDS = {each.kind for each in (*OPERATIONS.values(), RefusedOperation) if each.changes_state}
"""Kinds of operations without which a run's state cannot be rebuilt."""

TARGET_KINDS = {each.kind for each in OPERATIONS.values() if each.sets_target}
"""Kinds of operations that set the target of a draft, or may."""

TAINTING_KINDS = {each.kind for each in OPERATIONS.values() if each.taints_if_failed}
"""Kinds of operations without which the next optimizer step would be wrong."""

CLEARING_KINDS = {each.kind for each in OPERATIONS.values() if each.clears_gradients}
"""Kinds of operations that clear pending gradients, so that failures before them do not taint the next step."""


def operation_of(request: RunRequest, header: Header | None = None) -> Operation:
    """Returns the operation of a run that was requested.

    Args:
        header: the journal's, if it is read back; a new operation has no header, and the seeds drawn that it lacks.
    """
    if not isinstance(request, ForwardBackwardRequest):
        kind: str = request.type if header is None else header.kind  # pyright: ignore[reportAttributeAccessIssue]
        return OPERATIONS[kind].of(request, header)
    drawn = {} if header is None else header.drawn
    if header is None and request.lacks_seed:
        drawn = {SEED: draw_seed()}
    if drawn:
        seeds = {name: float(seed) for name, seed in drawn.items()}
        request = replace(request, loss_fn_config={**request.loss_fn_config, **seeds})
    if request.evaluation is not None:
        operation = CreateEvaluation(request)
    elif request.capture_for is None:
        operation = (Forward if request.forward_only else ForwardBackward)(request)
    else:
        row = plugin_rows("server.drafts.operations", "PASSES").get("forward" if request.forward_only else "backward")
        if row is None:
            raise RequestError("capture_for needs server/drafts, which this installation is without: leave it out")
        operation = row(request)
    operation.drawn = drawn
    if header is not None:
        operation.recall(header)
    return operation


async def read_operation(journal: Journal, place: RecordPosition, outcome: Outcome | None = None) -> Operation:
    """Returns the operation as it was accepted.

    Args:
        outcome: how it ended, if it is read to be replayed.
    Raises:
        OSError, ValueError: the entry cannot be read.
        RequestError: this version would not accept the operation.
    """
    entry = await journal.read(place)
    header, request = entry.header, await decode_entry(entry)
    if isinstance(request, ForwardBackwardRequest):
        if outcome is Outcome.DONE:
            # The references to what it captured were already returned. An operation that failed must fail again.
            request = replace(request, capture_for=None)
    elif header.kind not in OPERATIONS:
        raise ValueError(f"the journal's entry at {place} is a {header.kind} request, which is no operation of a run")
    return operation_of(request, header)  # pyright: ignore[reportArgumentType]  (its numbers)
