"""Checks which checkpoints can be loaded into which models, and which can be the target of a draft model."""

from ...schemas.errors import OperationError, RequestError
from ...schemas.models import DraftConfig, FullConfig, LoraConfig, Role
from ..store import CheckpointRecord, RunRecord

_TRAININGS = {LoraConfig: "a LoRA adapter", FullConfig: "a full model", DraftConfig: "a draft model"}
_WHY_APART = {"critic": "critics have a different head", "draft": "drafts have a different network"}


def check_role(checkpoint: CheckpointRecord, role: Role) -> None:
    """Raises RequestError if the checkpoint's weights do not fit a model of this role."""
    if not _same_weights(checkpoint.role, role):
        apart = checkpoint.role if checkpoint.role in _WHY_APART else role
        raise RequestError(
            f"{checkpoint.tinker_path} was saved by a {checkpoint.role}: no {role} can be created from it, since "
            f"{_WHY_APART[apart]}"
        )


def check_loadable(run: RunRecord, checkpoint: CheckpointRecord, optimizer: bool) -> None:
    """Raises OperationError if the checkpoint cannot be loaded into the run."""
    if checkpoint.base_model != run.base_model:
        raise OperationError(
            f"{checkpoint.tinker_path} was trained on {checkpoint.base_model}, run {run.run_id} on "
            f"{run.base_model}: load it into a run of the same base model"
        )
    if not _same_weights(checkpoint.role, run.role):
        raise OperationError(
            f"{checkpoint.tinker_path} was saved by a {checkpoint.role}, and run {run.run_id} is a {run.role}: "
            f"load it into a {checkpoint.role}"
        )
    if run.role != "reference" and type(run.training) is not type(checkpoint.training):
        theirs, ours = (_TRAININGS[type(each)] for each in (checkpoint.training, run.training))
        raise OperationError(
            f"{checkpoint.tinker_path} is of {theirs}, and run {run.run_id} is {ours}: create a model from it "
            "(create_training_client_from_state)"
        )
    if optimizer and not checkpoint.has_optimizer:
        raise OperationError(
            f"{checkpoint.tinker_path} has no optimizer state: load its weights alone (load_state(path), in JSON "
            '"optimizer": false), or load a checkpoint that save_state wrote'
        )


def check_target(checkpoint: CheckpointRecord, base_model: str) -> None:
    """Raises RequestError if the checkpoint cannot be the target of a draft model of this base model."""
    if checkpoint.role != "policy":
        raise RequestError(
            f"{checkpoint.tinker_path} was saved by a {checkpoint.role}: the target of a draft must be a policy's "
            "checkpoint"
        )
    if checkpoint.base_model != base_model:
        raise RequestError(
            f"{checkpoint.tinker_path} was trained on {checkpoint.base_model}, and the draft is of {base_model}: its "
            "target must be a checkpoint of the same base model"
        )


def _same_weights(one: Role, other: Role) -> bool:
    """A reference has a policy's weights, but is not trained."""
    return one == other or {one, other} == {"policy", "reference"}
