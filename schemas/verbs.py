"""Table of verbs: the operations of a run, from which routes, scopes, decoding, OpenAPI and the client's paths follow.

The `type` of a verb's request is its name. Its operation is in server/operations, the client's method in
client/training.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from .checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from .models import CreateModelRequest, CreateModelResponse
from .schedules import (
    CreateEvaluationResponse,
    DeleteEvaluationRequest,
    DeleteEvaluationResponse,
    ScheduleCheckpointsRequest,
    ScheduleCheckpointsResponse,
)
from .training import (
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    OptimStepRequest,
    OptimStepResponse,
    Request,
)

Answer = TypeVar("Answer")

SESSION_ID = "3f1c0f6a9d2b4e58"
MODEL_ID = f"{SESSION_ID}:train:0"
BASE_MODEL = "Qwen/Qwen3-0.6B"
NAME = "step-100"
CHECKPOINT = f"tinker://{MODEL_ID}/weights/{NAME}"
_PASS: dict[str, object] = {
    "model_id": MODEL_ID,
    "data": [
        {
            "model_input": [1, 2, 3],
            "loss_fn_inputs": {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
        }
    ],
    "loss_fn": "cross_entropy",
}


@dataclass(frozen=True)
class Verb(Generic[Answer]):
    """An operation of a run, as clients ask for it at /api/v1/NAME with the scope train."""

    name: str
    """The last part of the path, and the operation's kind in the journal."""
    request: type[Request] | type[ForwardBackwardRequest]
    """Bodies of ForwardBackwardRequest are JSON or protobuf, others JSON."""
    answer: type[Answer]
    example: Mapping[str, object]
    description: str
    alias: str | None = None
    """Another last part of the path."""
    is_large: bool = False
    """True if bodies carry training data, so that they may be as large as --max-body-bytes."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Returns the paths of its routes below /api/v1/."""
        return (self.name,) if self.alias is None else (self.name, self.alias)


CREATE_MODEL = Verb(
    "create_model",
    CreateModelRequest,
    CreateModelResponse,
    {"session_id": SESSION_ID, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 16}},
    """Creates a LoRA adapter on a base model or, without `lora_config`, a full model that trains all weights.

    Its id is `SESSION_ID:train:MODEL_SEQ_ID`. `training` is `lora` (then `lora_config` is optional) or `full`.

    `model_role` is `policy`; `critic`, whose head predicts a value per token; `reference`, which is not trained; or
    `draft`, which predicts the tokens of a policy: `draft` configures it, `target_path` names the policy's checkpoint.
    """,
)
FORWARD_BACKWARD = Verb(
    "forward_backward",
    ForwardBackwardRequest,
    ForwardBackwardOutput,
    _PASS,
    """Computes losses and accumulates gradients until optim_step. Losses are sums over tokens and datums.

    The body is JSON, or protobuf as the Tinker SDK sends it.
    """,
    is_large=True,
)
FORWARD = Verb(
    "forward",
    ForwardBackwardRequest,
    ForwardBackwardOutput,
    _PASS,
    """Computes losses and log-probabilities (values for a critic) without gradients, like forward_backward with
    `forward_only`.""",
    is_large=True,
)
OPTIM_STEP = Verb(
    "optim_step",
    OptimStepRequest,
    OptimStepResponse,
    {"model_id": MODEL_ID, "adam_params": {}},
    """Takes one AdamW step on the gradients accumulated since the last step, and clears them.

    Fails, and clears them too, if a forward_backward since the last step failed or was refused.
    """,
)
SAVE_WEIGHTS = Verb(
    "save_weights",
    SaveWeightsRequest,
    SaveWeightsResponse,
    {"model_id": MODEL_ID, "path": NAME, "overwrite": True},
    """Saves weights and optimizer state as of the last optimizer step, as a named checkpoint for resuming.

    Gradients accumulated since that step are not saved; the live model keeps them.
    """,
    alias="save_checkpoint",
)
SAVE_WEIGHTS_FOR_SAMPLER = Verb(
    "save_weights_for_sampler",
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    {"model_id": MODEL_ID, "path": NAME},
    """Saves the weights alone: with `path` as a named checkpoint, without it as a sampling session.""",
)
SAVE_WEIGHTS_EXTERNAL = Verb(
    "save_weights_external",
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    {"model_id": MODEL_ID, "path": "export"},
    """Saves an adapter as tinker-cookbook reads it, or a full model in Hugging Face's format.

    external_weights_urls returns the URLs of its files.
    """,
)
LOAD_WEIGHTS = Verb(
    "load_weights",
    LoadWeightsRequest,
    LoadWeightsResponse,
    {"model_id": MODEL_ID, "path": CHECKPOINT, "optimizer": True},
    """Loads a checkpoint into a live model (`model_id`) or into a new one (`session_id` and `model_seq_id`).

    A live model discards the gradients accumulated since its last optimizer step. With `optimizer` false, the optimizer
    starts fresh.
    """,
    alias="load_checkpoint",
)
SCHEDULE_CHECKPOINTS = Verb(
    "schedule_checkpoints",
    ScheduleCheckpointsRequest,
    ScheduleCheckpointsResponse,
    {"model_id": MODEL_ID, "checkpoints": {"every": 100, "keep_last": 3}},
    """Saves a checkpoint after every so many optimizer steps from now on, and deletes its older ones.

    The last `keep_last` are kept, and the `keep_best` with the best `metric`. `checkpoints` null ends that.
    """,
)
CREATE_EVALUATION = Verb(
    "create_evaluation",
    ForwardBackwardRequest,
    CreateEvaluationResponse,
    {**_PASS, "evaluation": {"name": "heldout", "every": 10}},
    """Evaluates a loss on these data now, and after every `evaluation.every`-th optimizer step from now on.

    The body is that of `forward` with `evaluation`. Results are in the metrics of the step, as
    `evaluation/NAME/loss:mean` and so on. Replaces the model's evaluation of the same name.
    """,
    is_large=True,
)
DELETE_EVALUATION = Verb(
    "delete_evaluation",
    DeleteEvaluationRequest,
    DeleteEvaluationResponse,
    {"model_id": MODEL_ID, "name": "heldout"},
    """Ends an evaluation and deletes its data. Does nothing if there is none of this name.""",
)

VERBS: Mapping[str, Verb] = {
    verb.name: verb
    for verb in (
        *(CREATE_MODEL, FORWARD_BACKWARD, FORWARD, OPTIM_STEP),
        *(SAVE_WEIGHTS, SAVE_WEIGHTS_FOR_SAMPLER, SAVE_WEIGHTS_EXTERNAL, LOAD_WEIGHTS),
        *(SCHEDULE_CHECKPOINTS, CREATE_EVALUATION, DELETE_EVALUATION),
    )
}
