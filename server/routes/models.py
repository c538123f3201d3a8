"""Routes that describe the server: base models, limits, worker memory, live models, and tokenizer files."""

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse
from huggingface_hub import try_to_load_from_cache

from ...schemas.errors import RequestError
from ...schemas.models import (
    GetInfoRequest,
    GetInfoResponse,
    Limits,
    ModelData,
    ServerCapabilities,
    SupportedModel,
    TokenizerFiles,
    Workers,
    draft_of,
    lora_of,
)
from ...schemas.verbs import MODEL_ID
from ...workers.protocol.worker_config import ServedModel
from ..http.bodies import json_body, json_parameter
from ..tenants.auth import OperatorDependency, TenantDependency
from ..text.hub_names import tokenizer_id
from .examples import FilePath, ModelPath
from .gate import is_local_request
from .services import ServicesDependency

router = APIRouter(prefix="/api/v1", tags=["models"])

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


@router.get("/get_server_capabilities", response_model_exclude_none=True)
async def get_server_capabilities(
    request: Request, services: ServicesDependency, tenant: TenantDependency
) -> ServerCapabilities:
    """Lists the base models that the server has loaded.

    A server that listens on a loopback address also names the directory of each model and the SHA-256 of its
    config.json, to clients on its machine: not if a proxy has forwarded the request.
    """
    files = services.model_files if is_local_request(request) else {}
    return ServerCapabilities(
        supported_models=[
            SupportedModel(
                model_name=model.name,
                max_context_length=model.max_context_length,
                directory=None if (found := files.get(model.name)) is None else found.directory,
                config_sha256=None if found is None else found.config_sha256,
            )
            for model in services.dispatch.models.values()
        ]
    )


@router.get("/limits")
async def get_limits(services: ServicesDependency, tenant: TenantDependency, is_operator: OperatorDependency) -> Limits:
    """Returns your tenant's name, your limits on queued work and on requests per minute, and how much is in use.

    A request over a limit is refused with 429 and `Retry-After`. Send it again after that time; clients do so
    automatically.
    """
    kept_bytes = services.futures.kept_bytes.of(tenant.id)
    num_runs, num_sessions = services.runs.num_live(tenant.id), services.sessions.num_open(tenant.id)
    limits = services.quotas.limits(tenant, num_runs, num_sessions, kept_bytes)
    stored = {
        "evaluation_bytes": services.context.evaluation_data.limit(tenant.id),
        "metric_bytes": await services.history.logged_bytes.limit(tenant.id),
        **await services.checkpoints.limits(tenant.id),
    }
    limits = limits.model_copy(update={**services.context.features.limits(tenant.id), **stored})
    return limits if is_operator else limits.without_other_tenants()


@router.get("/workers")
async def get_workers(services: ServicesDependency, tenant: TenantDependency) -> Workers:
    """Reports what the workers hold in memory and how fast they are, over all tenants; for operators."""
    dispatch = services.dispatch
    groups, utilization = await asyncio.gather(dispatch.memory(), dispatch.utilization())
    return Workers(groups=groups, utilization=utilization, features=services.context.features.stock())


@router.post(
    "/get_info", response_model_exclude_none=True, openapi_extra=json_body(GetInfoRequest, {"model_id": MODEL_ID})
)
async def get_info(
    http_request: Request,
    request: Annotated[GetInfoRequest, json_parameter(GetInfoRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> GetInfoResponse:
    """Describes a live model; waits until it has been created.

    `num_parameters` counts the weights that it trains, over all ranks. An adapter is scaled by lora_alpha / lora_rank;
    both are 0 for a full model and a draft. `target_path` is the policy checkpoint that a draft predicts, absent if it
    predicts the bare base model.
    """
    run = await services.runs.get(tenant, request.model_id)
    base, info = services.dispatch.models[run.record.base_model], await run.info()
    is_local = services.config.is_loopback and is_local_request(http_request)
    (served,) = (model for model in services.config.models.base_models if model.name == base.name)
    lora = lora_of(run.record.training)
    return GetInfoResponse(
        model_id=request.model_id,
        model_data=ModelData(arch=base.architecture, model_name=base.name, tokenizer_id=tokenizer_id(served, is_local)),
        is_lora=lora is not None,
        lora_rank=lora.rank if lora else 0,
        model_name=base.name,
        num_parameters=info.num_parameters,
        lora_alpha=lora.alpha if lora else 0.0,
        target_modules=list(info.target_modules) if lora else [],
        adapted=info.num_adapted,
        not_adapted=info.num_not_adapted,
        expert_factors=info.expert_factors,
        warning=info.warning,
        max_context_length=base.max_context_length,
        model_role=run.record.role,
        draft=draft_of(run.record.training),
        target_path=run.record.target_path,
    )


async def _served_model(name: ModelPath, services: ServicesDependency, tenant: TenantDependency) -> ServedModel:
    for model in services.config.models.base_models:
        if model.name == name:
            return model
    served = ", ".join(model.name for model in services.config.models.base_models)
    raise RequestError(f"base model {name} is not served here; use one of: {served}", status=404)


ServedDependency = Annotated[ServedModel, Depends(_served_model)]


@router.get("/models/{name:path}/tokenizer")
def tokenizer(request: Request, model: ServedDependency) -> TokenizerFiles:
    """Returns the URLs of a base model's tokenizer files, which transformers or tokenizers can load."""
    files = [file for file in TOKENIZER_FILES if _local_file(model, file)]
    if not any(file.startswith("tokenizer") for file in files):
        source = f" (source {model.source})" if is_local_request(request) else ""
        raise RequestError(
            f"the server has no tokenizer for {model.name}{source}: get it from the model's source", status=404
        )
    urls = {file: request.url_for("tokenizer_file", name=model.name, file=file) for file in files}
    return TokenizerFiles(files={file: str(url) for file, url in urls.items()})


@router.get("/models/{name:path}/tokenizer/{file}")
def tokenizer_file(file: FilePath, model: ServedDependency) -> FileResponse:
    """Returns one of the tokenizer files."""
    place = _local_file(model, file) if file in TOKENIZER_FILES else None
    if place is None:
        raise RequestError(f"the tokenizer of {model.name} has no file {file}", status=404)
    return FileResponse(place)


def _local_file(model: ServedModel, file: str) -> Path | None:
    """Finds a file in the model's directory or, for a Hugging Face id, in the local hub cache."""
    if Path(model.source).is_dir():
        place = Path(model.source) / file
        return place if place.is_file() else None
    if model.source.count("/") > 1 or model.source.startswith((".", "/")):
        return None
    cached = try_to_load_from_cache(model.source, file)
    return Path(cached) if isinstance(cached, str) else None
