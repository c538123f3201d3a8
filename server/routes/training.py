"""Routes that create models and submit operations to their runs; submission.py has the code that they share."""

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
from ...schemas.models import CreateModelRequest, UnloadModelRequest
from ...schemas.schedules import DeleteEvaluationRequest, ScheduleCheckpointsRequest
from ...schemas.training import MAX_INTEGER, OptimStepRequest
from ..http.bodies import (
    ReceivedBody,
    json_body,
    json_decoder,
    json_or_protobuf_body,
    json_parameter,
)
from ..operations.loading import LoadWeights
from ..tenants.auth import TenantDependency
from ..tenants.reservation import Reservation
from .examples import BASE_MODEL, CHECKPOINT, DRAFT_ID, MODEL_ID, NAME, SESSION_ID
from .services import ServicesDependency
from .submission import (
    SUBMIT_RESPONSES,
    ReceivedRequest,
    receive_operation,
    receive_unordered,
    submit_operation,
    submit_request,
    submit_response,
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
            "maximum": MAX_INTEGER,
            "description": "1, 2, 3, ...; default: the next one",
        },
        "loss_fn": {"type": "string", "description": "cross_entropy, importance_sampling, ppo, cispo, dro, gspo, ..."},
        "loss_fn_config": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
        "forward_only": {"type": "boolean", "default": False},
        "loss_weight": {"type": "number", "default": 1.0},
        "capture_for": {"type": "string", "description": "policies only: the draft that will learn from this pass"},
        "evaluation": {
            "type": "object",
            "description": "create_evaluation only",
            "required": ["name", "every"],
            "properties": {
                "name": {"type": "string"},
                "every": {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER},
            },
        },
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
                    "feature_ref": {"type": "string", "description": "drafts only: the reference from capture"},
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
_EVALUATION_BODY = json_or_protobuf_body(
    _FORWARD_BACKWARD_SCHEMA,
    {**_FORWARD_BACKWARD_EXAMPLE, "evaluation": {"name": "heldout", "every": 10}},
    "trainhouse.wire.ForwardBackwardRequest; may be zstd",
)
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
    """Creates a LoRA adapter on a base model or, without `lora_config`, a full model that trains all weights.

    Its id is `SESSION_ID:train:MODEL_SEQ_ID`. `training` is `lora` (then `lora_config` is optional) or `full`.

    `model_role` is `policy`; `critic`, whose head predicts a value per token; `reference`, which is not trained; or
    `draft`, which predicts the tokens of a policy: `draft` configures it, `target_path` names the policy's checkpoint.
    """
    with Reservation(services.quotas, tenant.id) as reservation:
        received = await receive_unordered(request, reservation, json_decoder(CreateModelRequest))
        submitted = await services.runs.create(tenant, received.content, received.raw, reservation)
    return await submit_response(request, services, tenant, SubmitResponse(request_id=submitted.request_id))


