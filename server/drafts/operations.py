"""Operations for draft models: set_target, build_vocab_map, capture, and passes of a policy that capture features."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from ...schemas.drafts import BuildVocabMapRequest, CaptureRequest, SetTargetRequest, SetTargetResponse
from ...schemas.errors import OperationError
from ...schemas.models import draft_of
from ...schemas.training import Datum, DraftFeatures, FeatureLocation, ForwardBackwardOutput, ForwardBackwardRequest
from ..checkpoints.checkpoint_paths import full_path
from ..http.bodies import Body
from ..journal.futures import Result
from ..journal.journal import Header, request_id_of
from ..operations.context import OperationContext
from ..operations.loading import load_target
from ..operations.operation import Operation, json_result
from ..operations.training import Forward, ForwardBackward
from ..store import RunRecord
from .feature_store import FEATURES, store_of
from .vocabulary import build_vocabulary

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SetTarget(Operation):
    """Changes a draft's target; pending gradients and the draft's weights stay as they are."""

    kind = "set_target"
    changes_state = True
    changes_record = True
    sets_target = True
    request: SetTargetRequest

    def __post_init__(self) -> None:
        self.loads_files = self.request.path is not None

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        if run.role != "draft":
            raise OperationError(f"a {run.role} has no target: set_target is only for draft models")
        find = partial(context.checkpoints.resolve_for, readers={run.tenant_id})
        path = self.request.path and full_path(self.request.path)
        await load_target(context, run, self.seq_id, path, find, is_replay=False)
        await context.store.runs.set_target(run.run_id, path)
        return json_result(SetTargetResponse(target_path=path))

    async def replay(self, context: OperationContext, run: RunRecord) -> None:
        find, path = context.find_checkpoint, self.request.path
        await load_target(context, run, self.seq_id, path, find, is_replay=True)


@dataclass(eq=False)
class BuildVocabMap(Operation):
    """Sets a draft's vocabulary, which clears its pending gradients."""

    kind = "build_vocab_map"
    changes_state = True
    clears_gradients = True
    request: BuildVocabMapRequest

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        draft = draft_of(run.training)
        if draft is None:
            raise OperationError(f"a {run.role} uses the full vocabulary: build_vocab_map is only for draft models")
        vocab_size = context.dispatch.models[run.base_model].vocab_size
        size = draft.draft_vocab_size or vocab_size
        vocabulary = await asyncio.to_thread(build_vocabulary, self.request, size, vocab_size)
        await context.dispatch.set_vocabulary(run.run_id, vocabulary.token_ids)
        await context.features.release_holds_before(run, self.seq_id, were_used=False)
        return json_result(vocabulary.described())


class FeatureCapture(Operation):
    """An operation that captures features of a target for a draft, for which room is reserved when it is accepted."""

    stores_features = True
    can_skip: ClassVar[bool]
    """True if the operation runs without capturing when there is no room, instead of being throttled."""
    has_room = True
    """False if it does so."""

    @property
    @abstractmethod
    def draft_id(self) -> str:
        """Returns the run id of the draft."""

    @property
    @abstractmethod
    def sequence_lengths(self) -> Sequence[int]: ...

    @property
    def ttl_seconds(self) -> float | None:
        return None


@dataclass(eq=False)
class Capture(FeatureCapture):
    """Runs a pass of the target alone; features that are already stored are not computed again."""

    kind = "capture"
    can_skip = False
    reports_begin = True
    request: CaptureRequest

    @property
    def draft_id(self) -> str:
        return self.request.model_id

    @property
    def sequence_lengths(self) -> Sequence[int]:
        return [len(each.tokens) for each in self.request.data]

    @property
    def ttl_seconds(self) -> float | None:
        return self.request.ttl_seconds

    @property
    def num_tokens(self) -> int:
        return sum(self.sequence_lengths)

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        if run.role != "draft":
            raise OperationError(f"a {run.role} has no target: capture is only for draft models")
        data = tuple(Datum(np.asarray(each.tokens, np.int32)) for each in self.request.data)
        async with AsyncExitStack() as held:
            location = await _open_capture(context, run, held)
            request = ForwardBackwardRequest(
                run.run_id, self.seq_id, data, self.request.type, forward_only=True, features=location
            )
            output = await context.dispatch.forward_backward(request, self.mark_begun)
            uses, seconds, request_id = (
                self.request.uses,
                self.request.ttl_seconds,
                request_id_of(run.run_id, self.seq_id),
            )
            kept = await store_of(context.features).keep(run, request_id, output, uses, seconds)
            if kept is None:
                gone = f"features have disappeared from {location.directory}: capture again"
                raise OperationError(gone, "server")
        return json_result(kept)


