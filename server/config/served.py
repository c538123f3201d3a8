"""Served: which base model a request is for, and whether it is served here."""

from ...schemas.errors import RequestError
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.verbs import ModelInfo
from ..store import CheckpointRecord


def require_served(dispatch: WorkerDispatch, base_model: str) -> ModelInfo:
    """Raises RequestError."""
    if base_model not in dispatch.models:
        raise RequestError(f"base model {base_model} is not served here: choose one of {', '.join(dispatch.models)}")
    return dispatch.models[base_model]


def base_model_of(checkpoint: CheckpointRecord, asked: str | None) -> str:
    """Raises RequestError when another one is asked for."""
    if asked not in (None, checkpoint.base_model):
        raise RequestError(
            f"{checkpoint.tinker_path} was trained on {checkpoint.base_model}, not on {asked}: leave out base_model"
        )
    return checkpoint.base_model
