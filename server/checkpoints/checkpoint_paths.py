"""Names and paths of checkpoints."""

import re

from ...schemas.errors import OperationError, RequestError
from ..store import CheckpointKind

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_name(name: str) -> str:
    """Returns the name. Raises OperationError (user) if it is not allowed."""
    if not _NAME.fullmatch(name):
        raise OperationError(
            f"checkpoint name {name!r} is not allowed: use 1 to 128 of A-Z a-z 0-9 . _ - without a leading dot"
        )
    return name


def parse_path(path: str) -> tuple[str, CheckpointKind, str]:
    """Returns run id, kind and name. Raises RequestError 400 if `path` is not a checkpoint path."""
    match path.removeprefix("tinker://").split("/"):
        case [run_id, ("weights" | "sampler_weights" | "external_weights") as kind, name] if run_id and name:
            return run_id, kind, name
    raise RequestError(
        f"{path!r} is not a checkpoint path: tinker://RUN_ID/weights/NAME (or sampler_weights, external_weights); a "
        "served model is named as base_model"
    )


def full_path(path: str) -> str:
    """Adds the scheme tinker://, which callers may leave out."""
    return f"tinker://{path.removeprefix('tinker://')}"
