"""Description: what trainhouse.json says of a saved model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig, LoraConfig, TrainingConfig
from ..learner import Learner, Window
from ..lora import Adapter
from ..programs import PROGRAMS
from ..programs.policy import POLICY

_NAME = "trainhouse.json"

# Of adapters, and of models with weights of their own, which the first cannot describe.
_FORMAT, _FULL_FORMAT = 1, 2


class Description:
    """content: of the file. directory: where it was read, for errors."""

    def __init__(self, content: dict[str, Any], directory: Path) -> None:
        self._content, self._directory = content, directory

    @staticmethod
    def of(model: Learner, num_steps: int, window: Window | None, base_name: str) -> dict[str, Any]:
        about = {"base_model": base_name, "role": model.program.role, "num_steps": num_steps}
        of_window = {} if window is None else {"window": asdict(window)}
        if isinstance(model, Adapter):
            targets = [target.name for target in model.targets]
            return {"format": _FORMAT, **about, "lora": model.lora.model_dump(), "targets": targets, **of_window}
        return {"format": _FULL_FORMAT, **about, **model.training.model_dump(), **of_window}

    @staticmethod
    def read(directory: Path) -> "Description":
        """Raises OperationError where there is none, or one that this server does not understand."""
        path = directory / _NAME
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise OperationError(f"{directory} is no checkpoint: it has no {_NAME}") from None
        except ValueError as error:
            raise OperationError(f"{path} is damaged: {error}") from None
        if (found := content.get("format")) not in (_FORMAT, _FULL_FORMAT):
            raise OperationError(f"{path} has format {found}; this server reads formats {_FORMAT} and {_FULL_FORMAT}")
        return Description(content, directory)

    @property
    def training(self) -> TrainingConfig:
        if "lora" in self._content:
            return LoraConfig.model_validate(self._content["lora"])
        return FullConfig.model_validate({"training": self._content["training"], "seed": self._content["seed"]})

    @property
    def num_steps(self) -> int:
        return self._content["num_steps"]

    @property
    def window(self) -> Window:
        return Window(**self._content.get("window", {}))

    def check(self, model: Learner) -> None:
        """Raises OperationError where the model cannot become what was saved."""
        role = self._content.get("role", POLICY.role)
        if role not in PROGRAMS:
            raise OperationError(
                f"{self._directory} was saved by a {role}, of which this trainhouse knows nothing: upgrade it"
            )
        ours, theirs = model.program, PROGRAMS[role]
        if ours.scores != theirs.scores:
            raise OperationError(
                f"{self._directory} was saved by a {theirs.role}, and the model is a {ours.role}: load it into a"
                f" {theirs.role}"
            )
        if isinstance(model, Adapter):
            self._check_adapter(model)
        elif isinstance(self.training, LoraConfig):
            raise OperationError(
                f"{self._directory} is an adapter, and the model has weights of its own: create a model with LoRA and"
                " load into that"
            )

    def _check_adapter(self, adapter: Adapter) -> None:
        directory, saved = self._directory, self.training
        if isinstance(saved, FullConfig):
            raise OperationError(
                f"{directory} has all weights of a model, and the model trains an adapter: create one with training"
                " full and load into that"
            )
        for name in ("rank", "alpha"):
            ours, theirs = getattr(adapter.lora, name), getattr(saved, name)
            if ours != theirs:
                raise OperationError(
                    f"{directory} was saved with {name} {theirs}, the model has {name} {ours}:"
                    f" create a model with {name} {theirs} and load into that"
                )
        ours, theirs = {target.name for target in adapter.targets}, set(self._content["targets"])
        if ours != theirs:
            raise OperationError(
                f"{directory} adapts other layers than the model: only the checkpoint has {few(theirs - ours)}, only"
                f" the model has {few(ours - theirs)}; use the train_attn, train_mlp and train_unembed it was saved"
                " with"
            )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def few(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if shown else "nothing"
