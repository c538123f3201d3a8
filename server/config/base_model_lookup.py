"""Finds the base model of a request and refuses one that is not served here."""

from ...schemas.errors import RequestError
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import ModelInfo
from ..store import CheckpointRecord


def require_served(dispatch: WorkerDispatch, base_model: str) -> ModelInfo:
    """Returns the model's info. Raises RequestError if it is not served here."""
    if base_model not in dispatch.models:
        raise RequestError(f"base model {base_model} is not served here: choose one of {', '.join(dispatch.models)}")
    return dispatch.models[base_model]


def base_model_of(checkpoint: CheckpointRecord, requested: str | None) -> str:
    """Returns the checkpoint's base model. Raises RequestError if the request names another one."""
    if requested not in (None, checkpoint.base_model):
        raise RequestError(
            f"{checkpoint.tinker_path} was trained on {checkpoint.base_model}, not on {requested}: leave out base_model"
        )
    return checkpoint.base_model
