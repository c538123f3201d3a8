"""Operations that train: forward, forward_backward and optim_step."""

import asyncio
from collections import Counter
from dataclasses import dataclass, replace

from ...schemas.codec import encode_forward_backward_output
from ...schemas.errors import OperationError
from ...schemas.training import (
    AdamParams,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)
from ...workers.protocol.calls import OptimizerStep, RunInfo
from ..http.bodies import LARGE_BYTES, Body
from ..journal.futures import Result
from ..journal.journal import Header
from ..store import RunRecord
from .context import OperationContext
from .operation import WEIGHT, Operation, json_result
from .scheduled_work import ScheduledWork


@dataclass(eq=False)
class ForwardBackward(Operation):
    """Computes losses and accumulates gradients. The request has the seeds that were drawn for it."""

    kind = "forward_backward"
    changes_state = True
    taints_if_failed = True
    reports_begin = True
    request: ForwardBackwardRequest

    @property
    def is_chained(self) -> bool:
        return not self.request.reads_recordings

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.request.data)

    @property
    def feature_uses(self) -> Counter[str]:
        return Counter(datum.feature_ref for datum in self.request.data if datum.feature_ref is not None)

    def size(self, body: Body) -> int:
        arrays = (array for datum in self.request.data for array in datum.loss_fn_inputs.values())
        return max(sum(array.nbytes for array in arrays) + 4 * self.num_tokens, len(body.received))

    def recall(self, header: Header) -> None:
        """Takes what its journal header has, in addition to the seeds, when it is read again."""

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        request = replace(self.request, seq_id=self.seq_id)
        if request.reads_recordings:
            request = await context.recordings.fill_in(run.tenant_id, request)
        if self.feature_uses:
            request = context.features.with_feature_location(run, request)
        output = await self._dispatch(context, run, request)
        self.metrics = {**output.metrics, WEIGHT: self.request.total_weight}
        arrays = (array for datum in output.loss_fn_outputs for array in datum.values())
        if sum(array.nbytes for array in arrays) < LARGE_BYTES:
            return Result(encode_forward_backward_output(output), "forward_backward")
        return Result(await asyncio.to_thread(encode_forward_backward_output, output), "forward_backward")

    async def _dispatch(
        self, context: OperationContext, run: RunRecord, request: ForwardBackwardRequest
    ) -> ForwardBackwardOutput:
        return await context.dispatch.forward_backward(request, self.mark_begun)

    async def undo(self, context: OperationContext, run: RunRecord, error: Exception) -> None:
        # After an internal error, the gradients may be there: the next step releases the features.
        if isinstance(error, OperationError):
            await context.features.release_hold(run, self.seq_id)


@dataclass(eq=False)
class Forward(ForwardBackward):
    """Computes losses alone. Since no optimizer step releases the features that it holds, it does so itself."""

    kind = "forward"
    changes_state = False
    taints_if_failed = False

    @property
    def feature_uses(self) -> Counter[str]:
        return Counter(dict.fromkeys(super().feature_uses, 0))

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        result = await super().perform(context, run)
        await context.features.release_hold(run, self.seq_id)
        return result

    async def undo(self, context: OperationContext, run: RunRecord, error: Exception) -> None:
        await context.features.release_hold(run, self.seq_id)


@dataclass(eq=False)
class OptimStep(Operation):
    """Takes an optimizer step, and then does what is scheduled after it.

    may_be_due: something may be due after it. skips_schedules: nothing is done after it, since workers died twice.
    """

    kind = "optim_step"
    changes_state = True
    is_step = True
    reports_begin = True
    request: OptimStepRequest
    may_be_due: bool = False
    skips_schedules: bool = False
    # The metrics of the step, and what the workers reported about the run when it was taken, which a rebuild replaces.
    _taken: tuple[dict[str, float], RunInfo | None] | None = None

    @property
    def is_chained(self) -> bool:
        return not self.may_be_due

    def check(self, run: RunRecord) -> None:
        if run.role == "reference":
            raise OperationError("a reference is not trained: load_weights moves it to another checkpoint of a policy")

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        info = context.infos.get(run.run_id)
        if self._taken is None or self._taken[1] is not info:
            self._taken = await self._take_step(context, run), info
        metrics, warnings = dict(self._taken[0]), list[str]()
        self.step = int(metrics["optimizer_step:last"])
        if run.schedules.is_due_within(self.step, self.step):
            if self.skips_schedules:
                reason = f"workers died twice in step {self.step} or the work after it"
                warnings.append(f"{reason}: that work was left out")
            else:
                work = ScheduledWork(context, run, self.step, self.seq_id, self.reservation, metrics, warnings)
                await work.run_all()
        self.metrics = {**metrics, "learning_rate": self._adam_params.learning_rate}
        # Last, since the passes before the step are repeated if the worker is lost before its result is known.
        await context.features.release_holds_before(run, self.seq_id, were_used=True)
        return json_result(OptimStepResponse(metrics=metrics, warnings=warnings or None))

    async def replay(self, context: OperationContext, run: RunRecord) -> None:
        await self._take_step(context, run)
        await context.features.release_holds_before(run, self.seq_id, were_used=True)

    async def _take_step(self, context: OperationContext, run: RunRecord) -> dict[str, float]:
        if self.request.optimizer_params is not None:
            raise OperationError(
                f"optimizer {self.request.optimizer_params.get('type')!r} is not supported: send adam_params (AdamW)"
            )
        step = OptimizerStep(run.run_id, self._adam_params, self.request.gradient_scale, seq_id=self.seq_id)
        return await context.dispatch.optim_step(step, self.mark_begun)

    @property
    def _adam_params(self) -> AdamParams:
        return self.request.adam_params or AdamParams()

    async def undo(self, context: OperationContext, run: RunRecord, error: Exception) -> None:
        is_refusal = isinstance(error, OperationError) and error.category == "user"
        if is_refusal and self.request.optimizer_params is None:  # the gradients are cleared
            await context.features.release_holds_before(run, self.seq_id, were_used=False)
