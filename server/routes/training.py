"""Creating models, and the operations of a model being trained: decoded, authorized, handed to its Run."""

from typing import Annotated

from fastapi import APIRouter, Request, Response

from ...schemas.checkpoints import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from ...schemas.drafts import (
    BuildVocabMapRequest,
    CaptureRequest,
    ReleaseFeaturesRequest,
    ReleaseFeaturesResponse,
    SetTargetRequest,
)
from ...schemas.futures import SubmitResponse
from ...schemas.models import CreateModelRequest
from ...schemas.training import MOST_INTEGER, ForwardBackwardRequest, OptimStepRequest
from ..http.bodies import (
    Decoder,
    Received,
    forward_backward_decoder,
    json_body,
    json_decoder,
    json_or_protobuf_body,
    json_parameter,
)
from ..runs.operations import LoadWeights
from ..tenants.auth import TenantDependency
from .examples import BASE_MODEL, CHECKPOINT, DRAFT_ID, MODEL_ID, NAME, SESSION_ID
from .services import ServicesDependency
from .submitting import (
    SUBMIT_RESPONSES,
    Submit,
    answer,
    receive_operation,
    receive_unordered,
    run_operation,
    submit_operation,
)

router = APIRouter(prefix="/api/v1", tags=["training"], responses=SUBMIT_RESPONSES)

