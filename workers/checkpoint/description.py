"""Reads and writes trainhouse.json, which describes a saved model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...schemas.bounds import load_json
from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig, TrainingConfig, training_of
from ..programs.policy import POLICY
from ..registry.programs import program_of
from ..state.gradients import GradientWindow
from ..state.trainable import Trainable

_NAME = "trainhouse.json"

# The format for adapters, and the one for other models, which the first cannot describe.
_FORMAT, _FULL_FORMAT = 1, 2


class CheckpointDescription:
    """Holds the content of a trainhouse.json."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    @staticmethod
    def of(model: Trainable, num_steps: int, window: GradientWindow | None, base_name: str) -> dict[str, Any]:
        about = {"base_model": base_name, "role": model.program.role, "num_steps": num_steps}
        of_window = {} if window is None else {"window": asdict(window)}
        if isinstance(model.training, LoraConfig):
            return {"format": _FORMAT, **about, "lora": model.training.model_dump(), **of_window}
        return {"format": _FULL_FORMAT, **about, **model.training.model_dump(), **of_window}

    @staticmethod
    def read(directory: Path) -> "CheckpointDescription":
        """Reads the directory's description. Raises OperationError if it is missing, damaged or of an unknown
        format."""
        try:
            content = load_json((directory / _NAME).read_text())
        except FileNotFoundError:
            raise OperationError(f"its directory is not a checkpoint: it has no {_NAME}") from None
        except ValueError as error:
            raise OperationError(f"{_NAME} is damaged: {error}") from None
        if (found := content.get("format")) not in (_FORMAT, _FULL_FORMAT):
            raise OperationError(
                f"the checkpoint has format {found}; this server reads formats {_FORMAT} and {_FULL_FORMAT}"
            )
        return CheckpointDescription(content)

    @property
    def training(self) -> TrainingConfig:
        return training_of(self.content.get("lora", self.content))

    @property
    def num_steps(self) -> int:
        return self.content["num_steps"]

    @property
    def window(self) -> GradientWindow:
        return GradientWindow(**self.content.get("window", {}))

    @property
    def is_snapshot(self) -> bool:
        return "window" in self.content

    @property
    def adapted_layers(self) -> set[str]:
        return set(self.content["targets"])

    def check(self, model: Trainable) -> None:
        """Raises OperationError if a model of another role was saved."""
        role = self.content.get("role", POLICY.role)
        try:
            theirs = program_of(role, self.training)
        except (KeyError, ValueError):
            raise OperationError(
                f"the checkpoint was saved by a {role}, a role that this version of trainhouse does not support:"
                " upgrade it"
            ) from None
        ours = model.program
        if ours.head != theirs.head:
            raise OperationError(
                f"the checkpoint was saved by a {theirs.role}, and the model is a {ours.role}: load it into a"
                f" {theirs.role}"
            )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def few(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if shown else "nothing"
