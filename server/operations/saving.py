"""Operations that save a run's weights: save_weights, save_weights_for_sampler and save_weights_external."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ...schemas.adapters.adapter_files import write_for_cookbook
from ...schemas.checkpoints import (
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from ...schemas.errors import OperationError
from ...schemas.schedules import METRIC_KEY, STEP_KEY
from ..files.encryption import encrypt_files, parse_recipients
from ..journal.futures import Result
from ..journal.journal import request_id_of
from ..logs.repeated_errors import refusing_full_disk
from ..store import CheckpointKind, RunRecord, checkpoint_path
from ..tenants.auth import Tenant
from .context import OperationContext
from .operation import Operation, json_result


@dataclass(eq=False)
class SaveWeights(Operation):
    """Saves the state after the last optimizer step; pending gradients stay pending."""

    kind = "save_weights"
    request: SaveWeightsRequest

    def check(self, run: RunRecord) -> None:
        if reserved := {STEP_KEY, METRIC_KEY} & (self.request.user_metadata or {}).keys():
            raise OperationError(f"user_metadata has {min(reserved)}, which marks scheduled checkpoints: leave it out")

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        request = self.request
        writing = CheckpointSave("weights", request.path, request.ttl_seconds, request.user_metadata, request.overwrite)
        return json_result(SaveWeightsResponse(path=await writing.publish(context, run, self.seq_id)))


@dataclass(eq=False)
class SaveWeightsForSampler(Operation):
    """Saves the weights alone, as a named checkpoint or, without a path, as an ephemeral sampler."""

    kind = "save_weights_for_sampler"
    request: SaveWeightsForSamplerRequest

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        request = self.request
        if run.role not in ("policy", "draft"):
            raise OperationError(f"a {run.role} cannot be sampled: sample from a policy")
        if run.role == "draft" and request.path is None:
            raise OperationError("a draft cannot be sampled by itself: give a path under which its weights are saved")
        if request.path is None:
            sampler_id = await context.samplers.create_ephemeral(run, request, self.seq_id)
            return json_result(SaveWeightsForSamplerResponse(sampling_session_id=sampler_id))
        writing = CheckpointSave("sampler_weights", request.path, request.ttl_seconds, request.user_metadata)
        return json_result(SaveWeightsForSamplerResponse(path=await writing.publish(context, run, self.seq_id)))


@dataclass(eq=False)
class SaveWeightsExternal(Operation):
    """Saves an adapter under the official service's names, or a full model, for download through
    external_weights_urls."""

    kind = "save_weights_external"
    request: SaveWeightsExternalRequest

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        request, recipients = self.request, self.request.age_encryption_recipients or ()
        writing = CheckpointSave("external_weights", request.path, request.ttl_seconds, recipients=recipients)
        path = await writing.publish(context, run, self.seq_id)
        saved = await context.checkpoints.resolve(Tenant(run.tenant_id, ""), path)
        return json_result(SaveWeightsExternalResponse(path=path, size_bytes=saved.size_bytes))


@dataclass(frozen=True)
class CheckpointSave:
    """A checkpoint to be written; recipients: public keys to which its files are encrypted."""

    kind: CheckpointKind
    name: str
    ttl_seconds: int | None
    metadata: dict[str, str] | None = None
    overwrite: bool = False
    recipients: Sequence[str] = ()

    async def publish(self, context: OperationContext, run: RunRecord, seq_id: int) -> str:
        """Writes and publishes the checkpoint, unless this request already has; returns its path.

        Only checkpoints of kind `weights` include the optimizer state.
        """
        if run.role == "reference":
            raise OperationError(
                "a reference cannot be saved: its weights are those of the checkpoint it was loaded from"
            )
        request_id = request_id_of(run.run_id, seq_id)
        if not await context.checkpoints.was_saved(run, self.kind, self.name, request_id):
            optimizer, recipients = self.kind == "weights", parse_recipients(self.recipients)
            writing = context.checkpoints.writing(
                run,
                self.kind,
                self.name,
                self.overwrite,
                self.ttl_seconds,
                self.metadata,
                has_optimizer=optimizer,
                request_id=request_id,
            )
            with refusing_full_disk("the checkpoint was"):
                async with writing as staging:
                    await context.dispatch.save_run(run.run_id, staging, optimizer=optimizer)
                    if self.kind == "external_weights":
                        await asyncio.to_thread(write_for_cookbook, staging)
                    await asyncio.to_thread(encrypt_files, staging, recipients)
        return checkpoint_path(run.run_id, self.kind, self.name)