@router.post("/forward_backward", openapi_extra=_FORWARD_BACKWARD_BODY)
async def forward_backward(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Computes losses and accumulates gradients until optim_step. Losses are sums over tokens and datums.

    The body is JSON, or protobuf as the Tinker SDK sends it.
    """
    return await submit_request(request, services, tenant, "forward_backward")


@router.post("/forward", openapi_extra=_FORWARD_BACKWARD_BODY)
async def forward(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Computes losses and log-probabilities (values for a critic) without gradients, like forward_backward with
    `forward_only`."""
    return await submit_request(request, services, tenant, "forward")


@router.post("/optim_step", openapi_extra=json_body(OptimStepRequest, {"model_id": MODEL_ID, "adam_params": {}}))
async def optim_step(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Takes one AdamW step on the gradients accumulated since the last step, and clears them.

    Fails, and clears them too, if a forward_backward since the last step failed or was refused.
    """
    return await submit_request(request, services, tenant, "optim_step")


_SAVE_BODY = json_body(SaveWeightsRequest, {"model_id": MODEL_ID, "path": NAME, "overwrite": True})


@router.post("/save_checkpoint", openapi_extra=_SAVE_BODY)
@router.post("/save_weights", openapi_extra=_SAVE_BODY)
async def save_weights(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Saves weights and optimizer state as of the last optimizer step, as a named checkpoint for resuming.

    Gradients accumulated since that step are not saved; the live model keeps them.
    """
    return await submit_request(request, services, tenant, "save_weights")


@router.post(
    "/save_weights_for_sampler",
    openapi_extra=json_body(SaveWeightsForSamplerRequest, {"model_id": MODEL_ID, "path": NAME}),
)
async def save_weights_for_sampler(
    request: Request, services: ServicesDependency, tenant: TenantDependency
) -> Response:
    """Saves the weights alone: with `path` as a named checkpoint, without it as a sampling session."""
    return await submit_request(request, services, tenant, "save_weights_for_sampler")


@router.post(
    "/save_weights_external",
    openapi_extra=json_body(SaveWeightsExternalRequest, {"model_id": MODEL_ID, "path": "export"}),
)
async def save_weights_external(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Saves an adapter as tinker-cookbook reads it, or a full model in Hugging Face's format.

    external_weights_urls returns the URLs of its files.
    """
    return await submit_request(request, services, tenant, "save_weights_external")


_LOAD_BODY = json_body(
    LoadWeightsRequest,
    {"model_id": MODEL_ID, "path": CHECKPOINT, "optimizer": True},
)


@router.post("/load_checkpoint", openapi_extra=_LOAD_BODY)
@router.post("/load_weights", openapi_extra=_LOAD_BODY)
async def load_weights(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Loads a checkpoint into a live model (`model_id`) or into a new one (`session_id` and `model_seq_id`).

    A live model discards the gradients accumulated since its last optimizer step. With `optimizer` false, the optimizer
    starts fresh.
    """
    decode = json_decoder(LoadWeightsRequest)
    with Reservation(services.quotas, tenant.id) as reservation:
        received = await receive_operation(request, services, tenant, reservation, "load_weights", decode)
        load, received = received.content, _without_secret(received)
        if load.model_id is not None:
            reader = await services.checkpoints.reader_id(load.weights_access_token)
            operation = LoadWeights(load.path, load.optimizer, reader)
            response = await submit_operation(services, tenant, received, operation, reservation)
        else:
            created = await services.runs.create_from_checkpoint(tenant, load, received.raw, reservation)
            response = SubmitResponse(request_id=created.request_id)
    return await submit_response(request, services, tenant, response)


@router.post("/unload_model", openapi_extra=json_body(UnloadModelRequest, {"model_id": MODEL_ID}))
async def unload_model(
    request: Annotated[UnloadModelRequest, json_parameter(UnloadModelRequest)],
    http_request: Request,
    services: ServicesDependency,
    tenant: TenantDependency,
) -> Response:
    """Ends a live model and frees its memory. Its checkpoints stay, and so do the samplers and models of its session.

    Operations that have not begun fail. SDKs up to 0.25 can send this.
    """
    request_id = await services.runs.unload(tenant, request.model_id)
    submitted = SubmitResponse(request_id=request_id, model_id=request.model_id)
    return await submit_response(http_request, services, tenant, submitted)


@router.post("/set_target", openapi_extra=json_body(SetTargetRequest, {"model_id": DRAFT_ID, "path": CHECKPOINT}))
async def set_target(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Makes a draft predict this checkpoint of a policy from now on; `path` null selects the bare base model.

    The draft keeps its weights and the gradients accumulated since its last optimizer step.
    """
    return await submit_request(request, services, tenant, "set_target")


@router.post(
    "/build_vocab_map",
    openapi_extra=json_body(BuildVocabMapRequest, {"model_id": DRAFT_ID, "tokens": [[5, 6, 7, 6]]}),
)
async def build_vocab_map(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Sets a draft's vocabulary to the `draft_vocab_size` most frequent tokens.

    A draft with a reduced vocabulary needs this before its first forward_backward. Frequencies are those of the
    `tokens` whose `weights` are not 0, or `counts` by token id.
    """
    return await submit_request(request, services, tenant, "build_vocab_map")


@router.post(
    "/capture",
    openapi_extra=json_body(CaptureRequest, {"model_id": DRAFT_ID, "data": [{"model_input": [5, 6, 7, 6]}]}),
)
async def capture(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Stores the hidden states of a draft's target for these tokens on the server.

    Data of `forward_backward` and `forward` can refer to them by `feature_ref`; the target is not run again for those.
    If no room is free, or the draft is not created yet, the request waits and then answers 429. See docs/drafts.md.
    """
    return await submit_request(request, services, tenant, "capture")


@router.post(
    "/schedule_checkpoints",
    openapi_extra=json_body(
        ScheduleCheckpointsRequest, {"model_id": MODEL_ID, "checkpoints": {"every": 100, "keep_last": 3}}
    ),
)
async def schedule_checkpoints(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Saves a checkpoint after every so many optimizer steps from now on, and deletes its older ones.

    The last `keep_last` are kept, and the `keep_best` with the best `metric`. `checkpoints` null ends that.
    """
    return await submit_request(request, services, tenant, "schedule_checkpoints")


@router.post("/create_evaluation", openapi_extra=_EVALUATION_BODY)
async def create_evaluation(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Evaluates a loss on these data now, and after every `evaluation.every`-th optimizer step from now on.

    The body is that of `forward` with `evaluation`. Results are in the metrics of the step, as
    `evaluation/NAME/loss:mean` and so on. Replaces the model's evaluation of the same name.
    """
    return await submit_request(request, services, tenant, "create_evaluation")


@router.post(
    "/delete_evaluation", openapi_extra=json_body(DeleteEvaluationRequest, {"model_id": MODEL_ID, "name": "heldout"})
)
async def delete_evaluation(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Ends an evaluation and deletes its data. Does nothing if there is none of this name."""
    return await submit_request(request, services, tenant, "delete_evaluation")


@router.post("/release_features", openapi_extra=json_body(ReleaseFeaturesRequest, {"model_id": DRAFT_ID}))
async def release_features(
    request: Annotated[ReleaseFeaturesRequest, json_parameter(ReleaseFeaturesRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> ReleaseFeaturesResponse:
    """Releases features captured for this model, all or `feature_refs`; immediately, out of the order of operations.

    Features that an accepted operation still needs are deleted after the optimizer step that follows it.
    """
    run = await services.runs.get(tenant, request.model_id)
    num_released = await services.features.release(run.record, request.feature_refs)
    return ReleaseFeaturesResponse(num_released=num_released)


def _without_secret(received: ReceivedRequest[LoadWeightsRequest]) -> ReceivedRequest[LoadWeightsRequest]:
    """The access token is another tenant's API key, and bodies are journaled as received."""
    if received.content.weights_access_token is None:
        return received
    shown = received.content.model_copy(update={"weights_access_token": None})
    body = shown.model_dump_json(exclude_none=True).encode()
    return ReceivedRequest(ReceivedBody(body, received.raw.limits, digest=received.raw.digest), shown)