@dataclass(eq=False)
class ForwardBackwardWithCapture(ForwardBackward, FeatureCapture):
    """A policy's pass that captures features for one use by a draft.

    Data whose features found no room, or could not be stored, have no reference; the policy's training is the same.
    """

    can_skip = True

    @property
    def is_chained(self) -> bool:
        return False

    @property
    def draft_id(self) -> str:
        assert self.request.capture_for is not None
        return self.request.capture_for

    @property
    def sequence_lengths(self) -> Sequence[int]:
        return [len(datum.tokens) for datum in self.request.data]

    def recall(self, header: Header) -> None:
        self.has_room = header.feature_bytes is not None

    def header(self, run: RunRecord, body: Body) -> Header:
        header = super().header(run, body)
        return header if self.has_room else replace(header, feature_bytes=None)

    async def _dispatch(
        self, context: OperationContext, run: RunRecord, request: ForwardBackwardRequest
    ) -> ForwardBackwardOutput:
        draft = _checked_draft(run, await context.store.runs.get(self.draft_id), self.draft_id)
        if not context.sessions.is_open(draft.session_id):
            raise OperationError(
                f"draft {draft.run_id}, named by capture_for, has ended with its session: create one, and name its"
                " model_id"
            )
        if not self.has_room:
            return await self._run_without_capture(context, request)
        async with AsyncExitStack() as held:
            try:
                location = replace(await _open_capture(context, run, held), captures=False)
                location = replace(location, draft=await _features_of(context, draft))
            except OperationError as error:
                if error.category == "user":
                    raise
                logger.error("run %s captures nothing for %s: %s", run.run_id, draft.run_id, error)
                return await self._run_without_capture(context, request)
            output = await context.dispatch.forward_backward(replace(request, features=location), self.mark_begun)
            return await self._with_references(context, run, draft, output)

    async def _run_without_capture(
        self, context: OperationContext, request: ForwardBackwardRequest
    ) -> ForwardBackwardOutput:
        output = await context.dispatch.forward_backward(replace(request, capture_for=None), self.mark_begun)
        return replace(output, feature_refs=(None,) * len(request.data))

    async def _with_references(
        self, context: OperationContext, run: RunRecord, draft: RunRecord, output: ForwardBackwardOutput
    ) -> ForwardBackwardOutput:
        """Returns the output with references to the captured features in place of what the workers wrote about them."""
        captured = tuple(each for each in output.loss_fn_outputs if FEATURES in each)
        features, request_id = store_of(context.features), request_id_of(run.run_id, self.seq_id)
        try:
            kept = await features.keep(draft, request_id, replace(output, loss_fn_outputs=captured), uses=1)
        except OSError as error:
            logger.error("run %s captures nothing for %s: %s", run.run_id, draft.run_id, error)
            kept = None
        if kept is not None and not context.sessions.is_open(draft.session_id):  # it may have ended during the pass
            await features.release(draft, kept.feature_refs)
            kept = None
        # If some features have already disappeared, no references are returned.
        refs = iter(kept.feature_refs if kept is not None else [None] * len(captured))
        outputs = [{name: each for name, each in one.items() if name != FEATURES} for one in output.loss_fn_outputs]
        of_each = tuple(next(refs) if FEATURES in one else None for one in output.loss_fn_outputs)
        return replace(output, loss_fn_outputs=tuple(outputs), feature_refs=of_each)


class ForwardWithCapture(ForwardBackwardWithCapture, Forward):
    """A policy's forward pass that captures features."""


OPERATIONS: Mapping[str, type[Operation]] = {each.kind: each for each in (SetTarget, BuildVocabMap, Capture)}
PASSES = {"backward": ForwardBackwardWithCapture, "forward": ForwardWithCapture}
"""Passes of policies that capture features."""


def _checked_draft(run: RunRecord, draft: RunRecord | None, draft_id: str) -> RunRecord:
    """Returns the draft. Raises OperationError if this run's passes cannot be captured for it."""
    if draft is None or draft.tenant_id != run.tenant_id:
        raise OperationError(f"there is no draft {draft_id} to capture for: create one, and name its model_id")
    if draft.role != "draft":
        raise OperationError(f"capture_for {draft_id} is a {draft.role}: name a draft")
    if draft.base_model != run.base_model:
        raise OperationError(f"capture_for {draft_id} is a draft of {draft.base_model}, and this is {run.base_model}")
    if run.role != "policy":
        raise OperationError(f"capture_for is only for policies, and this is a {run.role}: leave it out")
    return draft


async def _features_of(context: OperationContext, draft: RunRecord) -> DraftFeatures:
    """Returns what a policy's pass must capture for the draft while it trains. Raises OperationError if unknown."""
    config = draft_of(draft.training)
    assert config is not None and config.capture_layers is not None
    features = DraftFeatures(config.algorithm, config.capture_layers, config.target_repr, config.target_top_k)
    if config.target_repr != "pruned_logits" or config.target_top_k is not None:
        return features
    vocabulary = await context.dispatch.vocabulary(draft.run_id)
    return replace(features, vocabulary=vocabulary.astype(np.int32).tobytes())


async def _open_capture(context: OperationContext, run: RunRecord, held: AsyncExitStack) -> FeatureLocation:
    """Enters FeatureStore.capturing until `held` is closed. Raises OperationError if features cannot be written."""
    try:
        return await held.enter_async_context(store_of(context.features).capturing(run.tenant_id))
    except OSError as error:
        raise OperationError(
            f"features cannot be written: {error}: make room on this disk, and see that the server may write there",
            "server",
        ) from None
