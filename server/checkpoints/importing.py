"""Adapters that PEFT has saved, uploaded in one body, as checkpoints. Their matrices are read by the workers alone."""

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...schemas.codec import parse_json
from ...schemas.errors import OperationError, RequestError
from ...schemas.models import LoraConfig
from ...workers.dispatch import WorkerDispatch
from ..config.served import require_served
from ..store import CheckpointRecord, RunRecord, SessionRecord
from ..tenants.auth import Tenant
from .checkpoints import Checkpoints
from .peft_config import PeftConfig

_UPLOADED = "uploaded.safetensors"


@dataclass(frozen=True)
class Upload:
    """weights: adapter_model.safetensors."""

    config: PeftConfig
    weights: memoryview


@dataclass(frozen=True)
class Import:
    """base_model: None = the one that the adapter's configuration names. name: of the checkpoint."""

    upload: Upload
    base_model: str | None
    name: str
    ttl_seconds: int | None


def read_upload(body: bytes, config_bytes: int) -> Upload:
    """adapter_config.json and adapter_model.safetensors, one behind the other. Raises RequestError."""
    try:
        config = parse_json(body[:config_bytes])
    except ValueError as error:
        raise RequestError(
            f"the first {config_bytes} bytes of the body (config_bytes) are no adapter_config.json: {error}"
        ) from None
    if not isinstance(config, dict):
        raise RequestError("adapter_config.json is not an object: send it as peft saved it")
    if len(body) == config_bytes:
        raise RequestError("the body ends with adapter_config.json: send adapter_model.safetensors behind it")
    return Upload(PeftConfig.read(config), memoryview(body)[config_bytes:])


async def import_checkpoint(
    dispatch: WorkerDispatch, checkpoints: Checkpoints, tenant: Tenant, wanted: Import, session: SessionRecord
) -> CheckpointRecord:
    """session: of which it is to be, with a run of its own; neither is in the store yet. Raises RequestError."""
    config, base_model = wanted.upload.config, _base_model(dispatch, wanted)
    lora = LoraConfig(rank=config.rank, alpha=config.alpha, seed=0)
    run = RunRecord(
        run_id=f"{session.session_id}:train:0",
        session_id=session.session_id,
        tenant_id=session.tenant_id,
        base_model=base_model,
        training=lora,
        created_at=session.created_at,
        last_request_at=session.created_at,
        user_metadata={"imported_from": "peft"},
    )

    async def write(directory: Path) -> LoraConfig:
        source = directory / _UPLOADED
        await asyncio.to_thread(source.write_bytes, wanted.upload.weights)
        try:
            return await dispatch.convert_adapter(base_model, source, lora, directory, tenant.name)
        finally:
            await asyncio.to_thread(partial(source.unlink, missing_ok=True))

    try:
        return await checkpoints.make(run, session, wanted.name, wanted.ttl_seconds, write)
    except OperationError as error:
        raise RequestError(error.message, 400 if error.category == "user" else 503) from error


def _base_model(dispatch: WorkerDispatch, wanted: Import) -> str:
    named = wanted.upload.config.base_model
    if wanted.base_model is None and named not in dispatch.models:
        raise RequestError(
            f"adapter_config.json names {named!r} as base model, which is not served here by that name: name one of "
            f"{', '.join(dispatch.models)} with base_model"
        )
    base_model = wanted.base_model or named or ""
    require_served(dispatch, base_model)
    return base_model
