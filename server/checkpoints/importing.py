"""Imports uploaded PEFT adapters as checkpoints. The server only lists their tensors, in a separate process; workers
read and convert them.
"""

import asyncio
import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...schemas.adapters.adapter_header import check_header, header_of
from ...schemas.adapters.peft import PeftConfig
from ...schemas.codec import parse_json
from ...schemas.errors import OperationError, RequestError
from ...schemas.models import LoraConfig
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import AdapterFile
from ..config.base_model_lookup import require_served
from ..http.decoding import decode_in_process
from ..store import CheckpointRecord, RunRecord, SessionRecord
from ..tenants.auth import Tenant
from .checkpoints import Checkpoints
from .copies import create_checkpoint

_UPLOADED = "uploaded.safetensors"


@dataclass(frozen=True)
class AdapterUpload:
    """A PEFT adapter as uploaded: the content of its two files, and the digest of the whole body."""

    config: PeftConfig
    weights: memoryview
    digest: str


@dataclass(frozen=True)
class ImportRequest:
    """A request to import an adapter as a new checkpoint of this name."""

    upload: AdapterUpload
    base_model: str | None
    """The one that the adapter's configuration names, if None."""
    name: str
    ttl_seconds: int | None


def read_upload(body: bytes, config_bytes: int) -> AdapterUpload:
    """Splits a body of adapter_config.json followed by adapter_model.safetensors. Raises RequestError."""
    try:
        config = parse_json(body[:config_bytes])
    except ValueError as error:
        raise RequestError(
            f"the first {config_bytes} bytes of the body (config_bytes) are not valid JSON: {error}"
        ) from None
    if not isinstance(config, dict):
        raise RequestError("adapter_config.json is not a JSON object: send it as PEFT saved it")
    if len(body) == config_bytes:
        raise RequestError("the body ends with adapter_config.json: append adapter_model.safetensors")
    digest = hashlib.sha256(body).hexdigest()
    return AdapterUpload(PeftConfig.read(config), memoryview(body)[config_bytes:], digest)


async def import_checkpoint(
    dispatch: WorkerDispatch, checkpoints: Checkpoints, tenant: Tenant, request: ImportRequest, session: SessionRecord
) -> CheckpointRecord:
    """Creates the checkpoint in a new run of `session`, neither of which is in the store yet. Raises RequestError: 400
    if the adapter or the base model is refused, 503 if it could not be saved."""
    config, base_model = request.upload.config, _base_model(dispatch, request)
    header = header_of(request.upload.weights)
    await decode_in_process(check_header, header, None, len(header))
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
        asked=request.upload.digest,
    )

    async def write(directory: Path) -> LoraConfig:
        source = directory / _UPLOADED
        uploaded = AdapterFile(str(source), config.peft_version, config.parameters)
        await asyncio.to_thread(source.write_bytes, request.upload.weights)
        try:
            return await dispatch.convert_adapter(base_model, uploaded, lora, directory, tenant.name)
        finally:
            await asyncio.to_thread(partial(source.unlink, missing_ok=True))

    try:
        return await create_checkpoint(checkpoints, run, session, request.name, request.ttl_seconds, write)
    except OperationError as error:
        raise RequestError(error.message, 400 if error.category == "user" else 503) from error


def _base_model(dispatch: WorkerDispatch, wanted: ImportRequest) -> str:
    named = wanted.upload.config.base_model
    if wanted.base_model is None and named not in dispatch.models:
        raise RequestError(
            f"adapter_config.json names {named!r} as base model, which this server does not serve under that name: "
            f"set base_model to one of {', '.join(dispatch.models)}"
        )
    base_model = wanted.base_model or named or ""
    require_served(dispatch, base_model)
    return base_model