_FORWARD_BACKWARD_SCHEMA: dict[str, object] = {
    "type": "object",
    "required": ["model_id", "data", "loss_fn"],
    "properties": {
        "model_id": {"type": "string"},
        "seq_id": {
            "type": "integer",
            "minimum": 0,
            "maximum": MOST_INTEGER,
            "description": "1, 2, 3, ...; left out: the next one",
        },
        "loss_fn": {"type": "string", "description": "cross_entropy, importance_sampling, ppo, cispo, dro, gspo, ..."},
        "loss_fn_config": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
        "forward_only": {"type": "boolean", "default": False},
        "loss_weight": {"type": "number", "default": 1.0},
        "capture_for": {"type": "string", "description": "of policies: a draft that is to learn from this very pass"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "model_input": {
                        "description": 'token ids, or {"chunks": [{"type": "encoded_text", "tokens": [...]}]}',
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
                    },
                    "loss_fn_inputs": {
                        "type": "object",
                        "description": "name -> numbers, or {data, dtype, shape}",
                        "additionalProperties": {"type": "array", "items": {"type": "number"}},
                    },
                    "feature_ref": {"type": "string", "description": "of drafts: what capture answered for it"},
                },
            },
        },
    },
}
_FORWARD_BACKWARD_EXAMPLE: dict[str, object] = {
    "model_id": MODEL_ID,
    "data": [
        {
            "model_input": [1, 2, 3],
            "loss_fn_inputs": {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
        }
    ],
    "loss_fn": "cross_entropy",
}
_FORWARD_BACKWARD_BODY = json_or_protobuf_body(
    _FORWARD_BACKWARD_SCHEMA, _FORWARD_BACKWARD_EXAMPLE, "trainhouse.wire.ForwardBackwardRequest; may be zstd"
)


@router.post(
    "/create_model",
    openapi_extra=json_body(
        CreateModelRequest,
        {
            "session_id": SESSION_ID,
            "model_seq_id": 0,
            "base_model": BASE_MODEL,
            "lora_config": {"rank": 16},
        },
    ),
)
async def create_model(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """A new LoRA adapter on a base model, or, without `lora_config`, a full model: all weights are its own.

    Its id is `SESSION_ID:train:MODEL_SEQ_ID`. `training`: `lora` (then `lora_config` may be left out) or `full`.

    `model_role`: `policy`; `critic`, whose head gives a value for each token; `reference`, which stays as it is; or
    `draft`, which guesses what a policy will say: `draft` says how, `target_path` which checkpoint of a policy.
    """
    with services.quotas.admission(tenant.id) as admission:
        submit = await receive_unordered(request, admission, json_decoder(CreateModelRequest))
        submitted = await services.runs.create(tenant, submit.content, submit.received, admission)
    return await answer(request, services, tenant, SubmitResponse(request_id=submitted.request_id))


@router.post("/forward_backward", openapi_extra=_FORWARD_BACKWARD_BODY)
async def forward_backward(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Losses are sums over tokens and datums; gradients accumulate until optim_step.

    Protobuf, as the Tinker SDK sends it, or JSON.
    """
    return await run_operation(request, services, tenant, "forward_backward", _decoder(request))


@router.post("/forward", openapi_extra=_FORWARD_BACKWARD_BODY)
async def forward(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """The same as forward_backward with `forward_only`: losses, and log-probabilities or values, but no gradients."""
    return await run_operation(request, services, tenant, "forward", _decoder(request, forward_only=True))


@router.post("/optim_step", openapi_extra=json_body(OptimStepRequest, {"model_id": MODEL_ID, "adam_params": {}}))
async def optim_step(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """One AdamW step over the gradients accumulated since the last one, which it consumes.

    It fails, and clears them, where a forward_backward since the last step failed or was refused.
    """
    return await run_operation(request, services, tenant, "optim_step", json_decoder(OptimStepRequest))


_SAVE_BODY = json_body(SaveWeightsRequest, {"model_id": MODEL_ID, "path": NAME, "overwrite": True})


@router.post("/save_checkpoint", openapi_extra=_SAVE_BODY)
@router.post("/save_weights", openapi_extra=_SAVE_BODY)
async def save_weights(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Weights and optimizer as of the last optimizer step, as a named checkpoint to go on from.

    Gradients accumulated since that step are not saved, and stay where they are.
    """
    return await run_operation(request, services, tenant, "save_weights", json_decoder(SaveWeightsRequest))


@router.post(
    "/save_weights_for_sampler",
    openapi_extra=json_body(SaveWeightsForSamplerRequest, {"model_id": MODEL_ID, "path": NAME}),
)
async def save_weights_for_sampler(
    request: Request, services: ServicesDependency, tenant: TenantDependency
) -> Response:
    """With `path`: a named checkpoint of the weights alone. Without: a sampling session with the weights of now."""
    decode = json_decoder(SaveWeightsForSamplerRequest)
    return await run_operation(request, services, tenant, "save_weights_for_sampler", decode)


@router.post(
    "/save_weights_external",
    openapi_extra=json_body(SaveWeightsExternalRequest, {"model_id": MODEL_ID, "path": "export"}),
)
async def save_weights_external(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """The adapter as PEFT files, a full model as Hugging Face's; external_weights_urls says where to download them."""
    decode = json_decoder(SaveWeightsExternalRequest)
    return await run_operation(request, services, tenant, "save_weights_external", decode)


_LOAD_BODY = json_body(
    LoadWeightsRequest,
    {"model_id": MODEL_ID, "path": CHECKPOINT, "optimizer": True},
)


@router.post("/load_checkpoint", openapi_extra=_LOAD_BODY)
@router.post("/load_weights", openapi_extra=_LOAD_BODY)
async def load_weights(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """A checkpoint into a live model (model_id), or a new model from it (session_id and model_seq_id).

    Into a live model: gradients accumulated since the last optimizer step are discarded. `optimizer` false: with a
    fresh optimizer.
    """
    decode = json_decoder(LoadWeightsRequest)
    with services.quotas.admission(tenant.id) as admission:
        submit = await receive_operation(request, services, tenant, admission, "load_weights", decode)
        load, submit = submit.content, _without_secret(submit)
        if load.model_id is not None:
            reader = await services.checkpoints.reader(load.weights_access_token)
            operation = LoadWeights(load.path, load.optimizer, reader)
            response = await submit_operation(services, tenant, submit, operation, admission)
        else:
            created = await services.runs.create_from_checkpoint(tenant, load, submit.received, admission)
            response = SubmitResponse(request_id=created.request_id)
    return await answer(request, services, tenant, response)


@router.post("/set_target", openapi_extra=json_body(SetTargetRequest, {"model_id": DRAFT_ID, "path": CHECKPOINT}))
async def set_target(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """From here on a draft guesses this checkpoint of a policy of its base model; `path` null: the bare base model.

    What it has learned stays, and so do gradients accumulated since the last optimizer step.
    """
    return await run_operation(request, services, tenant, "set_target", json_decoder(SetTargetRequest))


@router.post(
    "/build_vocab_map",
    openapi_extra=json_body(BuildVocabMapRequest, {"model_id": DRAFT_ID, "tokens": [[5, 6, 7, 6]]}),
)
async def build_vocab_map(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """The `draft_vocab_size` most frequent tokens are what a draft can say; before its first forward_backward, which
    fails without it unless a draft can say all tokens.

    Of `tokens` those count whose `weights` are not 0; or give `counts`, by token id.
    """
    return await run_operation(request, services, tenant, "build_vocab_map", json_decoder(BuildVocabMapRequest))


@router.post(
    "/capture",
    openapi_extra=json_body(CaptureRequest, {"model_id": DRAFT_ID, "data": [{"model_input": [5, 6, 7, 6]}]}),
)
async def capture(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """What a draft's target has inside at these tokens is kept on the server: data of `forward_backward` and `forward`
    may carry its `feature_ref`, and the target is not run for them.

    It waits for room, and for a draft that is not created yet, and then answers 429. See docs/drafts.md.
    """
    return await run_operation(request, services, tenant, "capture", json_decoder(CaptureRequest))


@router.post("/release_features", openapi_extra=json_body(ReleaseFeaturesRequest, {"model_id": DRAFT_ID}))
async def release_features(
    request: Annotated[ReleaseFeaturesRequest, json_parameter(ReleaseFeaturesRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> ReleaseFeaturesResponse:
    """Gives up what this model has captured, all of it or `feature_refs`; done at once, out of the order of operations.

    What an operation needs whose optimizer step has not finished is deleted behind that.
    """
    run = await services.runs.get(tenant, request.model_id)
    num_released = await services.features.release(run.record, request.feature_refs)
    return ReleaseFeaturesResponse(num_released=num_released)


def _without_secret(submit: Submit[LoadWeightsRequest]) -> Submit[LoadWeightsRequest]:
    """The access token is another tenant's API key, and bodies are journaled as received."""
    if submit.content.weights_access_token is None:
        return submit
    shown = submit.content.model_copy(update={"weights_access_token": None})
    return Submit(Received(shown.model_dump_json(exclude_none=True).encode()), shown)


def _decoder(request: Request, forward_only: bool = False) -> Decoder[ForwardBackwardRequest]:
    return forward_backward_decoder(request.headers.get("content-type", "application/json"), forward_only)
